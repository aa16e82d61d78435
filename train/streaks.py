"""Weights of the places of a block by the streak of tokens that is accepted up to them.

    q_j   the probability that the drafter gives the text's token in place j, exp(-CE_j), which is
          softmax(logits / T) with T the field streak_temperature
    streak      loss = -sum_m  prod_{i <= m} q_i
    ce-streak   loss =  sum_j  sg(prod_{i < j} q_i) CE_j
    d-pace      loss =  sum_j  sg(sum_{m >= j} prod_{i <= m} s_i) CE_j
    s_i         (1 - alpha) q_i + alpha

``sg`` stops the gradient, ``alpha`` is the field ``pace_floor``. The loss of ``streak`` is the
expected length of the accepted beginning, negated, where a token is accepted with the probability
that the drafter gives it. Its gradient is that of ``d-pace`` with ``alpha = 0``; with ``alpha = 1``
``d-pace`` has the fixed weights K, K - 1, ... 1. A place that is not to be learned counts as 1 in
the products and as 0 in the sums.

T is the temperature at which the drafter is to draw, as in SpecDiff-2 (1 where it is left out).
Cross-entropies that are logged are at T too.

The losses are means over blocks. Probabilities are computed in one pass over the vocabulary without
a gradient, before the pass that has one.

Differs from the papers: published trainers divide D-PACE's loss by the number of rows or of places,
so that their rates of learning are others; D-PACE knows no T.

References: SpecDiff-2, arXiv 2511.00606; D-PACE, arXiv 2605.18810.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import chunks, losses
from .config import ConfigError
from .evaluate import Mean

KINDS = ("decay", "d-pace", "streak", "ce-streak")


PACE_FLOOR = 0.5  # the usual alpha of d-pace


def check(weighting: str, pace_floor: float, temperature: float) -> None:
    """Raises ``ConfigError`` for an unknown weighting, an alpha outside of 0 to 1, or a temperature
    that cannot be or that nothing reads."""
    if weighting not in KINDS:
        raise ConfigError(f"weighting={weighting!r}; known: {', '.join(KINDS)}")
    if not 0 <= pace_floor <= 1:
        raise ConfigError(f"pace_floor={pace_floor}; accepted: 0 to 1")
    if weighting != "d-pace" and pace_floor != PACE_FLOOR:
        raise ConfigError(
            f"pace_floor={pace_floor} with weighting={weighting!r}, which does not read it: leave "
            "it out, or give weighting=d-pace"
        )
    if not 0 < temperature < math.inf:
        raise ConfigError(
            f"streak_temperature={temperature}; accepted: above 0, and finite; for a drafter "
            "that is to be greedy take a small one, such as 0.3"
        )
    if weighting == "decay" and temperature != 1:
        raise ConfigError(
            f"streak_temperature={temperature} with weighting='decay', which has no streaks: leave "
            "it out, or give weighting=streak, ce-streak or d-pace"
        )


def check_text(weighting: str, name: str, value: float, wanted: float) -> None:
    """Raises ``ConfigError`` where the field ``name`` lets a weighted loss be another than the
    cross-entropy of the text."""
    if weighting != "decay" and value != wanted:
        raise ConfigError(
            f"weighting={weighting!r} with {name}={value}: its weights are those of the "
            f"cross-entropy of the text; give {name}={wanted:g}, or weighting=decay"
        )


def of_text(
    masks: Sequence[chunks.Head],
    cap: float | None,
    value=losses.cross_entropy,
    temperature: float = 1.0,
    logits_of=None,
) -> jax.Array:
    """``value(logits [B, C, V] / temperature, the text's tokens [B, C])`` in each place,
    ``[K, B, A]``, without a gradient; by default ``-log q_j`` of these tokens.

    ``logits_of(table, states, the text's tokens)`` returns the logits; None: those of the table,
    its bias and the cap.
    """

    def terms(tables, states, _, pieces):
        found = []
        for (table, bias), state, piece in zip(tables, states, pieces, strict=True):
            if logits_of is None:
                q = chunks.logits_of(table, state, cap, bias)
            else:
                q = logits_of(table, state, piece["next"])
            found.append(value(q / temperature, piece["next"]))
        return found

    tables, states, pieces, _ = jax.lax.stop_gradient(tuple(zip(*masks, strict=True)))
    return jnp.stack(chunks.each(terms, tables, states, (), pieces, chunk=chunks.SEVERAL))


def alive(nats: jax.Array, fits: jax.Array, floor: float = 0.0) -> jax.Array:
    """``prod_{i <= m} s_i``, float32 ``[K, B, A]``; of the places with weights ``fits`` above 0."""
    s = (1 - floor) * jnp.exp(-nats) + floor
    return jnp.cumprod(jnp.where(fits > 0, s, 1.0), axis=0)


def weights_of(kind: str, nats: jax.Array, fits: jax.Array, floor: float) -> jax.Array:
    """The weight of the cross-entropy of each place, float32 ``[K, B, A]``.

    Args:
      kind: ``"d-pace"``, ``"streak"`` or ``"ce-streak"``.
      nats: float32 ``[K, B, A]``, those cross-entropies.
      fits: float32 ``[K, B, A]``, the weights of the places in the text; 0: not to be learned.
      floor: alpha of ``"d-pace"``.
    """
    if kind == "ce-streak":
        before = alive(nats, fits)[:-1]
        return fits * jnp.concatenate([jnp.ones_like(nats[:1]), before])
    counted = fits * alive(nats, fits, floor if kind == "d-pace" else 0.0)
    ahead = jnp.cumsum(counted[::-1], axis=0)[::-1]
    return jnp.where(fits > 0, ahead, 0.0)


def loss_of(masks, terms_of, law, config, cap: float | None, logits_of=None) -> dict[str, Mean]:
    """The loss of blocks by ``config.weighting``, and measures that are logged beside it.

    Args:
      masks: a head for each place, over all anchors, as ``block.laid`` returns them.
      terms_of: the terms of a place, as ``chunks.totals`` takes them. ``loss`` is the cross-entropy
        of the text, or a sum of it and of others, which then have the same weights.
      law: as ``fixed`` of ``chunks.totals``.
      config: with ``weighting``, ``pace_floor`` and ``streak_temperature``.
      cap: of the target's logits.
      logits_of: see ``of_text``.
    """
    fits = jnp.stack([head.weight for head in masks])
    nats = of_text(masks, cap, temperature=config.streak_temperature, logits_of=logits_of)
    weights = weights_of(config.weighting, nats, fits, config.pace_floor)
    blocks = jnp.sum(jnp.max(fits, axis=0) > 0).astype(jnp.float32)
    streak = jnp.sum(fits * alive(nats, fits))
    total, terms = jnp.zeros(()), {"streak": Mean(streak, blocks, 0.0)}
    weighted = [head._replace(weight=own) for head, own in zip(masks, weights, strict=True)]
    for k, (value, others) in enumerate(chunks.totals(terms_of, weighted, law)):
        total = total + value
        terms[f"mask_{k + 1}"] = Mean(jnp.sum(fits[k] * nats[k]), jnp.sum(fits[k]), 0.0)
        own = jnp.sum(weights[k])
        terms |= {f"{name}_{k + 1}": Mean(x, own, 0.0) for name, x in others.items()}
    if config.weighting == "streak":  # the value of the loss; its gradient is that of the sum
        total = total - jax.lax.stop_gradient(total) - streak
    return {"loss": Mean(total, blocks), **terms}
