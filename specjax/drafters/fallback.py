"""A table where it is sure of itself, another drafter where it is not: row by row, by a score.

``suffix`` expects so many of its tokens to be accepted; where that is at least as many as the other
drafter proposes, its tokens are drafted. ``sam`` copies after a match of ``shortest_beside`` tokens
or more, ``ngram`` after every match that it follows. Each of the two may draft a chain or a tree,
and the other drafter may be a table or a ``Fallback`` too. A round in which all rows copy does not
run it.

Lossless: yes, as the inner drafter is; the score is a function of the context, never of a token
that was drawn.

Example::

    specjax.generate(lm, "...", drafter="suffix+draft")
    drafter = Fallback(first=Suffix(), inner=DraftModel(3, model=small))
    params = {"target": weights, "drafter": weights_of_small}

References: SuffixDecoding, arXiv 2411.04975, section 3.4 (the hybrid); SAM Decoding, arXiv
2411.10666, section 3.3.
"""

from __future__ import annotations

import dataclasses
from numbers import Real

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..types import POINT_MASS, ROOT, Draft, Drafter, PyTree
from .base import check_field
from .hybrid import TableBefore, check_inner, drafts_chains, joined, left
from .indexed import IndexedDrafter
from .ngram import NGram
from .shared_round import round_of


@pytree_dataclass
class FallbackState:
    """``index``: of the table; ``inner``: the other drafter's; ``draft``: what that proposed, None
    between rounds."""

    index: PyTree
    inner: PyTree
    draft: Draft | None = None


@dataclasses.dataclass(frozen=True)
class Fallback(TableBefore):
    """Drafts with ``first`` where its score is high enough, else with ``inner``.

    ``params["drafter"]`` holds the weights of ``inner``.

    Attributes:
      num_draft: follows from the two drafters.
      first: ``Suffix``, ``SAM`` or ``NGram``, with chains or trees.
      inner: the other drafter.
      least: the least score at which ``first`` drafts; None: ``first.score_beside``.

    Raises:
      TypeError: ``first`` is no table of that kind, or ``inner`` no drafter.
      ValueError: ``inner`` cannot be asked for less than it drafts, or draws siblings as a hub.
    """

    num_draft: int = 0
    first: IndexedDrafter | NGram = unset()
    inner: Drafter = unset()
    least: float | None = None
    can_rest = True

    def __post_init__(self):
        first = self.first
        if not isinstance(first, IndexedDrafter | NGram):
            raise TypeError(
                f"Fallback(first={first!r}): give a Suffix, SAM or NGram of specjax.drafters"
            )
        check_inner("Fallback", self.inner)
        check_field(self, "least", Real | None, "a number, or None")
        if self.inner.sibling_sampling == "hub" and not drafts_chains(self.inner):
            raise ValueError(
                f"Fallback(inner={self.inner.name}): siblings that are drawn as a hub need a draft "
                "of their own; give another sibling_sampling"
            )
        most = max(first.num_draft, self.inner.num_draft)
        object.__setattr__(self, "num_draft", most)
        object.__setattr__(self, "inner", self.inner.beside(self.depth + 1))

    @property
    def depth(self) -> int:
        return max(self.first.depth, self.inner.depth)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.first, self.inner

    @property
    def name(self) -> str:
        return f"{self.first.name}+{self.inner.name}"

    def init(self, params, target_params, batch, capacity, inputs=None):
        return FallbackState(
            index=self.first.init(None, target_params, batch, capacity, inputs),
            inner=self.inner.init(params, target_params, batch, capacity, inputs),
        )

    def draft_step(self, params, target_params, state, context):
        made, score, index = self.first.scored_draft(None, state.index, context)
        kept = required(made.candidate, "candidate")[:, 1:]
        depth = self.inner.depth
        least = self.first.score_beside(depth) if self.least is None else self.least
        sure = (score >= least) & jnp.any(kept, axis=1)
        width = depth if context.width is None else jnp.minimum(context.width, depth)
        asks = context.asked_rows & ~sure
        width = jnp.where(jnp.any(asks), width, 0)
        asked = dataclasses.replace(context, width=width, asked=asks)
        own, inner = self.inner.draft_step(params, target_params, state.inner, asked)
        if trees.is_chain(made) and trees.is_chain(own):
            spare = ((0, 0), (0, self.num_draft - kept.shape[1]))
            copied, kept = jnp.pad(made.tokens[:, 1:], spare), jnp.pad(kept, spare)
            draft, own = joined(context, own, ~sure[:, None], copied, kept)
        else:
            draft, own = either(sure, made, own)
        return draft, FallbackState(index=index, inner=inner, draft=own)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        inner = self.inner.sync(params, target_params, state.inner, context, before=before)
        return FallbackState(index=state.index, inner=inner)

    def rewind(self, state, length):
        index = self.first.rewind(state.index, length)
        return FallbackState(index=index, inner=self.inner.rewind(state.inner, length))

    def observe(self, params, target_params, state, segment):
        if segment.round is not None:
            segment = round_of(self.inner, segment, state.draft, segment.round[2], self._own)
        inner = self.inner.observe(params, target_params, state.inner, segment)
        return FallbackState(index=state.index, inner=inner)


def either(sure: jax.Array, made: Draft, own: Draft) -> tuple[Draft, Draft]:
    """Row by row one of two trees with the same root.

    Args:
      sure: bool ``[B]``, rows that take ``made``, a draft without laws; the others take ``own``.

    Returns:
      the tree; and ``own`` without the tokens that are not in it.
    """
    trees.check_alone("fallback", own)
    nodes, batch = max(made.num_nodes, own.num_nodes), len(sure)

    def of(draft: Draft, x, fill):
        x = jnp.broadcast_to(x, draft.tokens.shape)
        return jnp.pad(x, ((0, 0), (0, nodes - draft.num_nodes)), constant_values=fill)

    def pick(there, here, fill):
        return jnp.where(sure[:, None], of(made, there, fill), of(own, here, fill))

    def marked(draft: Draft, name: str):
        value = getattr(draft, name)
        return jnp.ones(draft.tokens.shape, bool) if value is None else value

    law, draws = None, own.draws
    if own.laws is not None:
        draws = "mixed" if draws == "iid" else draws  # some siblings are point masses
        law = pick(jnp.int32(POINT_MASS), required(own.law, "law"), POINT_MASS)
    draft = dataclasses.replace(
        own,
        tokens=pick(made.tokens, own.tokens, 0),
        parent=pick(trees.parents(made), trees.parents(own), ROOT),
        scored=pick(marked(made, "scored"), marked(own, "scored"), False),
        candidate=pick(marked(made, "candidate"), marked(own, "candidate"), False),
        law=law,
        topology=None,
        draws=draws,
        deepest=max(trees.max_depth(made), trees.max_depth(own)),
        guess=None,
        hidden=None,
        partial=None,
    )
    mine = jnp.broadcast_to(~sure[:, None], (batch, own.num_nodes - 1))
    return draft, left(own, mine, draft)
