"""The base class of tables that look the end of a text up in an index of it."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..types import Draft
from . import context_index, continuations
from .base import ChainDrafter
from .context_index import ContextIndex
from .continuations import Proposal


@pytree_dataclass
class TextTable:
    """Texts that all rows look up besides their own: ``params["drafter"]`` of such a drafter.

    Attributes:
      tokens: int32 ``[1, G]``, the texts one after the other, -1 after each.
      length: int32 ``[1]``, slots that are in use.
      index: of ``tokens``.
    """

    tokens: jax.Array
    length: jax.Array
    index: ContextIndex


def tables_of(params) -> tuple:
    """The tables of ``params["drafter"]``, which is None, a table, or a tuple of them."""
    if params is None:
        return ()
    return params if isinstance(params, tuple) else (params,)


@dataclasses.dataclass(frozen=True)
class IndexedDrafter(ChainDrafter):
    """Proposes what followed earlier occurrences of the text's end, in its row or in a table.

    ``params["drafter"]`` is None, a ``TextTable``, or a tuple of them: of what the row itself and
    the tables propose the one with the highest score is drafted, the first of them where they are
    equal. A subclass implements ``propose``.

    Attributes:
      longest: how many of the last tokens are compared at most.
      occurrences: how many earlier matches are looked at at most, the longest first.
      block: how many places of the text are merged into the index at once.
    """

    longest: int = 24
    occurrences: int = 32
    block: int = 64
    can_rest = True

    def __post_init__(self):
        super().__post_init__()
        if min(self.longest, self.occurrences, self.block) < 1:
            raise ValueError(
                f"{type(self).__name__}(longest={self.longest}, occurrences={self.occurrences}, "
                f"block={self.block}): each must be at least 1"
            )

    @abc.abstractmethod
    def propose(self, index: ContextIndex, tokens, length, end, shared: bool = False) -> Proposal:
        """What a text proposes where ``end`` int32 ``[B, longest]``, the last token first, goes on.

        ``tokens`` int32 ``[R, L]``, ``length`` int32 ``[R]`` and ``index`` are of R = B texts, or
        of one (R = 1) for all rows; ``shared``: it is a table.
        """

    def init(self, params, target_params, batch, capacity, inputs=None):
        wrong = [table for table in tables_of(params) if not isinstance(table, TextTable)]
        if wrong:
            raise ValueError(
                f"params['drafter'] of {type(self).__name__} is {type(wrong[0]).__name__}: give "
                "None, or a TextTable or several, as specjax.text.Session makes one"
            )
        return context_index.empty(batch, capacity, self.block)

    def rewind(self, state, length):
        return context_index.forget(state, length)

    def score_beside(self, depth: int) -> float:
        """The least score at which it drafts instead of a drafter of ``depth`` tokens. Default:
        as many, where the score is the number of tokens that are expected to be accepted."""
        return float(depth)

    def look_up(self, params, state, context) -> tuple[Proposal, ContextIndex]:
        """What it proposes after the text of each row, and the state with all of the text."""
        live = context.budget > 0
        state = context_index.extend(state, context.tokens, context.length, live, self.longest)
        last = context.length[:, None] - 1
        end = context_index.contexts(context.tokens, last, self.longest)[:, 0]
        made = self.propose(state, context.tokens, context.length, end)
        for table in tables_of(params):
            shared = self.propose(table.index, table.tokens, table.length, end, shared=True)
            made = continuations.better(made, shared)
        return made, state

    def draft_step(self, params, target_params, state, context):
        draft, _, state = self.scored_draft(params, state, context)
        return draft, state

    def scored_draft(self, params, state, context) -> tuple[Draft, jax.Array, ContextIndex]:
        """What it proposes as a draft, its score float32 ``[B]``, and the state."""
        made, state = self.look_up(params, state, context)
        proposed = jnp.arange(self.num_draft) < made.count[:, None]
        tokens = jnp.where(proposed, made.tokens, 0)
        parent: tuple | jax.Array = trees.chain_parents(self.num_draft)
        parent = parent if made.parent is None else made.parent
        draft = trees.tree_draft(
            context,
            tokens,
            parent,
            candidate=proposed,
            scored=proposed,
            deepest=None if made.parent is None else self.depth,
        )
        return draft, made.score, state
