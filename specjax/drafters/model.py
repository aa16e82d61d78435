"""An independent draft model: any target with the same vocabulary, run token by token."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import sampling as law
from .. import tree
from ..pytree import pytree_dataclass
from ..types import Draft, PyTree, Target, Verdict
from .base import ChainDrafter

CATCH_UP = 16  # tokens read at once after rounds without a draft


@pytree_dataclass
class DraftModelState:
    """``cache`` holds the entries of ``tokens[:filled]``, ``filled`` int32 ``[B]``; that is
    ``length - 2`` or more, unless rounds were asked to draft nothing. ``fresh``: the entries of
    this round, and ``ran`` bool ``[B]``: there are any; both None between rounds."""

    cache: PyTree
    filled: jax.Array
    fresh: PyTree = None
    ran: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftModel(ChainDrafter):
    """Drafts a chain with a small language model; ``params["drafter"]`` are its weights.

    It stays two tokens behind: its first pass feeds the last two committed tokens. Then a full
    acceptance, after which the last drafted token has no entry yet, is no special case, and
    ``observe`` runs no pass at all: it keeps the entries of what was accepted.

    Where ``context.width`` is given, passes beyond it are left out. After rounds of width 0 the
    cache lags; the next round that drafts first reads what was missed, several tokens a pass.

    Lossless: yes, under ``greedy``, ``rejection`` (its law is recorded) and ``delta``.

    References: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    model: Target = None
    name = "draft"

    def __post_init__(self):
        super().__post_init__()
        if self.num_draft < 1 or self.model is None:
            raise ValueError(
                f"DraftModel(num_draft={self.num_draft}, model={type(self.model).__name__}): it "
                "needs a model and at least one token to draft; for plain decoding use Plain()"
            )

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def shard(self, params, mesh):
        """Its weights on a mesh, as the model wants them; see ``sharding.place``."""
        return self.model.shard(params, mesh) if hasattr(self.model, "shard") else params

    def init(self, params, batch, capacity, inputs=None):
        cache = self.model.init(params["drafter"], batch, capacity, inputs)
        return DraftModelState(cache=cache, filled=jnp.zeros((batch,), jnp.int32))

    def draft_step(self, params, state, context):
        ran = None
        if context.width is not None:
            wanted = (context.budget > 0) & (context.width > 0)
            until = jnp.where(wanted, context.length - 2, 0)
            state = self._catch_up(params, state, context.tokens, until)
            ran = jnp.broadcast_to(context.width > 0, context.length.shape)
        tail = context.length[:, None] - 2 + jnp.arange(2)
        known = jnp.take_along_axis(context.tokens, jnp.maximum(tail, 0), axis=1)
        uniform = None
        if not context.sampling.greedy:
            uniform = law.uniforms(context.key, self.num_draft)

        def passes(step, tokens, entries, shapes):
            token, q, entries = self._next(
                params, state.cache, context, uniform, step, tokens, entries
            )
            tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
            if step + 1 == self.num_draft:
                return tokens, [q], entries
            tokens, laws, entries = maybe(step + 1, tokens, entries, shapes)
            return tokens, [q, *laws], entries

        def maybe(step, tokens, entries, shapes):
            """The passes from ``step`` on, as far as they are wanted; where the shapes of all are
            known, those that are not are left out. Branches return what belongs to the nodes,
            never the cache."""
            if shapes is None:
                return passes(step, tokens, entries, None)

            def skip(tokens, entries):
                laws = jax.tree.map(lambda q: jnp.zeros(q.shape, q.dtype), shapes[1][step:])
                return _padded(tokens, shapes[0]), laws, _padded(entries, shapes[2])

            run = functools.partial(passes, step, shapes=shapes)
            return jax.lax.cond(step < context.width, run, skip, tokens, entries)

        every = functools.partial(maybe, 0, known, None)
        shapes = None if context.width is None else jax.eval_shape(lambda: every(None))
        tokens, laws, entries = every(shapes)
        laws = None if context.sampling.greedy else jnp.stack(laws, axis=1)
        draft = tree.chain(context, tokens[:, 2:], laws)
        return draft, dataclasses.replace(state, fresh=entries, ran=ran)

    def observe(self, params, state, segment):
        if segment.round is None:
            return self._read(params, state, segment.tokens, segment.start, segment.num)
        # nodes of the pass: (last but one, root, d_1 ... ), so count accepted tokens leave the
        # cache with the entries of all but the last two committed tokens
        count = segment.num - 1
        if state.ran is not None:
            count = jnp.where(state.ran, count, -1)
        nodes = self.num_draft + 1
        path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (count.shape[0], nodes))
        verdict = Verdict(path=path, count=count, token=count)
        return DraftModelState(
            cache=self.model.commit(state.cache, state.fresh, segment.start - 1, verdict),
            filled=jnp.where(count >= 0, segment.start + count, state.filled),
        )

    def _next(self, params, cache, context, uniform, step, tokens, entries):
        """One pass: the next token int32 ``[B]``, its law (None if greedy), entries of all nodes.

        ``tokens`` int32 ``[B, 2 + step]``: the last two committed ones, then those drafted.
        """
        sampling, nodes = context.sampling, tokens.shape[1]
        block = Draft(
            start=context.length - 2, tokens=tokens, topology=tree.chain_topology(nodes - 1)
        )
        since = 0 if step == 0 else nodes - 1
        scores = self.model.verify(params["drafter"], cache, block, since=since, entries=entries)
        logits = scores.logits[:, -1]
        prefix = context.prefix(tokens[:, 2:])
        if sampling.greedy:
            return law.argmax(sampling.adjust(logits, prefix)), None, scores.entries
        q = sampling.probabilities(logits, prefix)
        return law.draw(q, uniform[:, step]), q, scores.entries

    def settle(self, params, state, context):
        return self._catch_up(params, state, context.tokens, context.length - 1)

    def _catch_up(self, params, state, tokens, until):
        """Reads what is lacking of ``tokens[:until]``, ``until`` int32 ``[B]``."""
        chunk = min(CATCH_UP, tokens.shape[1])
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
        width = tokens.shape[1]
        block = Draft(start=start, tokens=tokens, topology=tree.chain_topology(width - 1))
        scores = self.model.verify(params["drafter"], state.cache, block, logits=False)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        verdict = Verdict(path=path, count=num - 1, token=num)
        return DraftModelState(
            cache=self.model.commit(state.cache, scores.entries, start, verdict),
            filled=jnp.where(num > 0, start + num, state.filled),
        )


def _padded(given, shapes):
    """``given``, a pytree or None, with zeros behind it up to ``shapes``."""

    def zeros(like):
        return jnp.zeros(like.shape, like.dtype)

    def pad(like, x):
        return jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])

    return jax.tree.map(zeros, shapes) if given is None else jax.tree.map(pad, shapes, given)
