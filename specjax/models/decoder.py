"""One decoder for every family: a configurable Transformer in Flax NNX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .. import sharding
from ..kernels.attention import choice_of
from ..kernels.quantized import is_quantized
from ..sharding import DATA, MODEL
from . import low_bits, remat
from .attention import attend_spread, within
from .config import ATTENTION, EVERY_SUBLAYER, MLP_SUBLAYER, DecoderConfig
from .gates import as_gates, gated
from .layers import (
    ACTIVATIONS,
    Linear,
    Norm,
    columns,
    fused_linear,
    product,
    rotate,
    softcap,
    swiglu_linear,
    turns,
)
from .mla import LatentAttention
from .moe import MoE


class Attention(nnx.Module):
    """Grouped-query attention; the caller passes ``attention``, which holds cache and masks.

    ``num_in`` is the number of features that the layer reads, if it differs from ``hidden_size``.
    """

    def __init__(self, config: DecoderConfig, num_in: int | None = None, *, rngs, param_dtype):
        self.config = config
        heads, kv, size = config.num_heads, config.num_kv_heads, config.head_dim
        common, num_in = dict(rngs=rngs, param_dtype=param_dtype), num_in or config.hidden_size
        self.q = Linear(num_in, heads * size, bias=config.qkv_bias, **common)
        self.k = Linear(num_in, kv * size, bias=config.qkv_bias, **common)
        self.v = Linear(num_in, kv * size, bias=config.qkv_bias, **common)
        out_scale = (2 * config.num_layers) ** -0.5  # GPT-2's residual initialisation
        self.o = Linear(
            heads * size, config.hidden_size, bias=config.o_bias, scale=out_scale, **common
        )
        make_norm = lambda: Norm(size, config, kind="rms", param_dtype=param_dtype)  # noqa: E731
        self.q_norm = make_norm() if config.qk_norm else None
        self.k_norm = make_norm() if config.qk_norm else None

    def __call__(self, x, rope, batch, attention):
        c = self.config
        kv, size, groups = c.num_kv_heads, c.head_dim, c.num_groups
        nodes = x.shape[1] // batch
        q, k, v = fused_linear(x, self.q, self.k, self.v)
        q = q.reshape(kv, groups, size, batch, nodes)
        if self.q_norm is not None:
            q = jnp.moveaxis(self.q_norm(jnp.moveaxis(q, 2, 0)), 0, 2)
        if rope is not None:  # cos, sin: [E / 2, B, N], or fewer features
            q = rotate(q, *rope, axis=2)
        if c.query_scalar is not None:  # ``attend`` divides by the root of the head's size
            q = q * (size / c.query_scalar) ** 0.5
        q = q.transpose(3, 0, 2, 1, 4)  # [B, K, E, G, N]
        out, entries = attention(q, *self.entries(k, v, rope, batch))  # [B, K, E, G, N]
        out = out.transpose(1, 3, 2, 0, 4).reshape(kv * groups * size, batch * nodes)
        return self.o(out), entries

    def entries(self, k, v, rope, batch):
        """Returns normed and rotated keys, and values, each ``[B, K, N, E]``.

        ``k`` and ``v`` are the projections ``[K * E, B * N]`` of the input.
        """
        heads, size = self.config.num_kv_heads, self.config.head_dim
        k = k.reshape(heads, size, batch, -1)
        if self.k_norm is not None:
            k = jnp.moveaxis(self.k_norm(jnp.moveaxis(k, 1, 0)), 0, 1)
        if rope is not None:
            k = rotate(k, *rope, axis=1)
        v = v.reshape(heads, size, batch, -1)
        return k.transpose(2, 0, 3, 1), v.transpose(2, 0, 3, 1)


class MLP(nnx.Module):
    """A gated (Llama) or plain (GPT-2) feed-forward layer, ``size`` wide.

    ``size=None`` stands for the config's intermediate size.
    """

    def __init__(self, config: DecoderConfig, size: int | None = None, *, rngs, param_dtype):
        wide = size or config.intermediate_size
        common = dict(bias=config.mlp_bias, rngs=rngs, param_dtype=param_dtype)
        self.activation, self.swiglu = ACTIVATIONS[config.activation], config.activation == "silu"
        self.gate = Linear(config.hidden_size, wide, **common) if config.gated_mlp else None
        self.up = Linear(config.hidden_size, wide, **common)
        self.down = Linear(
            wide, config.hidden_size, scale=(2 * config.num_layers) ** -0.5, **common
        )

    def __call__(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        if self.swiglu:
            return self.down(swiglu_linear(x, self.gate, self.up))
        gate, up = fused_linear(x, self.gate, self.up)
        return self.down(self.activation(gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward layer on a residual stream ``[H, B * N]``, each after a norm."""

    def __init__(self, config: DecoderConfig, layer: int, *, rngs, param_dtype):
        common = dict(param_dtype=param_dtype)
        make_norm = lambda: Norm(config.hidden_size, config, **common)  # noqa: E731
        self.parallel = config.parallel_residual
        self.attention_norm = make_norm()
        attention = LatentAttention if config.kv_rank else Attention
        self.attention = attention(config, rngs=rngs, **common)
        self.attention_post_norm = make_norm() if config.sandwich_norms else None
        self.mlp_norm = make_norm()
        if config.has_experts(layer):
            size = config.shared_experts * config.expert_size
            shared = MLP(config, size, rngs=rngs, **common) if size else None
            self.mlp = MoE(config, shared, rngs=rngs, **common)
        else:
            self.mlp = MLP(config, rngs=rngs, **common)
        self.mlp_post_norm = make_norm() if config.sandwich_norms else None

    def enter(self, x):
        """The input of attention, and the residual stream to which its output is added."""
        return self.attention_norm(x), x

    def entries(self, x, rope, batch):
        """Returns only keys and values, as ``__call__`` makes them with plain ``Attention``."""
        read, _ = self.enter(x)
        own = self.attention
        return own.entries(*fused_linear(read, own.k, own.v), rope, batch)

    def __call__(self, x, rope, batch, attention, live=None, without=frozenset(), gates=None):
        read, x = self.enter(x)
        middle, entries = x, None

        def attend():
            out, entries = self.attention(read, rope, batch, attention)
            return _normed(self.attention_post_norm, out), entries

        def feed_forward():
            out = self.mlp_norm(x if self.parallel else middle)
            out = self.mlp(out, live) if isinstance(self.mlp, MoE) else self.mlp(out)
            return _normed(self.mlp_post_norm, out), None

        own = (None, None) if gates is None else gates
        if ATTENTION not in without:
            middle, entries = gated(own[0], x, attend)
        if MLP_SUBLAYER in without:
            return middle, entries
        return gated(own[1], middle, feed_forward)[0], entries


