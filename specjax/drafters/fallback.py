"""A table where it is sure of itself, another drafter where it is not: row by row, by a score.

``suffix`` expects so many of its tokens to be accepted; where that is at least as many as the other
drafter proposes, its tokens are drafted. ``sam`` copies after every match that it follows. A round
in which all rows copy does not run the other drafter.

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

import jax.numpy as jnp

from .._internal.optional import unset
from .._internal.pytree import pytree_dataclass
from ..trees.topology import chain
from ..types import Draft, Drafter, PyTree
from .context_index import ContextIndex
from .hybrid import TableBefore, check_inner, joined
from .indexed import IndexedDrafter
from .union import round_of


@pytree_dataclass
class FallbackState:
    """``index``: of the table; ``inner``: the other drafter's; ``draft``: what that proposed, None
    between rounds."""

    index: ContextIndex
    inner: PyTree
    draft: Draft | None = None


@dataclasses.dataclass(frozen=True)
class Fallback(TableBefore):
    """Drafts with ``first`` where its score is high enough, else with ``inner``.

    ``params["drafter"]`` holds the weights of ``inner``.

    Attributes:
      num_draft: follows from the two drafters.
      first: ``Suffix`` or ``SAM``, with chains.
      inner: a drafter of chains.
      least: the least score at which ``first`` drafts; None: ``first.score_beside``.

    Raises:
      TypeError: ``first`` is no table of that kind, or ``inner`` no drafter.
      ValueError: one of them drafts trees, or ``inner`` cannot be asked for less than it drafts.
    """

    num_draft: int = 0
    first: IndexedDrafter = unset()
    inner: Drafter = unset()
    least: float | None = None
    can_rest = True

    def __post_init__(self):
        first = self.first
        if not isinstance(first, IndexedDrafter):
            raise TypeError(f"Fallback(first={first!r}): give a Suffix or SAM of specjax.drafters")
        if first.topology not in (None, chain(first.depth)):
            raise ValueError(f"Fallback(first={first.name}): give one that drafts chains")
        check_inner("Fallback", self.inner, 0)
        most = max(first.depth, self.inner.depth)
        object.__setattr__(self, "num_draft", most)
        object.__setattr__(self, "inner", self.inner.beside(most + 1))

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
        made, index = self.first.look_up(None, state.index, context)
        least = self.first.score_beside(self.inner.depth) if self.least is None else self.least
        sure = (made.score >= least) & (made.count > 0)
        most = self.inner.depth
        width = most if context.width is None else jnp.minimum(context.width, most)
        wanted = jnp.any(~sure & (context.budget > 0))
        asked = dataclasses.replace(context, width=jnp.where(wanted, width, 0))
        own, inner = self.inner.draft_step(params, target_params, state.inner, asked)
        spare = ((0, 0), (0, self.num_draft - made.tokens.shape[1]))
        kept = jnp.arange(self.num_draft) < made.count[:, None]
        copied = jnp.where(kept, jnp.pad(made.tokens, spare), 0)
        draft, own = joined(context, own, ~sure[:, None], copied, kept)
        return draft, FallbackState(index=index, inner=inner, draft=own)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        inner = self.inner.sync(params, target_params, state.inner, context, before=before)
        return FallbackState(index=state.index, inner=inner)

    def observe(self, params, target_params, state, segment):
        if state.draft is not None:
            segment = round_of(segment, state.draft)
        inner = self.inner.observe(params, target_params, state.inner, segment)
        return FallbackState(index=state.index, inner=inner)
