"""How a feature drafter reads committed tokens: what is pending, and the cache of what was read.

A feature drafter reads *pairs*: pair ``i`` is the target's feature of token ``i`` with token
``i + 1``, and predicts token ``i + 2``. Its position, for rotary embedding and in the head's own
cache, is ``i``, however long the text is: nothing is stretched beyond the context for which a head
was trained. A window helps there (``layer.window``): distances stay those of training, and the
cache of the layer stays as short as the window.

Kangaroo reads the features without the tokens that follow: its entry ``i`` predicts token
``i + 1``, so that the pending entries end before the root, which it reads as the first node of a
draft.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import filled, pytree_dataclass
from ..models import kv_cache
from ..types import PyTree, Verdict
from . import resting
from .heads import HeadDrafter


@pytree_dataclass
class FeatureState:
    """The pairs that were read, and those that are *pending*, which the next round reads first.

    Attributes:
      cache: keys and values, per stage and layer. Slot ``i`` belongs to pair ``i`` (of stage k: to
        that with token ``i + 1 + k``). Only pairs of committed tokens are in it.
      features: ``[B, P, F]``, the target's features of the pending pairs, the last ones before the
        root. Some of them may be in the cache already; reading them again changes nothing.
      tokens: int32 ``[B, P]``, the token that follows each of them; the last one is the root.
      count: int32 ``[B]``, how many pairs are pending.
      ran: bool ``[B]``, whether this round read them; None between rounds.
    """

    cache: PyTree
    features: jax.Array
    tokens: jax.Array
    count: jax.Array
    ran: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class FeatureReader(HeadDrafter):
    """Reads pairs of committed tokens into the head's own cache; ``FeatureDrafter`` drafts.

    ``observe`` only keeps what was committed as pending, and ``_catch_up`` reads it at the begin of
    the next round, in ONE pass that is also the first step of drafting. A prompt is read as it
    comes, the last pair once more in the first round. A prompt of one token has no pair; zeros
    stand for the missing feature there.

    Where ``context.width`` is 0 nothing is read: pending pairs accumulate over rounds that draft
    nothing, and are read when there is no room for what one more such round may leave. Nothing is
    predicted then, so that only keys and values are computed.

    Attributes:
      layers: the target's hidden states that are read, counted as ``layer``; None: ``layer`` alone.
      others: the most tokens that a round may commit if other drafters propose too; 0: there are
        no others. Then there is room for the tokens of two rounds, the second of width 0.
      lag: further pairs for which there is room, while nothing is drafted and there are no others.

    Raises:
      ValueError: the hidden states of the target have another width than those that are read.
    """

    layers: tuple[int, ...] | None = None
    others: int = 0
    lag: int = 0
    num_stages = 1

    def __post_init__(self):
        super().__post_init__()
        own = self.feature_size // len(self.features)
        theirs = self.target.hidden_size
        if theirs is not None and own != theirs:
            raise ValueError(
                f"{self.name}: it reads hidden states {own} wide, the target's are {theirs} wide: "
                "take the target that it belongs to"
            )

    @property
    def max_depth(self) -> int | None:
        return None if self.num_stages == 1 else self.num_stages

    @property
    def default_topology(self) -> trees.Topology:
        return trees.chain(self.max_depth or min(3, self.trained_depth or 3))

    def greatest_number(self, most: int) -> int | None:
        chain = trees.chain(self.depth)
        most = min(most, self.trained_depth or most)
        free = self.max_depth is None and self.tree == chain and self.depth < most
        return most if free else None

    @property
    def features(self) -> tuple[int, ...]:
        return super().features if self.layers is None else self.layers

    @property
    def num_pending(self) -> int:
        """P, room for the pairs that rounds may leave and those that later stages read again."""
        return self.num_columns + (0 if self.others else self.lag)

    @property
    def num_columns(self) -> int:
        """The first of the P columns, which a round that drafts reads and leaves."""
        return max(self.few_pending, self.others + self.num_stages - 1) + self.others

    @property
    def few_pending(self) -> int:
        """The number of pairs that a round leaves if no other drafter proposes."""
        return self.depth + self.num_stages

    @property
    def feature_size(self) -> int:
        """F, the width of all ``features`` of a token side by side."""
        return self.config.hidden_size

    def init(self, params, target_params, batch, capacity, inputs=None):
        c, columns = self.config.layer, self.num_pending
        dtype = self.dtype_of(params)
        windows = [c.window_of(i) for i in range(c.num_layers)]
        # pending pairs may be in the cache already: a ring is longer by as much
        slots = [capacity if w is None else min(capacity, w + columns) for w in windows]
        leaves = 1 if c.kv_rank else 2
        stages = range(self.num_stages)
        return FeatureState(
            cache=tuple(
                kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype, leaves)
                for _ in stages
            ),
            features=jnp.zeros((batch, columns, self.feature_size), dtype),
            tokens=jnp.zeros((batch, columns), jnp.int32),
            count=jnp.zeros((batch,), jnp.int32),
        )

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "draft":  # `draft_step` begins with `_catch_up`
            return state
        if before == "rest":
            most = self.num_pending - max(self.others, 1)
            state = self._read_all(params, target_params, state, context, most)
            return dataclasses.replace(state, ran=jnp.zeros(state.count.shape, bool))
        state, _ = self._catch_up(params, target_params, state, context, every=True)
        return dataclasses.replace(state, ran=None)

    def lagging(self, num_tokens):
        return dataclasses.replace(self, lag=max(self.lag, num_tokens))

    def beside(self, num_tokens):
        return dataclasses.replace(self, others=max(self.others, num_tokens))

    def _catch_up(self, params, target_params, state, context, every: bool = False):
        """Reads what is pending, and commits it in rows that are not finished (``every``: in all).

        Returns:
          the state; and ``(logits, hidden)``: the logits ``[B, 1, V]`` below the root, or what
          ``make_level`` takes in their place, and what the last true pair of each stage passes on,
          ``[H, B]``.
        """
        head = self.heads(params)
        if self.num_pending > self.num_columns:
            most = self.num_columns
            state = self._read_all(params, target_params, state, context, most, every)
        tokens, start = state.tokens, context.length - 1 - jnp.maximum(state.count, 1)
        tokens = jnp.where((state.count > 0)[:, None], tokens, context.root[:, None])
        tokens, features = tokens[:, : self.num_columns], state.features[:, : self.num_columns]
        waiting = self._waiting(state, context, every)

        def run():
            given = state.cache, features, tokens, start, state.count
            return self._pending(jnp.max(waiting), head, target_params, *given)

        count, ran = state.count, None
        if context.width is None:
            logits, hidden, entries = run()
        else:
            ran = (context.width > 0) | jnp.any(waiting > self.num_columns - max(self.others, 1))
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
            logits, hidden, entries = jax.lax.cond(ran, run, lambda: empty)
            ran = jnp.broadcast_to(ran, count.shape)
            count = jnp.where(ran, count, 0)
        if not every:
            count = jnp.where(context.budget > 0, count, 0)
        cache = self._commit(state.cache, entries, start, count, hidden)
        return dataclasses.replace(state, cache=cache, ran=ran), (logits, hidden)

    def _waiting(self, state, context, every: bool) -> jax.Array:
        """How many pairs must be read; a finished row need not read what it has not read."""
        return state.count if every else jnp.where(context.budget > 0, state.count, 0)

    def _read_all(self, params, target_params, state, context, most: int, every: bool = False):
        """Reads all that is pending if more than ``most`` pairs are, in some row. The last pairs
        stay, in the first columns: the next draft begins with them."""
        head, stages = self.heads(params), self.num_stages
        waiting = self._waiting(state, context, every)
        waiting = jnp.where(jnp.any(waiting > most), waiting, 0)
        begin = context.length - 1 - state.count

        def read(cache, pending, offset, num):
            features, tokens = pending
            given = head, target_params, cache, features, tokens, begin + offset
            return self._commit(cache, self._read(*given)[1], begin + offset, num)

        pending = state.features, state.tokens
        cache, waiting = resting.read_by_chunks(
            read,
            state.cache,
            pending,
            waiting,
            chunk=max(resting.CHUNK, stages) if self.lag else self.num_pending,
            overlap=stages - 1,
        )
        last, size = jnp.minimum(waiting, stages), self.num_columns
        kept = resting.columns(pending, waiting - last, stages)
        # all columns that are read next are written at once: if some were written, XLA would read
        # the others from the old buffer, and copy that buffer first
        first = jax.tree.map(
            lambda old, new: jnp.concatenate([new, old[:, stages:size]], axis=1), pending, kept
        )
        features, tokens = jax.tree.map(
            lambda new, old: _put_first(new, old, waiting > 0), first, pending
        )
        count = jnp.where(waiting > 0, last, state.count)
        return dataclasses.replace(
            state, cache=cache, features=features, tokens=tokens, count=count
        )

    def _pending(self, most, head, target_params, cache, features, tokens, start, count):
        """``_root`` over the fewest columns that hold ``most`` pairs, out of a few numbers of them
        for which a program is compiled."""

        def first(columns):
            given = features[:, :columns], tokens[:, :columns], start, count
            return self._root(head, target_params, cache, *given)

        if not self.others:
            return first(self.num_columns)
        sizes = sorted({self.few_pending, self.num_pending - self.others, self.num_pending})
        whole = jax.eval_shape(lambda: first(self.num_pending))
        choice = jnp.sum(jnp.asarray(sizes) < most)
        branches = [lambda n=n: jax.tree.map(filled, first(n), whole) for n in sizes]
        return jax.lax.switch(choice, branches)

    def _root(self, head, target_params, cache, features, tokens, start, count):
        """One pass over ``count`` int32 ``[B]`` pairs; further arguments as those of ``_read``.

        Returns:
          the logits below the root, what each stage passes on, and the entries of each stage.
        """
        outs, entries = self._read(head, target_params, cache, features, tokens, start)
        last = [self._last(out, count, k) for k, out in enumerate(outs)]
        logits = head.logits(last[0], len(count), self.target, target_params)
        return logits, tuple(head.passed(out, k) for k, out in enumerate(last)), entries

    def _read(self, head, target_params, cache, features, tokens, start):
        """A pass of each stage over pairs at positions ``start`` int32 ``[B]`` and on.

        Args:
          features: ``[B, T, F]``, the target's.
          tokens: int32 ``[B, T]``, the token that follows each. Columns after the last true pair
            may hold anything: no true pair sees them.

        Returns:
          the outputs ``[H, B * T]`` of each stage, and its entries.
        """
        batch, steps = tokens.shape
        positions = start[:, None] + jnp.arange(steps, dtype=jnp.int32)
        hidden = head.read(features.reshape(batch * steps, -1).T)
        outs, kept = [], []
        for stage in range(self.num_stages):
            own = tokens if not stage else jnp.roll(tokens, -stage, axis=1)
            embedded = head.embed(own, self.target, target_params)
            out, entries = head.run(
                head.enter(embedded, hidden, stage),
                positions,
                jnp.triu(jnp.ones((steps, steps), bool))[None],
                batch=batch,
                stage=stage,
                prefix=cache[stage],
                length=jnp.maximum(start, 0),
            )
            outs.append(out)
            kept.append(entries)
            hidden = head.passed(out, stage)
        return outs, tuple(kept)

    def _last(self, out, count, stage):
        """The column ``[H, B]`` of the last true pair of a stage, of ``out`` ``[H, B * T]``."""
        batch = len(count)
        where = jnp.maximum(count - 1 - stage, 0)[None, :, None]
        out = out.reshape(len(out), batch, -1)
        return jnp.take_along_axis(out, where, axis=2)[:, :, 0]

    def _commit(self, cache, entries, start, count, hidden=None):
        """The caches with the first ``count`` int32 ``[B]`` pairs added, less k for stage k.

        ``hidden``: of each stage ``[H, B]``; it orders the write after the reads that made it.
        None: no output is wanted, and the last entries come after all that is read.
        """
        last = jax.tree.leaves(entries)[-1]
        path = jnp.arange(jax.tree.leaves(entries)[0].shape[2], dtype=jnp.int32)
        path = jnp.broadcast_to(path, (len(count), len(path)))
        c, written = self.config.layer, []
        for stage, (slots, own) in enumerate(zip(cache, entries, strict=True)):
            sizes = [jax.tree.leaves(layer)[0].shape[2] for layer in slots]
            rings = [c.is_ring(i, size) for i, size in enumerate(sizes)]
            # entries come from the layers' inputs: what must be read first is the output
            read = last if hidden is None else hidden[stage].T
            num = kv_cache.after(count - 1 - stage, read)
            verdict = Verdict(path=path, count=num, token=num)
            written.append(kv_cache.commit(slots, own, start, verdict, rings))
        return tuple(written)

    def observe(self, params, target_params, state, segment):
        keep = jnp.minimum(state.count, self.num_stages - 1)  # what later stages read once more
        if state.ran is not None:
            keep = jnp.where(state.ran, keep, state.count)
        some = segment.num > 0
        if resting.is_rest(segment) and state.ran is not None and not self.others:
            new = resting.first_column(segment, ("features", "next"))
            features, tokens = resting.append((state.features, state.tokens), new, keep, some)
            count = jnp.where(some, keep + 1, state.count)
            return FeatureState(cache=state.cache, features=features, tokens=tokens, count=count)
        steps = segment.tokens.shape[1]
        fits = segment.round is not None and steps + self.num_stages - 1 <= self.num_columns
        if self.others and state.ran is not None:  # as much may be pending as before the round
            fits &= steps <= self.others
        features, tokens = self._joined(state, segment, keep, fits)
        count, cache = keep + segment.num, state.cache
        if not fits:  # a prompt, or a path that another drafter proposed
            head, start = self.heads(params), segment.start - keep
            _, entries = self._read(head, target_params, cache, features, tokens, start)
            count = jnp.where(some, count, 0)
            cache = self._commit(cache, entries, start, count)
            # the last pair of each stage is read once more in the next round
            last = jnp.minimum(count, self.num_stages)
            features, tokens = resting.columns((features, tokens), count - last, self.num_columns)
            count = last
        return FeatureState(
            cache=cache,
            features=_put_first(features, state.features, some),
            tokens=_put_first(tokens, state.tokens, some),
            count=jnp.where(some, count, state.count),
        )

    def _joined(self, state, segment, keep, fits: bool):
        """Features and following tokens of the last ``keep`` int32 ``[B]`` pending pairs and then
        of the segment; in ``num_columns`` columns where it ``fits``."""
        given, steps = segment.features.astype(state.features.dtype), segment.tokens.shape[1]
        if fits and self.num_stages == 1 and state.ran is None and steps == self.num_columns:
            return given, segment.next
        before = self.num_columns if fits or self.others else self.num_pending
        most = self.num_stages - 1 if state.ran is None else before
        columns = self.num_columns if fits else steps + most
        where = jnp.arange(columns) - keep[:, None]
        old, new = where + state.count[:, None], before + where
        where = jnp.where(where < 0, old, new)
        features, tokens = state.features[:, :before], state.tokens[:, :before]
        features = resting.take(jnp.concatenate([features, given], axis=1), where)
        return features, resting.take(jnp.concatenate([tokens, segment.next], axis=1), where)


def _put_first(new: jax.Array, old: jax.Array, some: jax.Array) -> jax.Array:
    """``old`` ``[B, P, ...]`` with the first columns of the rows ``some`` replaced by ``new``."""
    size = new.shape[1]
    first = jnp.where(some.reshape((-1,) + (1,) * (old.ndim - 1)), new, old[:, :size])
    return first if size == old.shape[1] else old.at[:, :size].set(first)
