"""Block drafters that choose each token among a few candidates of its place.

The K tokens with the greatest logits of a place are its candidates. From left to right, a method
scores the candidates of a place given the token before; no other token has a probability.
``CandidateBlock`` is the base class of ``dflash2.py`` and ``lilicorr.py``, which bring the scores.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import trees
from ..trees.levels import depth_of
from .block import BlockDrafter

NONE = -jnp.inf  # the logit of what is no candidate


def check_candidates(config) -> None:
    """Raises ValueError for a ``num_candidates`` that no place can have."""
    if not 1 <= config.num_candidates <= config.vocab_size:
        raise ValueError(
            f"num_candidates={config.num_candidates}: it must be at least 1, and the vocabulary "
            f"has {config.vocab_size} tokens"
        )


@dataclasses.dataclass(frozen=True)
class CandidateBlock(BlockDrafter, abc.ABC):
    """Drafts with a block and scores of candidates.

    Raises:
      ValueError: as for ``BlockDrafter``; or a node of the tree has more children than there are
        candidates.
    """

    can_draw_from_part = False

    def __post_init__(self):
        super().__post_init__()
        tree, most = self.tree, self.config.num_candidates
        if isinstance(tree, trees.Tree):
            wide = max(tree.ranks) + 1
        elif isinstance(tree, trees.Expand):
            wide = tree.children
        else:
            wide = getattr(tree, "width", 1)
        if wide > most:
            raise ValueError(
                f"{self.name}: a node of the tree has {wide} children, and each place has "
                f"{most} candidates: take a tree with no more"
            )

    @abc.abstractmethod
    def begin(self, heads: Any, target_params, state, context) -> Any:
        """What is known of the places before tokens are drawn; a pytree whose ``tokens`` int32
        ``[B, D, K]`` are the candidates of each place."""

    @abc.abstractmethod
    def scores(self, heads: Any, known, before: jax.Array, depth: int) -> jax.Array:
        """Logits float32 ``[B, W, K]`` of the candidates at ``depth`` below the tokens ``before``
        int32 ``[B, W]``."""

    def make_level(self, params, target_params, state, context):
        heads = self.heads(params)

        def level(carry, grown, since):
            known = carry if since else self.begin(heads, target_params, state, context)
            depth, before = depth_of(grown, since), grown.tokens[:, since:]
            scores = self.scores(heads, known, before, depth)
            batch, wide = before.shape
            logits = jnp.full((batch, wide, self.vocab_size), NONE)
            row, node = jnp.arange(batch)[:, None, None], jnp.arange(wide)[None, :, None]
            return logits.at[row, node, known.tokens[:, depth, None]].set(scores), known

        return level, ()
