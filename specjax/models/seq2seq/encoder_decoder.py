"""One encoder–decoder for every family (T5, Whisper): a Transformer with a memory, in Flax NNX.

The encoder reads a whole input at once and returns one vector for each position, the *memory*. The
decoder is a ``Decoder`` whose blocks attend to the memory as well. The keys and values of the
memory do not change while text is written, so ``remember`` computes them once.

Besides the letters of ``attention.py``, ``S`` is the length of the encoder's input. The memory's
keys and values have the shape ``[B, K, S, E]``, as those of a cache have.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ... import sharding
from ...kernels.attention import choice_of
from ...sharding import DATA
from ..attention import attend_spread
from ..layers import Linear, Norm, columns, product
from .config import EncoderDecoderConfig
from .encoder import AttentionProjections, Encoder, EncoderBlock, table_of
from .relative_positions import spread_bias


class DecoderBlock(EncoderBlock):
    """An ``EncoderBlock`` with attention to the memory between its two layers."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs, param_dtype):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        self.cross_norm = Norm(config.hidden_size, config, param_dtype=param_dtype)
        self.cross = AttentionProjections(config, rngs=rngs, param_dtype=param_dtype)


class EncoderDecoder(nnx.Module):
    """An encoder and a decoder. The decoding loop calls ``encode`` and ``remember`` once, then
    ``hidden`` and ``head``; ``model(inputs, tokens)`` gives the logits of whole texts."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.config = config
        common, hidden = dict(rngs=rngs, param_dtype=param_dtype), config.hidden_size
        self.embedding = table_of(config.vocab_size, hidden, **common)
        self.encoder = Encoder(config, **common)
        relative, rows = config.num_buckets > 0, config.max_positions
        heads = config.num_heads
        self.relative_bias = table_of(config.num_buckets, heads, **common) if relative else None
        self.position_embedding = None if relative else table_of(rows, hidden, **common)
        self.blocks = nnx.List([DecoderBlock(config, **common) for _ in range(config.num_layers)])
        self.norm = Norm(hidden, config, param_dtype=param_dtype)
        tied = config.tie_embeddings
        self.lm_head = None if tied else Linear(hidden, config.vocab_size, **common)

    def encode(self, inputs, axis=None) -> tuple[jax.Array, jax.Array]:
        """Returns the memory ``[B, S, H]`` of ``inputs`` (see ``target.py``), and lengths [B]."""
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
        """Returns for each layer the keys and values of ``memory [B, S, H]``."""
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
        """Runs the decoder's trunk over ``N`` nodes a row.

        Args:
          memory: the keys and values that ``remember`` returned.
          source: int32 ``[B]``, the number of slots of the memory that a row sees.

        The other arguments and the result are those of ``Decoder.hidden``.
        """
        c, (batch, nodes) = self.config, tokens.shape
        here = jnp.broadcast_to(positions[:, -nodes:], tokens.shape)
        x = self._embed(tokens)
        if self.position_embedding is not None:
            where = jnp.clip(here, 0, c.max_positions - 1)  # no token is emitted beyond the table
            x = x + self.position_embedding[...][where.reshape(-1)].T
        bias, choice = None, None
        if prefix is not None:
            capacity = prefix[0][0].shape[2]
            choice = choice_of(capacity, length)
        if self.relative_bias is not None:
            slots = None if prefix is None else jnp.arange(capacity)[None]
            bias = self._bias(here, positions, axis), self._bias(here, slots, axis)
        there = choice_of(memory[0][0].shape[2], source)
        # the memory is passed as a prefix; `attend` also needs an entry for each node: unseen zeros
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
        """Returns logits float32 ``[B, T, V]`` of the decoder's tokens int32 ``[B, T]``."""
        batch, nodes = tokens.shape
        memory, lengths = self.encode(inputs)
        positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
        mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]  # [key, query]
        memory = self.remember(memory)
        hidden, _, _ = self.hidden(tokens, positions, mask, memory, lengths)
        return self.head(hidden, batch)

    def _embed(self, tokens):
        return columns(self.embedding[...], tokens, self.norm.weight[...].dtype)

    def _bias(self, positions, keys, axis):
        """The bias on scores, float32 ``[B, K, 1, N, keys]``; None without keys."""
        if keys is None:
            return None
        return spread_bias(self.relative_bias[...], self.config, positions, keys, axis, False)


@functools.cache
def abstract(config: EncoderDecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model and the shapes of its weights; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0))))
