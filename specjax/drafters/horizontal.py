"""Several drafters in turn within one chain: the better ones first, as all later tokens depend on
the first (the horizontal part of CS Drafting).

    root ── x_1 ── x_2 ── x_3 ── y_1 ── y_2 ── z_1 ── z_2
            the first drafter    the second    the third

Each drafter drafts on after the tokens of those before it, which the target has not verified yet.
It is shown a text that ends there, and each token states the law of the drafter that drew it, given
all tokens before it. Where a drafter proposes less than it may (a lookup without a match), the next
one begins there.

With ``Cascade`` for the vertical part this is the whole method: see ``cs_drafting.py``, which
builds it from the matrix of lengths of the paper.

What a drafter has read of tokens that the target then rejects is taken back (``Drafter.rewind``).

Lossless: yes (the draft states its laws), under the rules under which all drafters are.

Example::

    Horizontal(drafters=(DraftModel(4, model=a), DraftModel(3, model=b), NGram(5)))
    params = {"target": weights, "drafter": (weights_of_a, weights_of_b, None)}

References: CS Drafting, arXiv 2312.11462, section 3.2 (the horizontal cascade).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..sampling import processors
from ..types import POINT_MASS, Context, Draft, Drafter, PyTree, Segment
from .base import SeveralDrafters
from .cascade_levels import levels
from .hybrid import drafts_chains
from .self_draft import SelfDraft
from .shared_round import round_of, scores_of
from .switched_self import SwitchedSelfDraft
from .translation import TranslatedDraftModel


@pytree_dataclass
class HorizontalState:
    """The state of drafters in turn.

    Attributes:
      inner: a state for each drafter.
      drafts: what each proposed, with token -1 where that is not in the chain; None between rounds.
      begins: int32 ``[B]`` each, how many tokens of the chain stand before those of the drafter,
        or more than there are in rows in which it was not asked; None between rounds.
    """

    inner: tuple[PyTree, ...]
    drafts: tuple[Draft, ...] | None = None
    begins: tuple[jax.Array, ...] | None = None


@pytree_dataclass
class _Chain:
    """The chain of a round as it grows to K tokens.

    Attributes:
      tokens: int32 ``[B, K]``.
      law: int32 ``[B, K]``, rows of all ``laws`` one after another.
      length: int32 ``[B]``, how many tokens there are.
      going: bool ``[B]``, rows that draft on.
    """

    tokens: jax.Array
    law: jax.Array
    length: jax.Array
    going: jax.Array

    @property
    def known(self) -> jax.Array:
        """Bool ``[B, K]``, which tokens there are."""
        return jnp.arange(self.tokens.shape[1]) < self.length[:, None]


@dataclasses.dataclass(frozen=True)
class Horizontal(SeveralDrafters):
    """Drafts a chain with several drafters, each after the tokens of those before it.

    ``params["drafter"]`` is a tuple, the weights of each. A drafter after the first keeps a state
    of its own, such as the cache of a draft model, and reads what those before it drafted.

    A threshold of ``context.confidence`` ends a row where a drafter falls below it; along a path it
    is the product within the tokens of one drafter.

    Attributes:
      num_draft: follows from the drafters: the sum of their tokens.
      drafters: at least two drafters of chains, each of which may be asked for fewer tokens. Those
        after the first read neither hidden states nor the cache of the target, which it does not
        have where they begin: draft models, tables, cascades of these.

    Raises:
      TypeError: one of them is no drafter.
      ValueError: there are fewer than two, or one of them cannot draft there.
    """

    can_rest = True

    def __post_init__(self):
        for i, drafter in enumerate(self.drafters):
            _check(drafter, i)
        super().__post_init__()
        drafters = (drafter.beside(self.num_draft + 1) for drafter in self.drafters)
        object.__setattr__(self, "drafters", self._rewindable(tuple(drafters)))

    def _rewindable(self, drafters, num_tokens: int = 0) -> tuple[Drafter, ...]:
        """The drafters for a text that is itself taken back by ``num_tokens`` tokens."""
        first, *others = drafters
        own = first.rewindable(num_tokens) if num_tokens else first
        lag = num_tokens + 2  # a draft model is up to two tokens behind
        later = (
            drafter.rewindable(lag + self._before(i)) for i, drafter in enumerate(others, start=1)
        )
        return own, *later

    def _before(self, i: int) -> int:
        """The most tokens that drafters before the one with number ``i`` draft."""
        return sum(drafter.num_draft for drafter in self.drafters[:i])

    @property
    def name(self) -> str:
        return f"horizontal({', '.join(drafter.name for drafter in self.drafters)})"

    def lagging(self, num_tokens):
        drafters = tuple(drafter.lagging(num_tokens) for drafter in self.drafters)
        return dataclasses.replace(self, drafters=drafters)

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, drafters=self._rewindable(self.drafters, num_tokens))

    def init(self, params, target_params, batch, capacity, inputs=None):
        states = (
            drafter.init(own, target_params, batch, capacity + self._before(i), inputs)
            for i, (drafter, own) in enumerate(self.with_weights(params))
        )
        return HorizontalState(inner=tuple(states))

    def draft_step(self, params, target_params, state, context):
        shape = len(context.length), self.num_draft
        chain = _Chain(
            tokens=jnp.zeros(shape, jnp.int32),
            law=jnp.full(shape, POINT_MASS),
            length=jnp.zeros(shape[:1], jnp.int32),
            going=context.asked_rows,
        )
        drafts, states, begins, laws = [], [], [], []
        for i, (drafter, own) in enumerate(zip(self.drafters, params, strict=True)):
            here, chain = self._context(i, context, chain)
            draft, inner = drafter.draft_step(own, target_params, state.inner[i], here)
            _check_draft(drafter, draft)
            begins.append(jnp.where(chain.going, chain.length, self.num_draft + 1))
            chain, mine = _grown(chain, draft, here, sum(law.shape[1] for law in laws))
            if context.confidence is not None:  # a row that was not sure ends
                going = chain.going & jnp.all(mine, axis=1)
                chain = dataclasses.replace(chain, going=going)
            drafts.append(_left(draft, mine))
            states.append(inner)
            laws += [] if draft.laws is None else [draft.laws]
        some = draft_draws(drafts)
        draft = trees.tree_draft(
            context,
            chain.tokens,
            trees.chain_parents(self.num_draft),
            law=chain.law if laws else None,
            laws=jnp.concatenate(laws, axis=1) if laws else None,
            candidate=chain.known,
            scored=chain.known,
            draws=some,
        )
        return draft, HorizontalState(
            inner=tuple(states), drafts=tuple(drafts), begins=tuple(begins)
        )

    def _context(self, i: int, context: Context, chain: _Chain) -> tuple[Context, _Chain]:
        """What the drafter with number ``i`` may read, and the chain with the rows that go on."""
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.key, i)
        num, before = self.drafters[i].num_draft, self._before(i)
        if not before:
            width = num if context.width is None else jnp.minimum(context.width, num)
            return dataclasses.replace(context, key=keys, width=jnp.int32(width)), chain
        known = chain.known[:, :before]
        tokens, steps = chain.tokens[:, :before], jnp.arange(before)
        left = jnp.maximum(context.budget - chain.length, 0)
        going = chain.going & (left > 0)
        if context.stop_drafting is not None:  # what is not there equals no token of the text
            going &= ~context.stop_drafting(jnp.where(known, tokens, -2 - steps))
        width = jnp.where(jnp.any(going), num, 0)
        if context.width is not None:
            room = context.width - chain.length
            going &= room > 0
            width = jnp.clip(jnp.max(jnp.where(going, room, 0)), 0, num)
        text = jnp.pad(context.tokens, ((0, 0), (0, before)))
        where = jnp.where(known, context.length[:, None] + steps, text.shape[1])
        rows, processed = jnp.arange(len(where))[:, None], context.processor_state
        if processed is not None and context.sampling.logits_processor is not None:
            processed = processors.advance_processor(
                context.sampling.logits_processor,
                context.processor_params,
                processed,
                jnp.where(known, tokens, -1),
            )
        here = dataclasses.replace(
            context,
            tokens=text.at[rows, where].set(tokens, mode="drop"),
            length=context.length + chain.length,
            budget=jnp.where(going, left, 0),
            key=keys,
            cache=None,  # it has no entries of the tokens of the chain
            width=width.astype(jnp.int32),
            begin=context.length if context.begin is None else context.begin,
            processor_state=processed,
            stop_drafting=None,
        )
        return here, dataclasses.replace(chain, going=going)

    def readout(self, draft, scores):
        """The scores at the nodes of the first drafter, if it reads them."""
        return scores_of(scores, self._first) if self.reads_nodes else None

    @property
    def _first(self) -> np.ndarray:
        """Where the nodes of the first drafter stand in a round."""
        return np.arange(self.drafters[0].num_draft + 1)

    def observe(self, params, target_params, state, segment):
        states = []
        for i, (drafter, own) in enumerate(zip(self.drafters, params, strict=True)):
            mine = segment if i == 0 else dataclasses.replace(segment, features=None)
            if segment.round is not None:
                draft = None if state.drafts is None else state.drafts[i]
                if i and draft is not None:
                    mine = _from(mine, required(state.begins, "begins")[i])
                scores = None if i else segment.round[2]
                mine = round_of(drafter, mine, draft, scores, self._first)
            inner = drafter.observe(own, target_params, state.inner[i], mine)
            if i and state.drafts is not None:  # it may have read tokens that were rejected
                count = required(segment.round, "round")[1].count
                inner = drafter.rewind(inner, segment.start + 2 + count)
            states.append(inner)
        return HorizontalState(inner=tuple(states))

    def sync(self, params, target_params, state, context, *, before="prompt"):
        states, here = [], context
        for drafter, own, inner in zip(self.drafters, params, state.inner, strict=True):
            states.append(drafter.sync(own, target_params, inner, here, before=before))
            here = dataclasses.replace(context, cache=None)
        return HorizontalState(inner=tuple(states))

    def rewind(self, state, length):
        pairs = zip(self.drafters, state.inner, strict=True)
        return HorizontalState(inner=tuple(drafter.rewind(own, length) for drafter, own in pairs))


def _check(drafter, i: int) -> None:
    """Raises TypeError or ValueError for what cannot be the drafter with number ``i``."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"Horizontal(drafters[{i}]={drafter!r}): give a specjax.Drafter")
    what = f"Horizontal(drafters[{i}]={drafter.name})"
    if drafter.plans or not drafter.can_rest:
        raise ValueError(
            f"{what}: it cannot be asked to draft nothing in some rounds; of an adaptive drafter "
            "give the inner one, and wrap the whole in Adaptive; a drafter of your own says by "
            "can_rest = True that it can"
        )
    if not drafter.depth:
        raise ValueError(f"{what}: it drafts nothing; leave it out")
    if not drafts_chains(drafter):
        raise ValueError(
            f"{what}: the next drafter goes on from the end of a chain; give a drafter of chains"
        )
    if i == 0:
        return
    if drafter.features or drafter.reads_nodes or not drafter.can_rewind:
        raise ValueError(
            f"{what}: it remembers what a model computed of the text, and the tokens after which "
            "it would draft are taken back where the target rejects them; put it first, or give a "
            "table such as NGram, a DraftModel or a Cascade"
        )
    for part in levels(drafter):
        if isinstance(part, SelfDraft | SwitchedSelfDraft):
            raise ValueError(
                f"{what}: {part.name} reads the target's cache, which has no entries of the tokens "
                "of the drafters before it; put it first"
            )
        if isinstance(part, TranslatedDraftModel):
            raise ValueError(
                f"{what}: the text that {part.name} spells in its own tokens cannot be taken back; "
                "put it first, or give a draft model with the target's vocabulary"
            )


