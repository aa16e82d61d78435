"""An independent draft model: any smaller target with the same vocabulary, run depth by depth.

    q(x_i | context, x_1 ... x_{i-1}),   i = 1 ... num_draft

The model lags by two tokens: its first pass feeds the last two committed ones. So the case in which
all drafted tokens were accepted, and the last of them has no cache entry yet, needs no special
treatment, and ``observe`` runs no pass: it keeps the entries of accepted tokens. A tree takes one
pass a depth, over the nodes that have children.

Lossless: yes (the draft states its laws), under ``rejection``, ``block``, ``traversal`` and the
other rules that judge drawn drafts; under ``greedy`` and ``delta`` too.

Example::

    small = specjax.load("Qwen/Qwen3-0.6B")
    specjax.generate(lm, "...", drafter=small, drafting=specjax.Drafting(num=4))
    drafter = DraftModel(num_draft=4, model=small.target)  # the same for `specjax.decode`
    windowed(small, window=512)  # drafts with a cache that does not grow: models/small_cache.py
    # over chosen entries of a cache that is whole: drafters/sparse_draft.py

References: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318,
algorithm 2; trees: SpecInfer, arXiv 2305.09781, Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..decoding import contract_checks as checks
from ..trees import expand
from ..types import Draft, PyTree, Target, Verdict
from .outer_level import OuterLevel

CATCH_UP = 8  # tokens read at once after rounds without a draft
BETWEEN_ROUNDS: dict[str, Any] = dict(fresh=None, place=None, ran=None)  # of a state


@pytree_dataclass
class DraftModelState:
    """The state of a draft model: its cache, and during a round the entries of its passes.

    The last three fields are None between rounds.

    Attributes:
      cache: the model's entries of ``tokens[:filled]``.
      filled: int32 ``[B]``, ``length - 2`` or more, unless rounds were to draft nothing.
      fresh: the entries of this round's passes.
      place: int32 ``[B, N]``, where among them the nodes of the draft are.
      ran: bool ``[B]``, whether there are any.
    """

    cache: PyTree
    filled: jax.Array
    fresh: PyTree = None
    place: jax.Array | None = None
    ran: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftModel(OuterLevel):
    """Drafts a chain or a tree with a language model; ``params["drafter"]`` holds its weights.

    Where ``context.width`` is given, passes beyond it are left out. After rounds of width 0 the
    cache lags; the next round that drafts first reads what was missed, several tokens a pass.

    Attributes:
      num_draft: tokens of a chain; that of a tree follows from the topology.
      model: the draft model.
      topology: the tree to draft (see ``trees.topology``); None: a chain of ``num_draft`` tokens.
      sibling_sampling: how children are picked (see ``trees.expand``); None: drawn (``iid``), or
        ``top`` in a tree that the drafter grows.

    Raises:
      ValueError: there is no model, or nothing to draft; the window of the model's small cache is
        smaller than the draft.
    """

    model: Target = unset()
    topology: trees.Topology | None = None
    sibling_sampling: str | None = None
    name = "draft"
    keeps_text = True

    def __post_init__(self):
        super().__post_init__()
        self._complete(self.model, "model", "a model")
        self._check_window(self.model.cache_window)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def shard(self, params, mesh):
        """Its weights on a mesh, as the model wants them; see ``sharding.place``."""
        return self.model.shard(params, mesh)

    def init(self, params, target_params, batch, capacity, inputs=None):
        cache = self.model.init(params, batch, capacity, inputs)
        return DraftModelState(cache=cache, filled=jnp.zeros((batch,), jnp.int32))

    def draft_step(self, params, target_params, state, context):
        return self._drafted(params, state, context)

    def _drafted(self, params, state, context, least: jax.Array | None = None):
        """``draft_step``; ``least``: see ``trees.expand``."""
        state, before, ran = self._begin(params, state, context)
        cache, state = self.select(params, state, context)

        def level(entries, grown, since):
            return self.look(params, cache, before, grown, since, entries)

        draft, entries, place = expand.expand(
            self.topology, context, level, None, sibling_sampling=self.picks, least=least
        )
        place = jnp.broadcast_to(place, draft.tokens.shape)
        return draft, dataclasses.replace(state, fresh=entries, place=place, ran=ran)

    def _begin(self, params, state, context):
        """Reads what is lacking; the state, the token before the root int32 ``[B, 1]``, and in
        which rows the model runs, bool ``[B]`` or None for all."""
        ran = None
        if context.width is not None:
            state = self._catch_up(params, state, context)
            ran = context.asked_rows & (context.width > 0)
        before = jnp.maximum(context.length - 2, 0)[:, None]
        return state, jnp.take_along_axis(context.tokens, before, axis=1), ran

    def select(self, params, state, context):
        """What the passes of a round read of the cache, and the state. Default: all of it."""
        return state.cache, state

    def look(self, params, cache, before, grown, since, entries):
        """A pass over the nodes ``since:`` of one depth, for ``trees.expand``; the first pass also
        reads ``before`` int32 ``[B, K]``, the tokens before the root."""
        block, skip = below(before, grown), before.shape[1]
        first = since + skip if since else 0
        scores = checks.verified(self.model, params, cache, block, since=first, entries=entries)
        return required(scores.logits, "scores.logits")[:, since + skip - first :], scores.entries

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            return self._read(params, state, segment.tokens, segment.start, segment.num)
        if state.fresh is None:
            return state
        # count accepted tokens leave the cache with the entries of all but the last two committed
        # ones, the first of which is that of the token before the root
        num = segment.round[1].count + 1
        if state.ran is not None:
            num = jnp.where(state.ran, num, 0)
        path = segment.round[1].path[:, :-1]
        return self.keep(state, segment.start - 1, 1, path, num)

    def keep(self, state, start, before: int, path, num):
        """Keeps entries of a round.

        Args:
          state: that of the round.
          start: int32 ``[B]``, the position of the first token that the first pass read.
          before: how many tokens before the root it read.
          path: int32 ``[B, K]``, nodes of the draft from the root down.
          num: int32 ``[B]``, the entries that are kept, of the tokens ``before`` and of ``path``; 0
            in rows in which nothing happens.

        Returns:
          the state between rounds.
        """
        path, count = self.read_path(state, before, path), num - 1
        verdict = Verdict(path=path, count=count, token=count)
        return dataclasses.replace(
            state,
            cache=checks.committed(self.model, state.cache, state.fresh, start, verdict),
            filled=jnp.where(num > 0, start + num, state.filled),
            **BETWEEN_ROUNDS,
        )

    def read_path(self, state, before: int, path):
        """Where among the entries of a round are those of ``before`` and ``path``, see ``keep``."""
        path = jnp.take_along_axis(state.place, path, axis=1)
        path = jnp.maximum(path, 0) + before
        leading = jnp.broadcast_to(jnp.arange(before, dtype=jnp.int32), (len(path), before))
        return jnp.concatenate([leading, path], axis=1)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "rest":
            return state  # the cache lags
        if before == "draft":  # what another drafter proposed it has not read
            return self._catch_up(params, state, context)
        return self.read_until(params, state, context.tokens, context.length - 1)

    def rewind(self, state, length):
        return dataclasses.replace(state, filled=jnp.minimum(state.filled, length - 1))

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, model=self.model.rewindable(num_tokens))

    @property
    def text_model(self) -> Target:
        return self.model

    def text_params(self, params, target_params):
        return params

    def begin_text(self, params, target_params, state, context):
        return state.cache, state

    def end_text(self, state, cache, length, ran):
        filled = jnp.where(ran, length - 1, state.filled)
        return dataclasses.replace(state, cache=cache, filled=filled, **BETWEEN_ROUNDS)

    def _catch_up(self, params, state, context):
        """Reads what it missed, up to where ``draft_step`` begins, in rows that draft."""
        wanted = context.asked_rows
        if context.width is not None:
            wanted &= context.width > 0
        until = jnp.where(wanted, context.length - 2, 0)
        return self.read_until(params, state, context.tokens, until)

    def read_until(self, params, state, tokens, until, chunk: int = CATCH_UP):
        """Reads what is lacking of ``tokens[:until]``, ``until`` int32 ``[B]``, ``chunk`` tokens a
        pass."""
        chunk = min(chunk, tokens.shape[1])
        steps = jnp.arange(chunk, dtype=jnp.int32)

        def lacking(state):
            return jnp.maximum(until - state.filled, 0)

        def read(state):
            where = state.filled[:, None] + steps
            piece = jnp.take_along_axis(tokens, where, axis=1, mode="clip")
            num = jnp.minimum(lacking(state), chunk)
            return self._read(params, state, piece, state.filled, num)

        return jax.lax.while_loop(lambda state: jnp.any(lacking(state) > 0), read, state)

    def _read(self, params, state, tokens, start, num):
        """Takes in the first ``num`` int32 ``[B]`` of committed ``tokens`` int32 ``[B, T]``."""
        return self._read_and_see(params, state, tokens, start, num)[0]

    def _read_and_see(self, params, state, tokens, start, num, features=()):
        """``_read``, and the hidden states of the ``tokens`` ``[B, T, F]``; None: none are asked
        for."""
        width = tokens.shape[1]
        block = Draft(start=start, tokens=tokens, topology=trees.chain_parents(width - 1))
        asked: dict[str, Any] = dict(logits=False, features=features)
        scores = checks.verified(self.model, params, state.cache, block, **asked)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        verdict = Verdict(path=path, count=num - 1, token=num)
        state = dataclasses.replace(
            state,
            cache=checks.committed(self.model, state.cache, scores.entries, start, verdict),
            filled=jnp.where(num > 0, start + num, state.filled),
            **BETWEEN_ROUNDS,
        )
        return state, scores.features


def below(before: jax.Array, grown: Draft) -> Draft:
    """``grown`` below the tokens before its root, int32 ``[B, K]``."""
    count, topology, parent = before.shape[1], grown.topology, None
    above = trees.chain_parents(count - 1)
    if topology is not None:
        topology = (*above, *(parent + count for parent in topology))
    else:
        first = jnp.broadcast_to(jnp.asarray(above, jnp.int32), before.shape)
        parent = jnp.concatenate([first, required(grown.parent, "parent") + count], axis=1)
    return Draft(
        start=grown.start - count,
        tokens=jnp.concatenate([before, grown.tokens], axis=1),
        parent=parent,
        topology=topology,
    )
