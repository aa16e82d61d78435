"""One encoder–decoder for every family (T5, Whisper): a Transformer with a memory, in Flax NNX.

The encoder reads a whole input at once and leaves one vector a position, the *memory*. The decoder
is a ``Decoder`` whose blocks attend to the memory as well; the keys and values that they need of
it do not change while text is written, so ``remember`` computes them once.

Besides the letters of ``attention.py``, ``S`` is the length of the encoder's input, and the sizes
of a memory's keys and values are ``[B, K, S, E]``, like a cache's.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ... import kernels, sharding
from ...kernels.attention import choice_of
from ...sharding import DATA
from .. import quantize
from ..attention import attend_spread
from ..decoder import MLP
from ..layers import Linear, Norm, product

QUERIES = 512  # positions of the encoder that attend at once: bounds its memory

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_encoder_layers",
    "num_layers",
    "num_heads",
    "head_dim",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Everything that distinguishes one encoder–decoder family from another; defaults are T5's.

    ``reads``: what the encoder takes, ``"tokens"`` or ``"features"`` (``num_features`` of them at
    each of ``2 * max_source`` frames). ``num_buckets``: of relative distances, 0 where positions
    are learned. ``max_source``, ``max_positions``: of encoder and decoder, None: no limit.
    ``start_id`` begins every decoder's text, ``start_ids`` is the whole prompt where there is a
    default one. ``suppress_ids`` are never generated, ``begin_suppress_ids`` not as the first.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_layers: int
    num_heads: int
    head_dim: int
    model_type: str = "t5"
    reads: str = "tokens"
    num_features: int = 0
    max_source: int | None = None
    max_positions: int | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    activation: str = "relu"
    gated_mlp: bool = False
    mlp_bias: bool = False
    attention_bias: bool = False  # of queries, values and outputs; keys need none
    scale_attention: bool = False
    scale_logits: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    tie_embeddings: bool = True
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    start_id: int = 0
    start_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    begin_suppress_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.num_buckets and (self.num_buckets < 4 or self.num_buckets % 4):
            raise ValueError(f"num_buckets={self.num_buckets} must be a multiple of 4")
        if self.num_buckets and self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} must exceed half of num_buckets="
                f"{self.num_buckets}: near distances have a bucket each"
            )


@functools.cache
def buckets(num: int, farthest: int, both_ways: bool) -> np.ndarray:
    """The bucket of each distance ``0 ... farthest``, int32; further ones share the last.

    Half of the buckets are for single distances, the others for ranges that grow like powers.
    ``both_ways``: half of ``num`` serves what lies behind, the other (added by ``bias_of``) what
    lies ahead. Rounded as PyTorch rounds: at powers of two an edge of a range is hit exactly.
    """
    num = num // 2 if both_ways else num
    near = num // 2
    distance = np.arange(farthest + 1)
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(near))
    steps = ratio / np.float32(math.log(farthest / near)) * np.float32(num - near)
    far = np.minimum(near + steps.astype(np.int32), num - 1)
    return np.where(distance < near, distance, far).astype(np.int32)


def bias_of(table, config: EncoderDecoderConfig, distance, both_ways: bool) -> jax.Array:
    """What a distance adds to the score, float32 ``[heads, *distance.shape]``.

    Args:
      table: ``[num_buckets, heads]``.
      distance: int32, position of the query less that of the key.
    """
    known = buckets(config.num_buckets, config.max_distance, both_ways)
    by_distance = table.astype(jnp.float32).T[:, known]
    if both_ways:
        ahead = table.astype(jnp.float32).T[:, known + config.num_buckets // 2]
        by_distance = jnp.concatenate([ahead[:, :0:-1], by_distance], axis=1)
    low = -config.max_distance if both_ways else 0
    return jnp.take(by_distance, jnp.clip(distance, low, config.max_distance) - low, axis=1)


def spread_bias(table, config: EncoderDecoderConfig, positions, keys, axis, both_ways: bool):
    """What ``attend`` adds to scores, on each device of the mesh in use that of its rows and heads.

    Args:
      table: ``[num_buckets, heads]``.
      positions, keys: int32 ``[B or 1, N]`` and ``[B or 1, M]``.
      axis: of the mesh over which heads are spread, or None.
      both_ways: of an encoder, whose layers make it anew, ``[S, S]`` large as it is; those of a
        decoder share it.

    Returns:
      float32 ``[B or 1, K, 1, N, M]``.
    """

    def own(table, positions, keys):
        distance = positions[:, :, None] - keys[:, None]
        bias = bias_of(table, config, distance, both_ways)
        return (bias if both_ways else kernels.current().materialize(bias)).swapaxes(0, 1)[
            :, :, None
        ]

    batch = max(len(positions), len(keys))
    specs = [(DATA,) if len(x) == batch > 1 else () for x in (positions, keys)]
    rows = DATA if batch > 1 else None
    return sharding.locally(own, [(None, axis), *specs], (rows, axis))(table, positions, keys)


class Attention(nnx.Module):
    """Projections of one attention layer; to what it attends is the caller's business."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        self.config = config
        inner = config.num_heads * config.head_dim
        common = dict(rngs=rngs, param_dtype=param_dtype)
        bias = config.attention_bias
        self.q = Linear(config.hidden_size, inner, bias=bias, **common)
        self.k = Linear(config.hidden_size, inner, **common)
        self.v = Linear(config.hidden_size, inner, bias=bias, **common)
        self.o = Linear(inner, config.hidden_size, bias=bias, **common)

    def query(self, x, batch):
        """``[H, B * N] -> [B, K, E, 1, N]``, such that the scaling of ``attend`` is the model's."""
        q = self._heads(self.q(x), batch).transpose(2, 0, 1, 3)[:, :, :, None]
        return q if self.config.scale_attention else q * self.config.head_dim**0.5

    def entries(self, x, batch):
        """``[H, B * N] ->`` keys and values, each ``[B, K, N, E]``."""
        k, v = (self._heads(part(x), batch).transpose(2, 0, 3, 1) for part in (self.k, self.v))
        return k, v

    def output(self, out):
        """``[B, K, E, 1, N] -> [H, B * N]``."""
        inner = self.config.num_heads * self.config.head_dim
        return self.o(out[:, :, :, 0].transpose(1, 2, 0, 3).reshape(inner, -1))

    def _heads(self, x, batch):
        return x.reshape(self.config.num_heads, self.config.head_dim, batch, -1)


