"""Draft models with a vocabulary of their own: what ``TLI`` and ``SLEM`` have in common.

Such a model reads the committed text in its own tokens. A table spells each token of the target in
them, so the compiled loop keeps a second text: row ``b`` has ``ends[b, i]`` tokens of the draft
model for the first ``i`` tokens of the target. What has been committed is never spelled anew, and
nothing but the share of accepted drafts depends on how well it was spelled.

References: Timor et al., arXiv 2502.05202, algorithms 2 and 4 (there, and in transformers, the text
is decoded and encoded again on the host).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models import vocabularies
from ..models.tokenizer import Tokenizer
from ..types import ROOT, Draft, PyTree
from .draft_model import DraftModel, DraftModelState

MOST_PIECES = 16  # tokens of the draft model for one of the target's; of more, the last are kept
LAG = 4  # tokens at the end of its text that the first pass of a round reads, the last one included
ROOM = 1.5  # slots of its cache for each token that a token of the target is expected to take


@pytree_dataclass
class VocabularyTables:
    """How the target's tokens are spelled in those of a draft model, and which they share.

    Attributes:
      shared: int32 ``[Vs]``, the target's ids of the tokens that both have.
      own: int32 ``[Vs]``, the draft model's ids of the same.
      pieces: int32 ``[V, W]``, the draft model's tokens that spell each of the target's, -1 after
        the last. A shared token is spelled by one.
      begin: int32 ``[K]``, the tokens with which the draft model's texts begin.
    """

    shared: jax.Array
    own: jax.Array
    pieces: jax.Array
    begin: jax.Array

    @property
    def ratio(self) -> float:
        """How many tokens of the draft model spell one of the target's, on average; see
        ``vocabularies.mean_length``."""
        counts = np.sum(np.asarray(self.pieces) >= 0, axis=1)
        return vocabularies.mean_length({i: range(n) for i, n in enumerate(counts)})


def vocabulary_tables(
    target: Tokenizer,
    draft: Tokenizer,
    vocab_size: int,
    draft_vocab_size: int,
    spelling: vocabularies.Spellings | None = None,
) -> VocabularyTables:
    """Makes the tables for a target and a draft model with other tokens.

    Args:
      target, draft: their tokenizers.
      vocab_size, draft_vocab_size: the width of their logits.
      spelling: those of ``vocabularies.spellings(target, draft)``; None: they are made here.

    Raises:
      ValueError: a vocabulary does not say which bytes its tokens stand for.
    """
    spelling = spelling or vocabularies.spellings(target, draft)
    both = vocabularies.shared_tokens(target, draft, spelling)
    spelled = vocabularies.spelled_by(target, draft, spelling)
    # the token that begins a text may be spelled by nothing: then it is no token to draft
    pairs = zip(both.target.tolist(), both.draft.tolist(), strict=True)
    known = np.asarray([spelled[token] == [own] for token, own in pairs], bool)
    known &= (both.target < vocab_size) & (both.draft < draft_vocab_size)
    spelled = {i: [x for x in own if x < draft_vocab_size] for i, own in spelled.items()}
    return VocabularyTables(
        shared=jnp.asarray(both.target[known]),
        own=jnp.asarray(both.draft[known]),
        pieces=jnp.asarray(vocabularies.padded(spelled, vocab_size, MOST_PIECES)),
        begin=jnp.asarray(vocabularies.beginning(draft), jnp.int32),
    )


class OwnText(NamedTuple):
    """The end of the draft model's own text in a round.

    Attributes:
      before: int32 ``[B, LAG - 1]``, the tokens before the last.
      last: int32 ``[B]``, the last token, below which it drafts.
      length: int32 ``[B]``, the tokens of the text; 1 in rows that do not draft.
      drafts: bool ``[B]``, the rows that draft: those that want to, have a text, and have room.
    """

    before: jax.Array
    last: jax.Array
    length: jax.Array
    drafts: jax.Array


@pytree_dataclass
class TranslatedState:
    """The state of a draft model with a vocabulary of its own.

    Attributes:
      model: the state of ``DraftModel``, whose positions are those of the model's own text.
      tokens: int32 ``[B, M]``, the own text.
      ends: int32 ``[B, L + 1]``: how many of them spell the first tokens of the target's text, up
        to the root.
      length: int32 ``[B]``, those of the round, the root's included; 0 between rounds.
      drafted: int32 ``[B, P]``, what the model drafted in the round, in its own tokens, where the
        drafter must know it; else None.
      passes: int32, how many passes the model ran in the round, where the drafter must know it.
    """

    model: DraftModelState
    tokens: jax.Array
    ends: jax.Array
    length: jax.Array | None = None
    drafted: jax.Array | None = None
    passes: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class TranslatedDraftModel(DraftModel, abc.ABC):
    """The base class; ``params["drafter"] = {"model": its weights, "tables": VocabularyTables}``.

    Rows whose own text outgrows the cache, or the context of the model, draft nothing from then on.

    Attributes:
      ratio: how many tokens of the model stand for one of the target's, about
        (``VocabularyTables.ratio``): the size of its cache follows from it.
    """

    ratio: float = 2.0

    @property
    def vocab_size(self) -> None:
        """None: the target may have any vocabulary."""

    def shard(self, params, mesh):
        """The weights on a mesh, as the model wants them; every device has the tables."""
        return params | {"model": self.model.shard(params["model"], mesh)}

    def slots(self, tables: VocabularyTables, capacity: int) -> int:
        """How many tokens its own text may have beside ``capacity`` tokens of the target's."""
        each = min(ROOM * max(self.ratio, 1.0), tables.pieces.shape[1])
        room = math.ceil(each * capacity) + len(tables.begin) + self.own_depth
        most = self.model.max_positions
        return room if most is None else min(room, most)

    def init(self, params, target_params, batch, capacity, inputs=None):
        tables = params["tables"]
        room, first = self.slots(tables, capacity), len(tables.begin)
        tokens = jnp.zeros((batch, room), jnp.int32).at[:, :first].set(tables.begin)
        model = DraftModelState(
            cache=self.model.init(params["model"], batch, room, inputs),
            filled=jnp.zeros((batch,), jnp.int32),
        )
        ends = jnp.full((batch, capacity + 1), first, jnp.int32)
        return TranslatedState(model=model, tokens=tokens, ends=ends)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        return state  # ``draft_step`` reads what is lacking

    def begin_round(self, params, state, context) -> tuple[TranslatedState, OwnText]:
        """Spells the root, and reads the own text up to its last ``LAG`` tokens."""
        root = context.length - 1
        one = jnp.ones_like(root)
        state = _spell(params["tables"], state, root, context.root[:, None], one)
        length = _at(state.ends, context.length)
        room = state.tokens.shape[1]
        drafts = context.asked_rows & (length > 0) & (length + self.own_depth <= room)
        if context.width is not None:
            drafts &= context.width > 0
        until = jnp.where(drafts, length - LAG, 0)
        model = self.read_until(params["model"], state.model, state.tokens, until)
        length = jnp.where(drafts, length, 1)
        where = length[:, None] - LAG + jnp.arange(LAG, dtype=jnp.int32)
        end = jnp.take_along_axis(state.tokens, jnp.maximum(where, 0), axis=1)
        state = dataclasses.replace(state, model=model, length=length)
        return state, OwnText(before=end[:, :-1], last=end[:, -1], length=length, drafts=drafts)

    @property
    def own_depth(self) -> int:
        """How many tokens of its own it drafts below the last one of its text."""
        return self.depth

    @abc.abstractmethod
    def kept(self, state: TranslatedState, segment) -> tuple[jax.Array, jax.Array]:
        """Which of the drafted tokens of the model stay in its text after a round.

        Args:
          state: that of the round, with the text as it is after the round.
          segment: as of ``observe``.

        Returns:
          int32 ``[B, K]``, the nodes of the model's own draft from its root down; int32 ``[B]``,
          how many of those after the root are in the text and went through the model.
        """

    def observe(self, params, target_params, state, segment):
        state = self._read_segment(params["tables"], state, segment)
        length = _at(state.ends, segment.start + segment.num + 1)  # with the token after them
        live = segment.num > 0
        if segment.round is None:
            until = jnp.where(live, jnp.minimum(length, state.tokens.shape[1]) - LAG, 0)
            chunk = segment.tokens.shape[1]
            model = self.read_until(params["model"], state.model, state.tokens, until, chunk)
            return dataclasses.replace(state, model=model)
        if state.model.fresh is None:  # a round without a draft
            return state
        path, num = self.kept(state, segment)
        before = required(state.length, "length")
        # the last ``LAG`` tokens of the text are read again, whatever the next round is
        num = jnp.minimum(num + LAG, length - before)
        num = jnp.where(state.model.ran & live, jnp.maximum(num, 0), 0)
        model = self.keep(state.model, before - LAG, LAG - 1, path, num)
        return TranslatedState(model=model, tokens=state.tokens, ends=state.ends)

    def _read_segment(self, tables, state: TranslatedState, segment) -> TranslatedState:
        """Spells the tokens of a segment and the one after them."""
        steps = jnp.arange(segment.tokens.shape[1] + 1)
        num, spare = segment.num[:, None], ((0, 0), (0, 1))
        following = jnp.take_along_axis(segment.next, jnp.maximum(num - 1, 0), axis=1)
        tokens = jnp.where(steps == num, following, jnp.pad(segment.tokens, spare))
        count = jnp.where(segment.num > 0, segment.num + 1, 0)
        return _spell(tables, state, segment.start, tokens, count)


