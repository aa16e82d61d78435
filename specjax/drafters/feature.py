"""Drafting with a few layers of one's own that read the target's features: EAGLE, MTP modules.

What such a head reads are *pairs*: pair ``i`` is the target's feature of token ``i`` with token
``i + 1``, and says token ``i + 2``. Below a drafted token there is no feature of the target; the
head's own output at the pair before stands for it.

The position of pair ``i``, for rotary embedding and in the head's own cache, is ``i``, however long
the text: nothing is stretched beyond the context that a head was trained for. What helps there is
a window (``layer.window``): then no distance is greater than those of training, and the cache of a
layer is as short.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .. import trees
from .._internal.pytree import filled, pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import run_blocks
from ..models.layers import product
from ..trees import expand
from ..types import PyTree, Verdict
from .heads import HeadDrafter
from .speculator import of_parents


class FeatureModule(nnx.Module):
    """What drafting and training ask of a head, columns being feature-major ``[features, M]``.

    One step over columns, in both::

        hidden = module.read(features)              # of the target, where they are known
        x = module.enter(embedded, hidden, stage)   # embedded: of the tokens behind
        out, entries = module.run(x, positions, own_mask, batch=batch, stage=stage, ...)
        logits = module.logits(out, batch, target, params, stage)
        hidden = module.passed(out, stage)          # of the next token, in place of ``read``

    A head may have several *stages*, layers with other weights (and a cache of their own) for each
    step: step ``k`` below the target's features is stage ``k``'s. One stage serves all steps.

    A subclass sets ``layer`` (the shape of a stage's layers), ``blocks`` (those layers),
    ``embedding`` (its own table, or None: the target's), ``vocab`` (int32 ``[Vd]``, the target's
    ids of a draft vocabulary, or None: the target's vocabulary), and says the rest.
    """

    layer: DecoderConfig
    embedding = None
    vocab = None

    def embed(self, tokens: jax.Array, target, params) -> jax.Array:
        """``[E, B * N]`` of ``tokens`` int32 ``[B, N]``; ``params``: the target's weights."""
        if self.embedding is None:
            return target.embed(params, tokens)
        return self.embedding[...][tokens.reshape(-1)].T

    def read(self, features: jax.Array) -> jax.Array:
        """``[F, M] -> [H, M]``: the target's features as the first stage takes them."""
        return features

    def enter(self, embedded: jax.Array, hidden: jax.Array, stage: int = 0) -> jax.Array:
        """``[E, M], [H, M] ->`` what the first layer of a stage reads."""
        raise NotImplementedError

    def stage_blocks(self, stage: int):
        """The layers of a stage."""
        return self.blocks

    def run(self, x, positions, own_mask, *, batch, stage: int = 0, **settings):
        """A stage's layers over columns; arguments as ``decoder.run_blocks``, whose ``attend`` is
        what training may bring.

        Returns:
          ``(out [H, M], entries)``, the entries per layer.
        """
        blocks = self.stage_blocks(stage)
        seen, entries = run_blocks(
            self.layer, blocks, x, positions, own_mask, batch=batch, **settings
        )
        return seen[-1], entries

    def passed(self, out: jax.Array, stage: int = 0) -> jax.Array:
        """What the next step takes for ``hidden``."""
        return out

    def logits(self, out: jax.Array, batch: int, target, params, stage: int = 0) -> jax.Array:
        """float32 ``[B, N, V]``, over the draft vocabulary where there is one."""
        raise NotImplementedError


def logits_of(linear, x: jax.Array, batch: int) -> jax.Array:
    """float32 ``[B, N, V]`` of an LM head of one's own, for normed states ``[H, B * N]``."""
    logits = product(linear.weight[...], x, transpose_out=True)
    if linear.bias is not None:
        logits = logits + linear.bias[...]
    return logits.astype(jnp.float32).reshape(batch, -1, logits.shape[-1])


@pytree_dataclass
class FeatureState:
    """What was read, and what is *pending*: to be read at the begin of the next round.

    Attributes:
      cache: for each stage, per layer, keys and values; slot ``i`` is of pair ``i`` (of stage k:
        with token ``i + 1 + k``), true pairs alone.
      features: ``[B, P, F]``, of the pending pairs, the last ones before the root; ``tokens``
        int32 ``[B, P]`` behind them, the last of which is the root; ``count`` int32 ``[B]``, how
        many there are. Some may be in the cache already: to read them again changes nothing.
      ran: bool ``[B]``, whether this round read them; None between rounds.
    """

    cache: PyTree
    features: jax.Array
    tokens: jax.Array
    count: jax.Array
    ran: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(HeadDrafter):
    """Drafts with a ``FeatureModule``; ``params["drafter"]`` are its weights.

    A round begins with ONE pass over the pairs that the last round accepted, the root in the last:
    it fills the cache and is the first step of drafting. Each further depth is one pass over that
    depth's nodes, each of which sees the cache, its ancestors and itself; their entries are
    dropped. On the prompt, pairs are read as they come, the last of them once more in the first
    round. A prompt of one token has no pair: there, zeros stand for the root's missing feature.

    With several stages there is a pass of each over the pending pairs, and stage ``k`` drafts
    depth ``k + 1``: its pairs are those of stage ``k - 1``'s outputs with the tokens one further
    on, so that its pass goes over all nodes above, too.

    Where ``context.width`` is given, passes beyond it are left out; after rounds of width 0 what
    is pending grows, and is read once there is no room for what another such round may leave.

    Attributes:
      layers: the target's hidden states that are read, counted as ``layer``; None: that one.
      others: the most tokens that a round may commit where others draft too; 0: none do. There is
        room for those of two rounds then, the second of width 0.

    Raises:
      ValueError: hidden states that the target does not have; a tree too deep for the stages.
    """

    layers: tuple[int, ...] | None = None
    others: int = 0
    num_stages = 1

    def __post_init__(self):
        super().__post_init__()
        most = self.target.num_layers
        if not all(0 <= i <= most for i in self.features):
            raise ValueError(
                f"layers={self.features}: the target has {most} layers; hidden states are counted "
                f"from 0, the embeddings, to {most}"
            )
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
    def usual_topology(self) -> trees.Topology:
        return trees.chain(self.max_depth or 3)

    @property
    def features(self) -> tuple[int, ...]:
        return (self.layer,) if self.layers is None else self.layers

    @property
    def num_pending(self) -> int:
        """Pairs that rounds may leave, and those before that the later stages want once more."""
        return max(self.few_pending, self.others + self.num_stages - 1) + self.others

    @property
    def few_pending(self) -> int:
        """What a round leaves where no others draft."""
        return self.depth + self.num_stages

    @property
    def feature_size(self) -> int:
        """Of all ``features`` of a token, side by side."""
        return self.config.hidden_size

    def init(self, params, target_params, batch, capacity, inputs=None):
        c, columns = self.config.layer, self.num_pending
        dtype = jnp.result_type(*jax.tree.leaves(params))
        windows = [c.window_of(i) for i in range(c.num_layers)]
        # pending pairs may lie in the cache already: so much longer is a ring
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

    # ----------------------------------------------------------------------------- drafting

    def draft_step(self, params, target_params, state, context):
        state, caught = self._catch_up(params, target_params, state, context)
        level, carry = self.begin(params, target_params, state, context, caught)
        head = self.heads(params)
        words = None
        if head.vocab is not None:
            words = expand.Words(head.vocab[...], self.vocab_size)
        draft, _, _ = expand.expand(
            self.topology,
            context,
            level,
            carry,
            sibling_sampling=self.sibling_sampling,
            words=words,
        )
        return draft, state

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "draft":  # whose first step this is
            return state
        if before == "rest":
            nothing = dataclasses.replace(context, width=jnp.int32(0))
            return self._catch_up(params, target_params, state, nothing)[0]
        state, _ = self._catch_up(params, target_params, state, context, every=True)
        return dataclasses.replace(state, ran=None)

    def beside(self, num_tokens):
        return dataclasses.replace(self, others=num_tokens)

    def begin(self, params, target_params, state, context, caught=None):
        """``caught``: the logits ``[B, 1, V]`` below the root, and for each stage what its last
        true pair passes on, ``[H, B]``."""
        head, batch = self.heads(params), len(context.length)
        logits, hidden = caught
        step = self._next_depth if self.num_stages == 1 else self._next_stage

        def level(carry, grown, since):
            if since == 0:
                return logits, ((hidden[0],), None)
            return step(head, target_params, state.cache, hidden, carry, grown, since, batch)

        return level, ()

    def _next_depth(self, head, target_params, cache, first, carry, grown, since, batch):
        """One pass over the nodes of a depth, by the only stage. ``carry``: of each depth above
        what its nodes pass on, ``[H, B * W]``, and the entries of all nodes but the root."""
        above, entries = carry
        hidden = of_parents(above[-1], grown, since)
        embedded = head.embed(grown.tokens[:, since:], self.target, target_params)
        out, entries = head.run(
            head.enter(embedded, hidden),
            (grown.start - 1)[:, None] + trees.depths(grown)[:, 1:],
            trees.ancestors(grown)[:, 1:, since:],
            batch=batch,
            prefix=cache[0],
            length=grown.start,
            earlier=entries,
        )
        logits = head.logits(out, batch, self.target, target_params)
        return logits, ((*above, head.passed(out)), entries)

    def _next_stage(self, head, target_params, cache, first, carry, grown, since, batch):
        """One pass of the next stage over all nodes below the root. ``carry``: what the stage
        before passes on at all nodes above this depth."""
        stage, nodes = expand.depth_of(grown, since), grown.num_nodes
        above = carry[0][-1].reshape(-1, batch, since)
        parents = jnp.broadcast_to(trees.parents(grown)[:, 1:], (batch, nodes - 1))
        hidden = jnp.take_along_axis(above, parents[None], axis=2).reshape(len(above), -1)
        positions = (grown.start - 1 - stage)[:, None] + trees.depths(grown)[:, 1:]
        sees = trees.ancestors(grown)[:, 1:, 1:] & (positions >= 0)[:, :, None]
        embedded = head.embed(grown.tokens[:, 1:], self.target, target_params)
        out, _ = head.run(
            head.enter(embedded, hidden, stage),
            positions,
            sees | jnp.eye(nodes - 1, dtype=bool),
            batch=batch,
            stage=stage,
            prefix=cache[stage],
            length=jnp.maximum(grown.start - stage, 0),
        )
        passed = head.passed(out, stage).reshape(-1, batch, nodes - 1)
        passed = jnp.concatenate([first[stage][:, :, None], passed], axis=2)
        out = out.reshape(-1, batch, nodes - 1)[:, :, since - 1 :].reshape(len(out), -1)
        logits = head.logits(out, batch, self.target, target_params, stage)
        return logits, ((*carry[0], passed.reshape(len(passed), -1)), None)

    # ------------------------------------------------------------------------------ reading

    def _catch_up(self, params, target_params, state, context, every: bool = False):
        """Reads what is pending, and commits it in rows that are not finished (``every``: in all).

        Returns:
          the state; the logits below the root, and what each stage passes on, as ``begin`` takes
          them.
        """
        head = self.heads(params)
        tokens, start = state.tokens, context.length - 1 - jnp.maximum(state.count, 1)
        tokens = jnp.where((state.count > 0)[:, None], tokens, context.root[:, None])

        # what a finished row has not read, it need not
        waiting = state.count if every else jnp.where(context.budget > 0, state.count, 0)

        def run():
            given = state.cache, state.features, tokens, start, state.count
            return self._pending(jnp.max(waiting), head, target_params, *given)

        count, ran = state.count, None
        if context.width is None:
            logits, hidden, entries = run()
        else:
            ran = (context.width > 0) | jnp.any(waiting > self.num_pending - max(self.others, 1))
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run))
            logits, hidden, entries = jax.lax.cond(ran, run, lambda: empty)
            ran = jnp.broadcast_to(ran, count.shape)
            count = jnp.where(ran, count, 0)
        if not every:
            count = jnp.where(context.budget > 0, count, 0)
        cache = self._commit(state.cache, entries, start, count, hidden)
        return dataclasses.replace(state, cache=cache, ran=ran), (logits, hidden)

    def _pending(self, most, head, target_params, cache, features, tokens, start, count):
        """``_root`` over the fewest columns, of a few numbers, that hold ``most`` pairs."""

        def first(columns):
            given = features[:, :columns], tokens[:, :columns], start, count
            return self._root(head, target_params, cache, *given)

        if not self.others:
            return first(self.num_pending)
        sizes = sorted({self.few_pending, self.num_pending - self.others, self.num_pending})
        whole = jax.eval_shape(lambda: first(self.num_pending))
        choice = jnp.sum(jnp.asarray(sizes) < most)
        branches = [lambda n=n: jax.tree.map(filled, first(n), whole) for n in sizes]
        return jax.lax.switch(choice, branches)

    def _root(self, head, target_params, cache, features, tokens, start, count):
        """What ``_catch_up`` returns of one pass over ``count`` int32 ``[B]`` pairs, and the
        entries of each stage; further arguments as ``_read``'s."""
        outs, entries = self._read(head, target_params, cache, features, tokens, start)
        last = [self._last(out, count, k) for k, out in enumerate(outs)]
        logits = head.logits(last[0], len(count), self.target, target_params)
        return logits, tuple(head.passed(out, k) for k, out in enumerate(last)), entries

    def _read(self, head, target_params, cache, features, tokens, start):
        """A pass of each stage over pairs ``start ...``, ``features [B, T, F]`` with the ``tokens``
        int32 ``[B, T]`` behind them. Pairs that are none, behind the others, are seen by none.

        Returns:
          of each stage its outputs ``[H, B * T]``, and its entries.
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
        """``[H, B]`` of ``[H, B * T]``: of the last true pair of a stage."""
        batch = len(count)
        where = jnp.maximum(count - 1 - stage, 0)[None, :, None]
        out = out.reshape(len(out), batch, -1)
        return jnp.take_along_axis(out, where, axis=2)[:, :, 0]

    def _commit(self, cache, entries, start, count, hidden):
        """The caches with the first ``count`` int32 ``[B]`` pairs, of which stage k lacks k.
        ``hidden`` ``[H, B]`` of each stage: what was read before."""
        path = jnp.arange(jax.tree.leaves(entries)[0].shape[2], dtype=jnp.int32)
        path = jnp.broadcast_to(path, (len(count), len(path)))
        c, written = self.config.layer, []
        for stage, (slots, own) in enumerate(zip(cache, entries, strict=True)):
            sizes = [jax.tree.leaves(layer)[0].shape[2] for layer in slots]
            rings = [c.is_ring(i, size) for i, size in enumerate(sizes)]
            # entries come from the layers' inputs: what must be read first is the output
            num = kv_cache.after(count - 1 - stage, hidden[stage].T)
            verdict = Verdict(path=path, count=num, token=num)
            written.append(kv_cache.commit(slots, own, start, verdict, rings))
        return tuple(written)

    # ----------------------------------------------------------------------------- learning

    def observe(self, params, target_params, state, segment):
        given, steps = segment.features.astype(state.features.dtype), segment.tokens.shape[1]
        keep = jnp.minimum(state.count, self.num_stages - 1)  # what later stages want once more
        if state.ran is not None:
            keep = jnp.where(state.ran, keep, state.count)
        fits = segment.round is not None and steps + self.num_stages - 1 <= self.num_pending
        if self.others and state.ran is not None:  # there may be as much as before it
            fits &= steps <= self.others
        if fits and self.num_stages == 1 and state.ran is None and steps == self.num_pending:
            features, tokens = given, segment.next
        else:
            most = self.num_stages - 1 if state.ran is None else self.num_pending
            columns = self.num_pending if fits else steps + most
            where = jnp.arange(columns) - keep[:, None]
            old, new = where + state.count[:, None], self.num_pending + where
            where = jnp.where(where < 0, old, new)
            features = _take(jnp.concatenate([state.features, given], axis=1), where)
            tokens = _take(jnp.concatenate([state.tokens, segment.next], axis=1), where)
        count, cache = keep + segment.num, state.cache
        if not fits:  # a prompt, or a path that another drafter proposed
            head, start = self.heads(params), segment.start - keep
            outs, entries = self._read(head, target_params, cache, features, tokens, start)
            count = jnp.where(segment.num > 0, count, 0)
            hidden = [self._last(out, count, k) for k, out in enumerate(outs)]
            cache = self._commit(cache, entries, start, count, hidden)
            # the last pair of each stage is read once more in the next round
            last = jnp.minimum(count, self.num_stages)
            where = (count - last)[:, None] + jnp.arange(self.num_pending)
            features, tokens, count = _take(features, where), _take(tokens, where), last
        some = segment.num > 0
        return FeatureState(
            cache=cache,
            features=jnp.where(some[:, None, None], features, state.features),
            tokens=jnp.where(some[:, None], tokens, state.tokens),
            count=jnp.where(some, count, state.count),
        )


def _take(x: jax.Array, where: jax.Array) -> jax.Array:
    """``x[b, where[b, i]]``, the last one beyond the end."""
    index = where.reshape(where.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")
