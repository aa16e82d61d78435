"""Stops a chain where the drafter is unsure, with a threshold that follows acceptance.

A row drafts on while the token that it drafted last had at least the probability ``threshold`` by
the drafter's own softmax. The token below the threshold is still proposed. After a round in which
``accepted`` of ``offered`` tokens were accepted::

    rate      <- a * rate + (1 - a) * accepted / offered
    wanted     = threshold + step    if rate < target_rate
                 threshold           if the round was not stopped
                 threshold - step    otherwise
    threshold <- b * threshold + (1 - b) * wanted

Lossless: where a chain ends depends on tokens that are all proposed, so each of them still has the
law that the draft states.

References: Draft & Verify, arXiv 2309.08168, section 3.3 (the defaults are those of its code);
Kangaroo, arXiv 2404.18911, section 3.2, and SWIFT, arXiv 2410.06916 (``step=0``).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass


@pytree_dataclass
class StopState:
    """What is remembered, row by row.

    Attributes:
      threshold: float32 ``[B]``.
      rate: float32 ``[B]``, the smoothed share of accepted tokens; it begins at 0.
      offered: int32 ``[B]``, tokens of the round under way; 0 between rounds.
    """

    threshold: jax.Array
    rate: jax.Array
    offered: jax.Array


@dataclasses.dataclass(frozen=True)
class ConfidenceStop:
    """When a chain ends early.

    Attributes:
      threshold: in [0, 1]; where it begins.
      target_rate: in [0, 1]; the acceptance rate that the threshold is to bring about.
      step: at least 0; 0: the threshold stays as it is.
      rate_decay: a, in [0, 1].
      threshold_decay: b, in [0, 1].

    Raises:
      ValueError: a setting is out of range.
    """

    threshold: float = 0.6
    target_rate: float = 0.9
    step: float = 0.01
    rate_decay: float = 0.5
    threshold_decay: float = 0.9

    def __post_init__(self):
        for name in ("threshold", "target_rate", "rate_decay", "threshold_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"ConfidenceStop({name}={getattr(self, name)}): it is in [0, 1]")
        if self.step < 0:
            raise ValueError(f"ConfidenceStop(step={self.step}): it is at least 0")

    def init(self, batch: int) -> StopState:
        """What is remembered before the first round."""
        return StopState(
            threshold=jnp.full((batch,), self.threshold, jnp.float32),
            rate=jnp.zeros((batch,), jnp.float32),
            offered=jnp.zeros((batch,), jnp.int32),
        )

    def update(self, state: StopState, accepted, live, whole) -> StopState:
        """What is remembered after a round.

        Args:
          accepted: int32 ``[B]``, of the tokens that were offered.
          live: bool ``[B]``, whether the row took part.
          whole: bool ``[B]``, whether all was offered that a round offers if it is not stopped.
        """
        share = accepted / jnp.maximum(state.offered, 1)
        rate = self.rate_decay * state.rate + (1 - self.rate_decay) * share
        change = jnp.where(rate < self.target_rate, 1.0, jnp.where(whole, 0.0, -1.0))
        wanted = state.threshold + self.step * change
        threshold = self.threshold_decay * state.threshold + (1 - self.threshold_decay) * wanted
        threshold = jnp.clip(threshold, 0.0, 1.0)
        live = live & (state.offered > 0)
        return StopState(
            threshold=jnp.where(live, threshold, state.threshold),
            rate=jnp.where(live, rate, state.rate),
            offered=jnp.zeros_like(state.offered),
        )


@dataclasses.dataclass(frozen=True)
class CumulativeStop:
    """When a chain ends by the cumulative confidence of its laws: LLMCad.

    The product of the greatest probabilities of the drafter's softmax, from the root down, is the
    probability that it gives to its own best text. A row drafts until this product is below the
    threshold; the token below it is still proposed. After a round in which ``accepted`` of
    ``offered`` tokens were accepted::

        threshold <- threshold / 2                      if all of them were
                     (offered - accepted) / offered     otherwise

    Lossless: what is compared is known before a token is drawn.

    Differs from the paper, whose confidence is that of the token taken, which is the same for
    greedy drafts, and whose prose has another schedule than its equation 3, which this is.

    Attributes:
      threshold: in (0, 1); where it begins.
      lowest: in (0, 1); the threshold is never less.

    Raises:
      ValueError: a setting is out of range.

    References: LLMCad, arXiv 2309.04255, section 3.
    """

    threshold: float = 0.01
    lowest: float = 1e-6

    def __post_init__(self):
        for name in ("threshold", "lowest"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"CumulativeStop({name}={getattr(self, name)}): it is in (0, 1)")

    def init(self, batch: int) -> jax.Array:
        """The thresholds before the first round: float32 ``[B]``."""
        return jnp.full((batch,), self.threshold, jnp.float32)

    def update(self, threshold: jax.Array, offered: jax.Array, accepted: jax.Array) -> jax.Array:
        """The thresholds after a round.

        Args:
          threshold: float32 ``[B]``, those before it.
          offered: int32 ``[B]``, tokens that the row proposed; 0: its threshold stays.
          accepted: int32 ``[B]``, how many of them were accepted.
        """
        wrong = jnp.maximum(offered - accepted, 0) / jnp.maximum(offered, 1)
        changed = jnp.where(wrong > 0, wrong, threshold / 2)
        changed = jnp.clip(changed, self.lowest, 1 - self.lowest)
        return jnp.where(offered > 0, changed, threshold)