def end_round(state: TranslatedState, entries, place, **known) -> TranslatedState:
    """The state after a draft whose passes left ``entries``; see ``DraftModelState``."""
    ran = known.pop("ran")
    place = jnp.broadcast_to(place, (len(ran), place.shape[1]))
    model = dataclasses.replace(state.model, fresh=entries, place=place, ran=ran)
    return dataclasses.replace(state, model=model, **known)


def drafted_by(draft: Draft, rows: jax.Array) -> Draft:
    """``draft`` in the ``rows`` bool ``[B]``; in the others nothing but the root is scored."""
    kept = rows[:, None] | (jnp.arange(draft.num_nodes) == ROOT)
    return dataclasses.replace(
        draft,
        candidate=kept if draft.candidate is None else kept & draft.candidate,
        scored=kept if draft.scored is None else kept & draft.scored,
    )


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, index[b]]``."""
    return jnp.take_along_axis(x, index[:, None], axis=1, mode="clip")[:, 0]


def _spell(tables: VocabularyTables, state: TranslatedState, start, tokens, num) -> PyTree:
    """Writes the first ``num`` int32 ``[B]`` of ``tokens`` int32 ``[B, T]``, which stand from
    position ``start`` int32 ``[B]`` on in the target's text, into the own one."""
    batch, width = tokens.shape
    rows = jnp.arange(batch)[:, None]
    steps = jnp.arange(width, dtype=jnp.int32)
    given = steps < num[:, None]
    pieces = tables.pieces[tokens]  # [B, T, W]
    real = (pieces >= 0) & given[:, :, None]
    first = _at(state.ends, start)[:, None]
    each = jnp.sum(real, axis=2, dtype=jnp.int32)
    real, pieces = real.reshape(batch, -1), pieces.reshape(batch, -1)
    where = first + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    where = jnp.where(real, where, state.tokens.shape[1])  # beyond the last: dropped
    after = jnp.where(given, start[:, None] + 1 + steps, state.ends.shape[1])
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(pieces, mode="drop"),
        ends=state.ends.at[rows, after].set(first + jnp.cumsum(each, axis=1), mode="drop"),
    )
