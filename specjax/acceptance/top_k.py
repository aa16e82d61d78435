"""Blockwise decoding's relaxed criteria, an approximate rule: top k, distance, minimum block."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class TopK(Relaxed):
    """Accepts a token among the target's ``k`` most probable ones, or with an id near the best's.

    Lossless: no; every result carries the label ``approximate``. With ``k=1, distance=0, block=1``
    the rule is ``greedy`` at temperature 0.

    Attributes:
      k: the number of most probable tokens that are accepted, at least 1.
      distance: at least 0. A token is also accepted if its id differs by at most ``distance`` from
        the id of the most probable token; this is for outputs whose ids are ordered, such as
        brightness.
      block: at least 1. Each round emits at least ``block`` tokens, because the first ``block - 1``
        drafted tokens are accepted without a test.

    References: Stern, Shazeer and Uszkoreit, Blockwise Parallel Decoding for Deep Autoregressive
    Models, arXiv 1811.03115, section 5 (top-k selection, distance-based selection, minimum block
    size).

    Raises:
      ValueError: ``k``, ``distance`` or ``block`` is out of range.
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