class EncoderBlock(nnx.Module):
    """Pre-norm attention to the whole input, and a feed-forward layer."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        common = dict(param_dtype=param_dtype)
        self.attention_norm = Norm(config.hidden_size, config, **common)
        self.attention = Attention(config, rngs=rngs, **common)
        self.mlp_norm = Norm(config.hidden_size, config, **common)
        self.mlp = MLP(config, rngs=rngs, **common)


class DecoderBlock(EncoderBlock):
    """The same with attention to the memory in between."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        self.cross_norm = Norm(config.hidden_size, config, param_dtype=param_dtype)
        self.cross = Attention(config, rngs=rngs, param_dtype=param_dtype)


def _table(rows, columns, rngs, param_dtype):
    values = jax.random.normal(rngs.params(), (rows, columns)) * 0.02
    return nnx.Param(values.astype(param_dtype))


class Convolution(nnx.Module):
    """Over time, three frames wide: ``[B, in, T] -> [B, out, T / stride]``, then GELU."""

    def __init__(self, num_in, num_out, stride, *, rngs, param_dtype):
        init = jax.random.normal(rngs.params(), (num_out, num_in, 3)) * (3 * num_in) ** -0.5
        self.weight = nnx.Param(init.astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), param_dtype))
        self.stride = stride

    def __call__(self, x):
        y = jax.lax.conv_general_dilated(
            x, self.weight[...], (self.stride,), [(1, 1)], dimension_numbers=("NCH", "OIH", "NCH")
        )
        return jax.nn.gelu(y + self.bias[...][:, None], approximate=False)