def _check_draft(drafter: Drafter, draft: Draft) -> None:
    """Raises ValueError for a draft that another one cannot go on from."""
    trees.check_alone("horizontal", draft)
    if not trees.is_chain(draft):
        raise ValueError(
            f"Horizontal: {drafter.name}, whose depth is its num_draft, returned a tree; return "
            "trees.chain_draft(...), or state the depth of the tree"
        )
    if draft.vocab is not None:
        raise ValueError(
            f"Horizontal: the laws of {drafter.name} are over a smaller vocabulary than the "
            "target's, and all drafters must share one; take it by itself, or in a Hybrid"
        )


def draft_draws(drafts: Sequence[Draft]) -> str:
    """How the tokens of several chains in turn were drawn, see ``Draft.draws``."""
    mixed = any(x.laws is None or x.draws != "iid" for x in drafts)
    return "mixed" if mixed and any(x.laws is not None for x in drafts) else "iid"


def _grown(chain: _Chain, draft: Draft, here: Context, first_law: int) -> tuple[_Chain, jax.Array]:
    """The chain with the tokens of ``draft``, whose first law becomes the row ``first_law``; and
    bool ``[B, N - 1]``, which tokens of ``draft`` are in the chain."""
    tokens, total = draft.tokens[:, 1:], chain.tokens.shape[1]
    steps = jnp.arange(tokens.shape[1])
    mine = chain.going[:, None] & (steps < required(here.width, "width"))
    if draft.candidate is not None:
        mine &= draft.candidate[:, 1:]
    mine = jnp.cumsum(~mine, axis=1) == 0  # nothing hangs below what is not proposed
    where = jnp.where(mine, chain.length[:, None] + steps, total)
    rows, law = jnp.arange(len(where))[:, None], chain.law
    if draft.laws is not None:
        own = required(draft.law, "law")[:, 1:]
        own = jnp.where(own == POINT_MASS, POINT_MASS, own + first_law)
        law = law.at[rows, where].set(own, mode="drop")
    grown = dataclasses.replace(
        chain,
        tokens=chain.tokens.at[rows, where].set(tokens, mode="drop"),
        law=law,
        length=chain.length + jnp.sum(mine, axis=1, dtype=jnp.int32),
    )
    return grown, mine