def _normed(norm, x):
    return x if norm is None else norm(x)


def run_blocks(
    config: DecoderConfig,
    blocks,
    x: jax.Array,
    positions: jax.Array,
    own_mask: jax.Array | None,
    local_mask: jax.Array | None = None,
    *,
    batch: int,
    prefix=None,
    length=None,
    earlier=None,
    live=None,
    axis=None,
    attend=None,
    without=None,
    gates=None,
    causal=False,
) -> tuple[list[jax.Array], tuple]:
    """Runs the layers, one after the other, over ``N`` nodes a row.

    Args:
      config: the shape of the decoder.
      blocks: the layers of a decoder of this ``config``.
      x: ``[H, B * N]``, the input of the first layer.
      batch: B, the number of rows.
      attend: a function that replaces ``attention.attend_spread``, or None. ``attend(i, q,
        *fresh) -> (out, entries)`` is called for layer ``i``; masks, ``prefix`` and ``earlier``
        are then not used.
      without: for each layer the sublayers that are left out, of ``EVERY_SUBLAYER``; None: none
        is. A layer without attention has the entries None.
      gates: for attention and MLP of each layer bool ``[L, 2]``, whether it runs, or factors on its
        output ``[L, 2]`` or, row by row, ``[L, 2, B]``; None: all run. See ``gates.gated``.

    The other arguments are those of ``Decoder.hidden``.

    Returns:
      ``x`` and the output of each layer, each ``[H, B * N]``; the entries of each layer.
    """
    c, nodes = config, x.shape[1] // batch
    here = jnp.broadcast_to(positions[:, -nodes:], (batch, nodes))
    x, entries = sharding.spread(x, None, DATA), []
    live = None if live is None else live.reshape(-1)
    gates = None if gates is None else as_gates(gates, x.dtype, nodes)
    ropes = {not c.is_local(i): None for i in range(c.num_layers)}
    if c.positions == "rope":
        ropes = {full: turns(c, here, full, x.dtype) for full in ropes}
    slots = [] if prefix is None else [jax.tree.leaves(past)[0].shape[2] for past in prefix]
    choices = {size: choice_of(size, length) for size in {*slots}}
    local_mask = own_mask if local_mask is None else local_mask
    if attend is None:
        local_mask = within(local_mask, positions, here, c.window)
        own_mask = within(own_mask, positions, here, c.cache_window, c.sinks)
    seen = [x]  # feature-major, kept only as far as they are used
    for i, block in enumerate(blocks):
        left_out = frozenset() if without is None else without[i]
        if left_out == EVERY_SUBLAYER:
            entries.append(None)
            seen.append(x)
            continue
        full = not c.is_local(i)
        projection = getattr(block.attention, "q", None)  # queries of a low rank have two others
        rounded = projection is not None and is_quantized(projection.weight[...])
        settings: dict = dict(softcap=c.score_softcap, causal=causal, rounded=rounded)
        if prefix is not None:
            past = prefix[i] if len(prefix[i]) > 1 else prefix[i] * 2  # latents are both
            settings |= dict(prefix=past, length=length, choice=choices[slots[i]])
            if c.is_ring(i, slots[i]):
                settings |= dict(window=c.window_of(i), sinks=c.sinks_of(i), positions=here)
        before = None if earlier is None else earlier[i]
        mask = own_mask if full else local_mask

        def attention(q, *fresh, before=before, mask=mask, settings=settings):
            fresh = low_bits.encoded(c.cache_bits, fresh)
            if before is not None:
                fresh = tuple(jnp.concatenate(x, axis=2) for x in zip(before, fresh, strict=True))
            own = low_bits.decoded(c.cache_bits, fresh, q.dtype)
            out = attend_spread(q, own[0], own[-1], mask, axis=axis, **settings)
            return out, fresh

        own = attention if attend is None else functools.partial(attend, i)
        gate = None if gates is None else gates[i]

        def run(x, block=block, rope=ropes[full], own=own, left_out=left_out, gate=gate):
            return block(x, rope, batch, own, live, left_out, gate)

        x, entry = remat.layer(run)(x)
        x = sharding.spread(x, None, DATA)  # so each layer ends in a sum over the devices
        entries.append(entry)
        seen.append(x)
    return seen, tuple(entries)