class Encoder(nnx.Module):
    """``[H, B * S]`` embedded inputs to the normed memory, every position seeing every other."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        self.config = config
        common, hidden = dict(rngs=rngs, param_dtype=param_dtype), config.hidden_size
        hears, relative = config.reads == "features", config.num_buckets > 0
        self.conv1 = Convolution(config.num_features, hidden, 1, **common) if hears else None
        self.conv2 = Convolution(hidden, hidden, 2, **common) if hears else None
        self.position_embedding = _table(config.max_source, hidden, **common) if hears else None
        heads = config.num_heads
        self.relative_bias = _table(config.num_buckets, heads, **common) if relative else None
        self.blocks = nnx.List(
            [EncoderBlock(config, **common) for _ in range(config.num_encoder_layers)]
        )
        self.norm = Norm(hidden, config, param_dtype=param_dtype)

    def hear(self, features):
        """``[B, num_features, frames] -> [H, B * S]``."""
        x = self.conv2(self.conv1(features.astype(self.norm.weight[...].dtype)))
        x = x + self.position_embedding[...].T
        return x.transpose(1, 0, 2).reshape(x.shape[1], -1)

    def __call__(self, x, lengths, axis=None):
        """``x [H, B * S]``, of which the first ``lengths`` int32 ``[B]`` count: the same shape.

        ``axis``: of the mesh in use over which heads are spread, or None."""
        batch = lengths.shape[0]
        x = sharding.spread(x, None, DATA)
        for block in self.blocks:
            normed = block.attention_norm(x)
            query = block.attention.query(normed, batch)
            out = self._attend(query, *block.attention.entries(normed, batch), lengths, axis)
            x = x + block.attention.output(out)
            x = sharding.spread(x + block.mlp(block.mlp_norm(x)), None, DATA)
        return self.norm(x)

    def _attend(self, query, key, value, lengths, axis):
        """``attend`` for all positions, ``QUERIES`` of them at a time."""
        size = key.shape[2]
        slots = jnp.arange(size)
        seen = (slots < lengths[:, None])[:, :, None]

        def part(begin, query):
            nodes, bias = query.shape[-1], None
            if self.relative_bias is not None:
                places = begin + jnp.arange(nodes)[None], slots[None]
                table = self.relative_bias[...]
                bias = spread_bias(table, self.config, *places, axis, both_ways=True), None
            mask = jnp.broadcast_to(seen, (*seen.shape[:2], nodes))
            return attend_spread(query, key, value, mask, bias=bias, axis=axis)

        if size <= QUERIES:
            return part(0, query)
        count = -(-size // QUERIES)
        padded = jnp.pad(query, [(0, 0)] * 4 + [(0, count * QUERIES - size)])
        pieces = jnp.moveaxis(padded.reshape(*query.shape[:-1], count, QUERIES), -2, 0)
        out = jax.lax.map(lambda x: part(*x), (jnp.arange(count) * QUERIES, pieces))
        return jnp.moveaxis(out, 0, -2).reshape(padded.shape)[..., :size]


class EncoderDecoder(nnx.Module):
    """An encoder and a decoder. The decoding loop calls ``encode`` and ``remember`` once, then
    ``hidden`` and ``head``; ``model(inputs, tokens)`` gives the logits of whole texts."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.config = config
        common, hidden = dict(rngs=rngs, param_dtype=param_dtype), config.hidden_size
        self.embedding = _table(config.vocab_size, hidden, **common)
        self.encoder = Encoder(config, **common)
        relative, rows = config.num_buckets > 0, config.max_positions
        heads = config.num_heads
        self.relative_bias = _table(config.num_buckets, heads, **common) if relative else None
        self.position_embedding = None if relative else _table(rows, hidden, **common)
        self.blocks = nnx.List([DecoderBlock(config, **common) for _ in range(config.num_layers)])
        self.norm = Norm(hidden, config, param_dtype=param_dtype)
        tied = config.tie_embeddings
        self.lm_head = None if tied else Linear(hidden, config.vocab_size, **common)

    def encode(self, inputs, axis=None) -> tuple[jax.Array, jax.Array]:
        """The memory ``[B, S, H]`` of ``inputs`` (see ``seq2seq.py``) and its lengths int32 [B]."""
        if "memory" in inputs:
            return inputs["memory"], jnp.asarray(inputs["lengths"], jnp.int32)
        if self.config.reads == "features":
            batch = inputs["features"].shape[0]
            lengths = jnp.full((batch,), self.config.max_source, jnp.int32)
            x = self.encoder.hear(jnp.asarray(inputs["features"]))
        else:
            tokens, lengths = (jnp.asarray(inputs[k], jnp.int32) for k in ("tokens", "lengths"))
            batch, x = tokens.shape[0], self._embed(tokens)
        memory = self.encoder(x, lengths, axis)
        return memory.reshape(memory.shape[0], batch, -1).transpose(1, 2, 0), lengths

    def remember(self, memory):
        """``[B, S, H] ->`` per layer the keys and values of its attention to the memory."""
        x = memory.transpose(2, 0, 1).reshape(memory.shape[2], -1)
        x = x.astype(self.norm.weight[...].dtype)
        return tuple(block.cross.entries(x, memory.shape[0]) for block in self.blocks)

    def hidden(
        self,
        tokens,
        positions,
        own_mask,
        memory,
        source,
        *,
        prefix=None,
        length=None,
        earlier=None,
        taps=(),
        axis=None,
    ):
        """The decoder's trunk over ``N`` nodes a row; as ``Decoder.hidden``, and

        Args:
          memory: what ``remember`` returned.
          source: int32 ``[B]``, how many slots of the memory a row sees.
        """
        c, (batch, nodes) = self.config, tokens.shape
        here = jnp.broadcast_to(positions[:, -nodes:], tokens.shape)
        x = self._embed(tokens)
        if self.position_embedding is not None:
            where = jnp.clip(here, 0, c.max_positions - 1)  # beyond it nothing is emitted
            x = x + self.position_embedding[...][where.reshape(-1)].T
        bias, choice = None, None
        if prefix is not None:
            capacity = prefix[0][0].shape[2]
            choice = choice_of(capacity, length)
        if self.relative_bias is not None:
            slots = None if prefix is None else jnp.arange(capacity)[None]
            bias = self._bias(here, positions, axis), self._bias(here, slots, axis)
        there = choice_of(memory[0][0].shape[2], source)
        # the memory is a prefix, and there has to be an entry of one's own: one that is not seen
        unseen = jnp.zeros((1, 1, nodes), bool)
        nothing = jnp.zeros((batch, c.num_heads, 1, c.head_dim), x.dtype)
        x = sharding.spread(x, None, DATA)
        states, entries = {0: x}, []
        for i, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            query = block.attention.query(normed, batch)
            k, v = block.attention.entries(normed, batch)
            if earlier is not None:
                k, v = (
                    jnp.concatenate(pair, axis=2) for pair in zip(earlier[i], (k, v), strict=True)
                )
            past = None if prefix is None else prefix[i]
            own = dict(prefix=past, length=length, choice=choice, bias=bias)
            out = attend_spread(query, k, v, own_mask, axis=axis, **own)
            x = x + block.attention.output(out)
            query = block.cross.query(block.cross_norm(x), batch)
            read = dict(prefix=memory[i], length=source, choice=there)
            out = attend_spread(query, nothing, nothing, unseen, axis=axis, **read)
            x = x + block.cross.output(out)
            x = sharding.spread(x + block.mlp(block.mlp_norm(x)), None, DATA)
            entries.append((k, v))
            states[i + 1] = x
        out = states[len(self.blocks)] = self.norm(x)
        tapped = None
        if taps:
            tapped = jnp.concatenate([states[i] for i in taps], axis=0)
            tapped = tapped.T.reshape(batch, nodes, -1)
        return out, tapped, tuple(entries)

    def head(self, hidden: jax.Array, batch: int) -> jax.Array:
        """``[H, B * N] -> float32 logits [B, N, V]``."""
        if self.config.scale_logits:
            hidden = hidden * self.config.hidden_size**-0.5
        table = self.embedding if self.lm_head is None else self.lm_head.weight
        logits = product(table[...], hidden, transpose_out=True)
        return logits.astype(jnp.float32).reshape(batch, -1, self.config.vocab_size)

    def __call__(self, inputs, tokens: jax.Array) -> jax.Array:
        """Logits float32 ``[B, T, V]`` of decoder tokens int32 ``[B, T]`` under ``inputs``."""
        batch, nodes = tokens.shape
        memory, lengths = self.encode(inputs)
        positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
        mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]  # [key, query]
        memory = self.remember(memory)
        hidden, _, _ = self.hidden(tokens, positions, mask, memory, lengths)
        return self.head(hidden, batch)

    def _embed(self, tokens):
        dtype = self.norm.weight[...].dtype
        return quantize.take(self.embedding[...], tokens.reshape(-1), dtype).T

    def _bias(self, positions, keys, axis):
        """float32 ``[B, K, 1, N, keys]``; None without keys."""
        if keys is None:
            return None
        return spread_bias(self.relative_bias[...], self.config, positions, keys, axis, False)


@functools.cache
def abstract(config: EncoderDecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model and the shapes of its weights; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0))))
