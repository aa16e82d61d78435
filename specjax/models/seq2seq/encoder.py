"""The encoder, and the attention layer that it shares with the decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ... import sharding
from ...sharding import DATA
from ..attention import attend_spread
from ..decoder import MLP
from ..layers import Linear, Norm
from .config import EncoderDecoderConfig
from .relative_positions import spread_bias

QUERIES = 512  # positions of the encoder that attend at once, which bounds its memory


class AttentionProjections(nnx.Module):
    """The projections of one attention layer; the caller computes the attention itself."""

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
        """Projects ``x [H, B * N]`` to queries ``[B, K, E, 1, N]``, scaled for ``attend``."""
        q = self._heads(self.q(x), batch).transpose(2, 0, 1, 3)[:, :, :, None]
        return q if self.config.scale_attention else q * self.config.head_dim**0.5

    def entries(self, x, batch):
        """Projects ``x [H, B * N]`` to keys and values, each ``[B, K, N, E]``."""
        k, v = (self._heads(part(x), batch).transpose(2, 0, 3, 1) for part in (self.k, self.v))
        return k, v

    def output(self, out):
        """Projects the result of attention ``[B, K, E, 1, N]`` to ``[H, B * N]``."""
        inner = self.config.num_heads * self.config.head_dim
        return self.o(out[:, :, :, 0].transpose(1, 2, 0, 3).reshape(inner, -1))

    def _heads(self, x, batch):
        return x.reshape(self.config.num_heads, self.config.head_dim, batch, -1)


class EncoderBlock(nnx.Module):
    """Pre-norm attention to the whole input, and a feed-forward layer."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        common = dict(param_dtype=param_dtype)
        self.attention_norm = Norm(config.hidden_size, config, **common)
        self.attention = AttentionProjections(config, rngs=rngs, **common)
        self.mlp_norm = Norm(config.hidden_size, config, **common)
        self.mlp = MLP(config, rngs=rngs, **common)


def table_of(rows, columns, rngs, param_dtype) -> nnx.Param:
    """A table ``[rows, columns]`` of small random numbers."""
    values = jax.random.normal(rngs.params(), (rows, columns)) * 0.02
    return nnx.Param(values.astype(param_dtype))


class Convolution(nnx.Module):
    """A convolution over three frames with GELU: ``[B, in, T] -> [B, out, T / stride]``."""

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
    """Maps embedded inputs ``[H, B * S]`` to the normed memory; all positions see each other."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        self.config = config
        common, hidden = dict(rngs=rngs, param_dtype=param_dtype), config.hidden_size
        hears, relative = config.reads == "features", config.num_buckets > 0
        self.conv1 = Convolution(config.num_features, hidden, 1, **common) if hears else None
        self.conv2 = Convolution(hidden, hidden, 2, **common) if hears else None
        self.position_embedding = table_of(config.max_source, hidden, **common) if hears else None
        heads = config.num_heads
        self.relative_bias = table_of(config.num_buckets, heads, **common) if relative else None
        self.blocks = nnx.List(
            [EncoderBlock(config, **common) for _ in range(config.num_encoder_layers)]
        )
        self.norm = Norm(hidden, config, param_dtype=param_dtype)

    def hear(self, features):
        """Embeds features ``[B, num_features, frames]`` as ``[H, B * S]``."""
        x = self.conv2(self.conv1(features.astype(self.norm.weight[...].dtype)))
        x = x + self.position_embedding[...].T
        return x.transpose(1, 0, 2).reshape(x.shape[1], -1)

    def __call__(self, x, lengths, axis=None):
        """Runs the encoder.

        Args:
          x: ``[H, B * S]``, the embedded input.
          lengths: int32 ``[B]``, the number of positions of each row that are seen.
          axis: the axis of the mesh in use over which heads are spread, or None.

        Returns:
          ``[H, B * S]``.
        """
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
        """Calls ``attend`` for all positions, for ``QUERIES`` of them at a time."""
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