class Decoder(nnx.Module):
    """Token ids to logits. Training calls it; the decoding loop calls ``hidden`` and ``head``.

    ``model(tokens [B, T], segments=None) -> logits float32 [B, T, V]``. ``segments`` (int32
    ``[B, T]``) keeps packed documents apart: a token sees only earlier tokens of its segment.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32, bare: bool = False
    ):
        """Makes the weights; with ``bare`` those of layers and norm alone, which read states."""
        self.config = config
        common = dict(rngs=rngs, param_dtype=param_dtype)

        def table(rows):
            values = jax.random.normal(rngs.params(), (rows, config.hidden_size)) * 0.02
            return nnx.Param(values.astype(param_dtype))

        self.embedding = None if bare else table(config.vocab_size)
        learned = config.positions == "learned"
        rows = config.max_positions + config.position_offset
        self.position_embedding = table(rows) if learned else None
        self.blocks = nnx.List(
            [DecoderLayer(config, i, **common) for i in range(config.num_layers)]
        )
        self.norm = Norm(config.hidden_size, config, param_dtype=param_dtype)
        tied, sizes = config.tie_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = None if tied or bare else Linear(*sizes, **common)

    def hidden(
        self,
        tokens,
        positions,
        own_mask,
        *,
        prefix=None,
        length=None,
        earlier=None,
        live=None,
        taps=(),
        axis=None,
        states=None,
        local_mask=None,
        attend=None,
        without=None,
        gates=None,
        causal=False,
        vectors=None,
    ):
        """Runs the trunk over ``N`` nodes a row.

        Args:
          tokens: int32 ``[B, N]``.
          positions: int32 ``[1 or B, M]``, of the earlier and then of these nodes.
          own_mask: bool ``[B or 1, M, N]``: node ``n`` sees entry ``m`` of the earlier and then
            of these nodes.
          prefix: per layer ``(keys, values)`` of the committed tokens, or ``(latents,)``; or None.
          length: int32 ``[B]``, the number of committed tokens; needed with ``prefix``.
          earlier: entries that an earlier call returned for the same draft, or None.
          live: bool ``[B, N]``, the nodes that are used; None: all (see ``moe.py``).
          axis: the axis of the mesh in use over which heads are spread, or None.
          taps: indices ``i`` of hidden states to return, counted as ``hidden_states[i]`` of
            Hugging Face (0: embeddings, ``i``: output of layer ``i``; the last one is normed).
          states: ``[H, B * N]``, read by the first layer instead of the tokens' embeddings.
          local_mask: replaces ``own_mask`` in layers with a window, before the window is applied.
          attend: see ``run_blocks``.
          without, gates: see ``run_blocks``.
          causal: whether no node sees a later one, and there are no ``earlier`` entries; see
            ``kernels.Backend.attend``.
          vectors: ``(table [P, H], index int32 [1 or B, N])``: rows of ``table`` are read at nodes
            with an index of at least 0, in place of their tokens' embeddings; or None.

        Returns:
          ``(normed hidden [H, B * N], tapped [B, N, F] or None, entries)``; the entries are, per
          layer, ``(keys, values)`` or ``(latents,)`` of the earlier and these nodes, each
          ``[B, K, M, E]``.
        """
        batch, nodes = tokens.shape
        if states is None:
            here = jnp.broadcast_to(positions[:, -nodes:], tokens.shape)
            states = self.embed(tokens, here, vectors)
        seen, entries = run_blocks(
            self.config,
            self.blocks,
            states,
            positions,
            own_mask,
            local_mask,
            batch=batch,
            prefix=prefix,
            length=length,
            earlier=earlier,
            live=live,
            axis=axis,
            attend=attend,
            without=without,
            gates=gates,
            causal=causal,
        )
        out = seen[-1] = self.norm(seen[-1])
        tapped = None
        if taps:
            tapped = jnp.concatenate([seen[i] for i in taps], axis=0)
            tapped = tapped.T.reshape(batch, nodes, -1)
        return out, tapped, entries

    def embed(self, tokens, positions, vectors=None):
        """``[H, B * N]``, the residual stream before the first layer; see ``hidden``."""
        c = self.config
        x = columns(self.embedding[...], tokens, self.norm.weight[...].dtype)
        if c.scale_embeddings:
            x = x * jnp.asarray(c.hidden_size**0.5, x.dtype)  # rounded, as Gemma's is
        if vectors is not None:
            own, index = vectors[0].astype(x.dtype), jnp.broadcast_to(vectors[1], tokens.shape)
            index = index.reshape(-1)
            x = jnp.where(index >= 0, own[jnp.maximum(index, 0)].T, x)
        if self.position_embedding is not None:
            rows = self.position_embedding[...]
            where = positions + c.position_offset
            where = jnp.clip(where, 0, len(rows) - 1)  # no token is emitted beyond the table
            x = x + rows[where.reshape(-1)].T
        return x

    def head(self, hidden: jax.Array, batch: int) -> jax.Array:
        """``[H, B * N] -> float32 logits [B, N, V]``."""
        table = self.embedding if self.lm_head is None else self.lm_head.weight
        logits = softcap(product(table[...], hidden, transpose_out=True), self.config.logit_softcap)
        return logits.astype(jnp.float32).reshape(batch, -1, self.config.vocab_size)

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        batch, nodes = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
        mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]  # [key, query]
        if segments is not None:
            mask = mask & (segments[:, :, None] == segments[:, None, :])
        heads = self.config.num_kv_heads
        axis = MODEL if sharding.divides(MODEL, heads) and not self.config.kv_rank else None
        hidden, _, _ = self.hidden(tokens, positions, mask, axis=axis, causal=True)
        return self.head(hidden, batch)


@functools.cache
def abstract(config: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of ``Decoder(config)`` and the shapes of its weights; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
