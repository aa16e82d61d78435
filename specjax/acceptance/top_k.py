"""Blockwise decoding's relaxed criteria: top-k match, distance, least block. Approximate."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class TopK(Relaxed):
    """Accepts a token among the target's ``k`` best, or near the best one in number.

    Lossless: no; every result says ``approximate``. With ``k=1, distance=0, block=1`` it is
    ``greedy`` at temperature 0.

    Attributes:
      k: at least 1; a token of the target's ``k`` best is accepted.
      distance: at least 0; so is one whose number differs from the best token's by at most this,
        for outputs whose numbers are ordered, such as brightness.
      block: at least 1; each round emits at least so many tokens: the first ``block - 1`` drafted
        ones are accepted whatever they are.

    References: Stern, Shazeer and Uszkoreit, Blockwise Parallel Decoding for Deep Autoregressive
    Models, arXiv 1811.03115, section 5 (top-k selection, distance-based selection, minimum block
    size).

    Raises:
      ValueError: a setting out of range.
    """

    k: int = 2
    distance: int = 0
    block: int = 1

    name = "approximate-top-k"

    def __post_init__(self):
        if not self.k >= 1 or not self.distance >= 0 or not self.block >= 1:
            raise ValueError(
                f"TopK(k={self.k}, distance={self.distance}, block={self.block}): k and block must "
                "be at least 1, distance at least 0"
            )

    def passes(self, draft, found):
        near = jnp.abs(draft.tokens - found.best) <= self.distance
        return (found.rank < self.k) | near | (trees.depths(draft) < self.block)

    @property
    def strictest(self) -> bool:
        return (self.k, self.distance, self.block) == (1, 0, 1)