def _left(draft: Draft, mine: jax.Array) -> Draft:
    """``draft`` without tokens that are not ``mine``, bool ``[B, N - 1]``."""
    kept = jnp.pad(mine, ((0, 0), (1, 0)), constant_values=True)
    tokens = jnp.where(kept, draft.tokens, -1)
    scored = kept if draft.scored is None else kept & draft.scored
    return dataclasses.replace(draft, tokens=tokens, scored=scored)


def _from(segment: Segment, begin: jax.Array) -> Segment:
    """What a round committed from the token ``begin`` int32 ``[B]`` of the chain on, which is the
    root of the drafter that drafted there; nothing where that token was not accepted."""
    whole, verdict, said = required(segment.round, "round")
    reached = verdict.count >= begin
    steps = begin[:, None] + jnp.arange(segment.tokens.shape[1])

    def shifted(x):
        return jnp.take_along_axis(x, jnp.minimum(steps, x.shape[1] - 1), axis=1)

    verdict = dataclasses.replace(verdict, count=jnp.where(reached, verdict.count - begin, -1))
    return dataclasses.replace(
        segment,
        tokens=shifted(segment.tokens),
        next=shifted(segment.next),
        start=segment.start + begin,
        num=jnp.where(reached, segment.num - begin, 0),
        round=(whole, verdict, said),
    )
