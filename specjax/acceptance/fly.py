"""FLy, an approximate rule: it overlooks a rejection where the target itself is undecided."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from .chain_rule import ChainRule

RANKS = 3  # the most probable tokens that the entropy is summed over


@dataclasses.dataclass(frozen=True)
class Fly(ChainRule):
    """Keeps a rejected token if the target is undecided there and agrees with the chain after it.

    The chain is judged as by ``rejection``. A token that fails is kept nevertheless if the next
    ``window`` tokens of the draft pass their own tests, and the target's law before the token is
    undecided: ``-Σ p log p`` over its three most probable tokens is at least ``entropy``. p is
    taken at temperature 1 there. So a draft must be longer than ``window``. A token that bias,
    penalties or the logits processor forbid is never kept; one that top-k, top-p or min-p leave out
    may be.

    Lossless: only with an ``entropy`` above log 3, which no law reaches: this is ``rejection``.
    Other results carry the label ``approximate``, also at temperature 0.

    Attributes:
      entropy: in nats, at least 0 (0.3 in the paper).
      window: at least 1 (6 in the paper, with drafts of 8 tokens and more).

    References: FLy, arXiv 2511.22972; its entropy is that of the implementation for vLLM, which
    takes p after temperature, top-k and top-p.

    Raises:
      ValueError: a setting is out of range.
    """

    entropy: float = 0.3
    window: int = 2

    name = "approximate-fly"

    def __post_init__(self):
        if not self.entropy >= 0 or self.window < 1:
            raise ValueError(
                f"Fly(entropy={self.entropy}, window={self.window}): entropy must be at least 0, "
                "window at least 1"
            )

    @property
    def lossless(self) -> bool:
        return self.entropy > math.log(RANKS)

    @property
    def exact_at_zero(self) -> bool:
        return self.lossless

    def passes(self, draft, own, possible, logits):
        if self.lossless:
            return own  # not by a comparison, which rounding could decide otherwise
        nodes = draft.num_nodes
        log_p = jax.nn.log_softmax(logits, axis=-1)
        best = jax.lax.top_k(log_p, min(RANKS, log_p.shape[-1]))[0]
        terms = jnp.where(best > -jnp.inf, best * jnp.exp(best), 0.0)
        undecided = jnp.roll(-jnp.sum(terms, axis=-1), 1, axis=1) >= self.entropy
        padded = jnp.pad(own, ((0, 0), (0, self.window)))
        agrees = [padded[:, i : i + nodes] for i in range(1, self.window + 1)]
        return own | (possible & undecided & jnp.all(jnp.stack(agrees), axis=0))
