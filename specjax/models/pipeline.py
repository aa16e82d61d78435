"""A decoder whose layers are divided over the mesh axis ``stage``: pipeline parallelism.

S devices have L / S layers each, with their weights and caches. A pass runs device by device: each
runs its own layers and sends the residual stream ``[H, B * N]`` to the next one, and the last one
sends it to all. With M microbatches the rows are divided into M parts, which follow each other
through the devices::

    tick        0     1     2     3     4
    device 0    m0    m1    m2    -     -
    device 1    -     m0    m1    m2    -
    device 2    -     -     m0    m1    m2

``StageSchedule`` counts ticks and idle devices. Embedding and LM head are held and computed by
every device, as is everything else in the loop: drafters, rules and sampling.

Lossless: the layers compute for each row what they compute on one device.

References: Huang et al., GPipe, arXiv 1811.06965 (microbatches and the share of idle devices);
there is no backward pass here.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import sharding
from ..sharding import DATA, STAGE
from ..types import Draft, HeadTarget, PyTree, Scores, Verdict
from . import kv_cache, stage_weights
from .causal_lm import CausalLM, layout, of_nodes, spread_logits, write
from .config import EVERY_SUBLAYER, DecoderConfig
from .decoder import Decoder, DecoderLayer, run_blocks
from .stage_weights import BLOCKS, ENDS, LAYERS


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """What one pass costs on S devices with M microbatches.

    A *tick* is the time in which a device runs its layers for one microbatch.

    Attributes:
      stages: S, the number of devices.
      microbatches: M, the number of parts of the rows.
    """

    stages: int
    microbatches: int = 1

    @property
    def ticks(self) -> int:
        """``S + M - 1``, the ticks from the first device's start to the last one's end."""
        return self.stages + self.microbatches - 1

    @property
    def bubble(self) -> float:
        """``(S - 1) / (S + M - 1)``, the share of the time in which a device is idle, in [0, 1)."""
        return (self.stages - 1) / self.ticks

    @property
    def weight_reads(self) -> int:
        """M, how often a device reads the weights of its layers in one pass."""
        return self.microbatches

    @property
    def sends(self) -> int:
        """How often a part of the residual stream crosses from a device to the next: once a tick
        between each two neighbours. (A device that is idle sends zeros.)"""
        return (self.stages - 1) * self.ticks


@dataclasses.dataclass(frozen=True)
class PipelinedLM(HeadTarget):
    """A decoder-only model whose layers are divided over the mesh axis ``stage``.

    ``params`` are those of ``stage_weights.divided``; ``specjax.load(..., mesh="stage=2")`` makes
    both. The cache holds for each layer of a device ``(keys, values)``, each
    ``[B, stages * K, S, E]``: the heads of all devices, side by side. Layers with a window have a
    ring where the layers at their place have a window on every device, and otherwise slots for the
    whole text.

    Attributes:
      whole: the model, as one device has it.
      stages: S, the size of the axis ``stage``.
      microbatches: M, in how many parts the rows of a device are passed on; where M does not divide
        them, as many as divide both. One part reads all weights once in a pass, which is best where
        reading weights takes the time; several keep more devices busy.

    Raises:
      ValueError: the layers cannot be divided, or the model is quantized, has a small cache, or its
        number of microbatches is below 1.

    Example::

        lm = specjax.load(folder, mesh="stage=2")
        split = dataclasses.replace(lm.target, microbatches=4)
        specjax.generate(dataclasses.replace(lm, target=split), prompts)
    """

    whole: CausalLM
    stages: int
    microbatches: int = 1

    def __post_init__(self):
        if self.stages == 1:
            raise ValueError("stages=1: one device has all layers; take the whole model itself")
        stage_weights.check_stages(self.config, self.stages)
        stage_weights.check_plain(self.whole, self.stages)
        count = self.microbatches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"microbatches={count!r}: give a whole number of at least 1")

    @property
    def parts(self) -> tuple[CausalLM]:
        return (self.whole,)

    def rewindable(self, num_tokens: int) -> PipelinedLM:
        return dataclasses.replace(self, whole=self.whole.rewindable(num_tokens))

    @property
    def config(self) -> DecoderConfig:
        """The shape of the model."""
        return self.whole.config

    @property
    def vocab_size(self) -> int:
        return self.whole.vocab_size

    @property
    def max_positions(self) -> int:
        return self.whole.max_positions

    @property
    def num_layers(self) -> int:
        return self.whole.num_layers

    @property
    def hidden_size(self) -> int:
        return self.whole.hidden_size

    @property
    def picks_logits(self) -> bool:
        return self.whole.picks_logits

    @property
    def reads_vectors(self) -> bool:
        return self.whole.reads_vectors

    @property
    def each(self) -> int:
        """The number of layers of a device."""
        return self.num_layers // self.stages

    def schedule(self, rows: int) -> StageSchedule:
        """Returns what a pass over ``rows`` rows of a device costs."""
        return StageSchedule(self.stages, math.gcd(self.microbatches, rows))

    def check_inputs(self, batch: int, inputs) -> None:
        self.whole.check_inputs(batch, inputs)

    def activation_dtype(self, params) -> np.dtype:
        return self.whole.activation_dtype(params[ENDS])

    def embed(self, params, tokens: jax.Array) -> jax.Array:
        return self.whole.embed(params[ENDS], tokens)

    def head(self, params, hidden: jax.Array, batch: int) -> jax.Array:
        return self._logits(self.ends(params), hidden, batch)

    def ends(self, params) -> Decoder:
        """The model without its layers."""
        return nnx.merge(structure(self.config)[0], params[ENDS])

    def _logits(self, model: Decoder, hidden: jax.Array, batch: int) -> jax.Array:
        return spread_logits(model.head(hidden, batch), self.vocab_size, None)

    def head_table(self, params) -> jax.Array:
        return self.whole.head_table(params[ENDS])

    def shard(self, params, mesh) -> PyTree:
        """The weights on the devices of a mesh: those of ``divided``, or the state of a decoder."""
        if BLOCKS in params:
            params = stage_weights.divided(params, self.config, self.stages)
        return stage_weights.placed(params, mesh)

    def sub_network(self, **settings):
        raise ValueError(
            f"sub_network: the layers of this target are divided over stage={self.stages} devices, "
            "and its parts do not draft; take another drafter, such as 'ngram' or a draft model, "
            "or load the target without the axis stage"
        )

    def _at(self, place: int) -> range:
        """The layers that stand at one place of the devices, one for each device."""
        return range(place, self.num_layers, self.each)

    def init(self, params, batch: int, capacity: int, inputs=None) -> PyTree:
        self.check_inputs(batch, inputs)
        sharding.check_divided(self.stages, sharding.size(STAGE))
        c, leaves = self.config, 1 if self.config.kv_rank else 2
        slots = [max(c.slots(i, capacity) for i in self._at(j)) for j in range(self.each)]
        heads, dtype = self.stages * c.num_kv_heads, self.activation_dtype(params)
        cache = kv_cache.init(slots, batch, heads, c.head_dim, dtype, leaves)
        return jax.tree.map(lambda x: sharding.spread(x, DATA, STAGE, None, None), cache)

    def commit(self, cache, entries, start, verdict: Verdict) -> PyTree:
        return write(cache, entries, start, verdict, STAGE, self.rings(cache))

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        model = self.ends(params)
        positions, sees, length = layout(draft)
        tokens = draft.tokens[:, since:]
        batch, nodes = tokens.shape
        own = draft.vectors
        vectors = None if own is None else (own.table, own.index[:, since:])
        x = model.embed(tokens, jnp.broadcast_to(positions[:, since:], tokens.shape), vectors)
        live = None
        if self.config.num_experts:
            live = positions >= 0 if draft.scored is None else (positions >= 0) & draft.scored
            live = jnp.broadcast_to(live, draft.tokens.shape)[:, since:]

        inner = tuple(i for i in features if 0 < i < self.num_layers)
        run = functools.partial(self._run, inner)
        every = (DATA,) if len(sees) == batch else ()
        specs = [(STAGE,), (None, DATA), (DATA,), every, (DATA,), (DATA,)]
        specs += [(DATA, STAGE), (DATA, STAGE)]
        results = [(None, DATA), (DATA, STAGE), (None, DATA)]
        given = x.reshape(-1, batch, nodes), positions, sees[:, :, since:], length, live
        run = sharding.locally(run, specs, results)
        last, fresh, tapped = run(params[LAYERS], *given, cache, entries)

        hidden = model.norm(last.reshape(-1, batch * nodes))
        seen = {0: x, self.num_layers: hidden} | dict(zip(inner, tapped, strict=True))
        found = None
        if features:
            found = jnp.concatenate([seen[i].reshape(-1, batch * nodes) for i in features], axis=0)
            found = found.T.reshape(batch, nodes, -1)
        if not isinstance(logits, bool):
            hidden = of_nodes(hidden, logits - since)
        out = None if logits is False else self._logits(model, hidden, batch)
        return Scores(logits=out, features=found, entries=fresh)

    def _run(self, taps, layers, x, positions, sees, length, live, cache, earlier):
        """On each device: the layers of all devices, one device after the other.

        Args:
          taps: the hidden states that are returned.
          layers: of this device, leaves ``[1, ...]``.
          x: ``[H, B, N]``; B counts the rows of this device.
          positions, sees, length, live: as of ``decoder.run_blocks``, with all rows or, of
            ``sees``, one for all.
          cache, earlier: of this device, leaves ``[B, K, ...]``; there may be no ``earlier``.

        Returns:
          ``[H, B, N]`` after the last layer; the entries of this device, leaves
          ``[B, K, M, E]``; for each of ``taps`` ``[H, B, N]``.
        """
        here, rows = jax.lax.axis_index(STAGE), x.shape[1]
        schedule, last = self.schedule(rows), self.stages - 1
        size = rows // schedule.microbatches
        blocks = self.blocks(layers)

        def of(tree, part, axis=0):
            """The rows of microbatch ``part``."""
            if schedule.microbatches == 1:
                return tree
            take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=axis)
            return jax.tree.map(lambda x: take(x, start_index=part * size), tree)

        def put(whole, new, part, keep, axis=0):
            """``whole`` with the rows of microbatch ``part``, where ``keep``."""
            if schedule.microbatches > 1:
                write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
                new = jax.tree.map(lambda x, y: write(x, y, part * size), whole, new)
            return jax.tree.map(lambda x, y: jnp.where(keep, y, x), whole, new)

        def run(stage, part, now):
            """What device ``stage`` computes of a microbatch: states, entries and ``taps``."""
            seen, made = self.run_stage(
                stage,
                blocks,
                now.reshape(len(now), -1),
                of(positions, part),
                of(sees, part) if len(sees) == rows else sees,
                of(cache, part),
                earlier=None if earlier is None else of(earlier, part),
                batch=size,
                length=of(length, part),
                live=of(live, part),
            )
            first = stage * self.each
            states = [x.reshape(now.shape) for x in seen]
            nothing = jnp.zeros_like(now)
            found = [states[i] if first < i <= first + self.each else nothing for i in taps]
            return states[-1], made, found

        made = jax.eval_shape(lambda: run(0, 0, of(x, 0, axis=1)))
        idle = lambda part, now: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)  # noqa: E731
        runs = [*(functools.partial(run, stage) for stage in range(self.stages)), idle]

        def tick(i, carry):
            received, out, entries, tapped = carry
            busy = (i >= here) & (i < here + schedule.microbatches)
            part = jnp.clip(i - here, 0, schedule.microbatches - 1)
            now = jnp.where(here == 0, of(x, part, axis=1), received)
            states, fresh, found = jax.lax.switch(
                jnp.where(busy, here, self.stages), runs, part, now
            )
            out = put(out, states, part, busy & (here == last), axis=1)
            tapped = put(tapped, found, part, busy, axis=1)
            onwards = [(stage, stage + 1) for stage in range(last)]
            received = jax.lax.ppermute(states, STAGE, onwards)
            return received, out, put(entries, fresh, part, busy), tapped

        def empty(one, axis=0):
            shape = (*one.shape[:axis], rows, *one.shape[axis + 1 :])
            return jnp.zeros(shape, one.dtype)

        nothing = jnp.zeros_like(x)
        begin = jnp.zeros(made[0].shape, x.dtype), nothing, jax.tree.map(empty, made[1])
        carry = (*begin, [nothing for _ in taps])
        _, out, entries, tapped = jax.lax.fori_loop(0, schedule.ticks, tick, carry)
        out, tapped = jax.lax.psum((out, tapped), STAGE)
        return out, entries, tapped

    def blocks(self, layers) -> list[DecoderLayer]:
        """The layers of the device that calls this, of its weights, leaves ``[1, ...]``."""
        return [
            nnx.merge(definition, jax.tree.map(lambda x: x[0], own))
            for definition, own in zip(structure(self.config)[1], layers, strict=False)
        ]

    def run_stage(self, stage: int, blocks, x, positions, sees, cache, earlier=None, **given):
        """Runs the layers of device ``stage``, on that device.

        Args:
          stage: the device.
          blocks: its layers, from ``blocks``.
          cache, earlier: those of its layers; there may be no ``earlier``.
          x, positions, sees, given: see ``decoder.run_blocks``.

        Returns:
          the hidden states, counted as those of the model: those before ``stage``'s first layer
          are ``x``, those after its last one its result; and the entries of its layers.
        """
        first = stage * self.each
        seen, made = run_blocks(
            self.config,
            blocks * self.stages,  # the device runs its own alone, see ``without``
            x,
            positions,
            sees,
            prefix=cache * self.stages,
            earlier=None if earlier is None else earlier * self.stages,
            without=self._others(stage),
            **given,
        )
        return seen, made[first : first + self.each]

    def rings(self, cache) -> list[bool]:
        """For each layer of a device whether its cache is a ring; where it is none, the layers at
        this place have slots for the whole text."""
        sizes = [jax.tree.leaves(layer)[0].shape[2] for layer in cache]
        return [
            all(self.config.is_ring(i, size) for i in self._at(j)) for j, size in enumerate(sizes)
        ]

    def _others(self, stage: int) -> tuple[frozenset[str], ...]:
        """For each layer of the model the sublayers that device ``stage`` does not run."""
        mine = range(stage * self.each, (stage + 1) * self.each)
        return tuple(frozenset() if i in mine else EVERY_SUBLAYER for i in range(self.num_layers))


@functools.cache
def structure(config: DecoderConfig) -> tuple[nnx.GraphDef, tuple[nnx.GraphDef, ...]]:
    """Returns the structure of a decoder without its layers, and that of each layer."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    layers = tuple(nnx.split(block)[0] for block in model.blocks)
    model.blocks = nnx.List([])
    return nnx.split(model)[0], layers
