"""Block drafters that choose each token among a few candidates of its place.

    C = the K tokens with the greatest logits of a place,    p the law of the place in the block
    q(b) = softmax(scores(b | the token before))  for b in C,   else 0          the authors' law
    q(b) = p(C) softmax(scores(b | ...))          for b in C,   else p(b)       the whole law

From left to right, a method scores the candidates of a place given the token before. Its authors
give no other token a probability, which is right where the most probable token is taken. A target
that is sampled says other tokens, too: its law and one over 16 tokens have too little in common. In
the whole law these tokens keep the probability that the block gives them. The most probable token
is the same in both. ``CandidateBlock`` is the base class of ``dflash2.py`` and ``lilicorr.py``,
which bring the scores.
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

    Attributes:
      whole_law: whether tokens that are no candidates can be drafted; None: where tokens are drawn,
        and not where the most probable ones are taken.

    Raises:
      ValueError: as for ``BlockDrafter``; or a node of the tree has more children than there are
        candidates.
    """

    whole_law: bool | None = dataclasses.field(default=None, kw_only=True)
    can_draw_from_part = False
    stored_settings = ("whole_law",)

    def __post_init__(self):
        super().__post_init__()
        tree, most = self.tree, self.config.num_candidates
        wide = max(tree.ranks) + 1 if isinstance(tree, trees.Tree) else getattr(tree, "children", 1)
        if wide > most:
            raise ValueError(
                f"{self.name}: a node of the tree has {wide} children, and each place has "
                f"{most} candidates: take a tree with no more"
            )

    @abc.abstractmethod
    def begin(self, heads: Any, target_params, state, context, hidden, base) -> Any:
        """What is known of the places before tokens are drawn; a pytree whose ``tokens`` int32
        ``[B, D, K]`` are the candidates of each place, and ``unary`` float32 ``[B, D, K]`` the
        logits that the block gives them. ``hidden``, ``base``: see ``read_places``."""

    @abc.abstractmethod
    def scores(self, heads: Any, known, before: jax.Array, depth: int) -> jax.Array:
        """Logits float32 ``[B, W, K]`` of the candidates at ``depth`` below the tokens ``before``
        int32 ``[B, W]``."""

    def make_level(self, params, target_params, state, context):
        heads = self.heads(params)
        drawn = self.sibling_sampling != "top"
        whole = drawn if self.whole_law is None else self.whole_law

        def begin():
            hidden, base = self.read_places(heads, target_params, state, context)
            known = self.begin(heads, target_params, state, context, hidden, base)
            return known, jax.nn.log_softmax(base, axis=-1) if whole else None

        def level(carry, grown, since):
            known, laws = carry if since else begin()
            depth, before = depth_of(grown, since), grown.tokens[:, since:]
            scores = self.scores(heads, known, before, depth)
            (batch, wide), tokens = before.shape, known.tokens[:, depth]
            if laws is None:
                logits = jnp.full((batch, wide, self.vocab_size), NONE)
            else:
                law = laws[:, depth]
                mass = jax.nn.logsumexp(jnp.take_along_axis(law, tokens, axis=1), axis=1)
                scores = jax.nn.log_softmax(scores, axis=-1) + mass[:, None, None]
                logits = jnp.broadcast_to(law[:, None], (batch, wide, self.vocab_size))
            row, node = jnp.arange(batch)[:, None, None], jnp.arange(wide)[None, :, None]
            return logits.at[row, node, tokens[:, None]].set(scores), (known, laws)

        return level, ()
