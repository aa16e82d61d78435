"""Hydra: heads on the target's last hidden state that also read the tokens drafted so far.

    x_k = [h; e(root); e(d_1); ... e(d_k)],      h_k = V_k x_k + b + SiLU(W_k x_k + c),
    then h_k + SiLU(W'_k h_k + b'_k), num_layers - 1 times,      logits_k = U_k h_k + u_k

``h`` is the hidden state of the token before the root, ``e`` are the target's embeddings and
``d_1 ...`` the tokens drafted after the root; head k (from 0) predicts the token after ``d_k``.
Hydra++ has several layers in a head (one block, applied repeatedly, as in the authors' code), and
reads the output of a prefix layer (``prefix.py``) in place of ``h``.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    config = HydraConfig(hidden_size=4096, vocab_size=32000, prefix=prefix_config(lm.config))
    drafter = Hydra(config=config, target=lm.target, topology=trees.as_topology("3x2x1"))

References: Hydra, arXiv 2402.05109.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.optional import required
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.layers import Linear, fused_linear, product
from ..trees.levels import path_tokens
from .medusa import ResBlock
from .prefix import PrefixDrafter, check_prefix, read_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """The shape of Hydra heads.

    Attributes:
      hidden_size: H, that of the target.
      vocab_size: V, that of the target.
      num_heads: K, how many tokens are drafted at most.
      num_layers: layers in each head, the first of which reads ``x_k``.
      tied: whether the heads share the target's LM head.
      prefix: the shape of Hydra++'s prefix layer (``prefix.prefix_config``); None: no such layer.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    tied: bool = False
    prefix: DecoderConfig | None = None

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        check_prefix(self.prefix)


class FirstLayer(nnx.Module):
    """``V x + b + SiLU(W x + c)`` from ``[num_in, M]`` to ``[H, M]``."""

    def __init__(self, num_in: int, size: int, *, rngs, param_dtype):
        common = dict(bias=True, rngs=rngs, param_dtype=param_dtype)
        self.linear = Linear(num_in, size, scale=0.0, **common)
        self.residual = Linear(num_in, size, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        straight, turned = fused_linear(x, self.residual, self.linear)
        return straight + jax.nn.silu(turned)


class HydraHeads(nnx.Module):
    """The weights of Hydra heads.

    ``lm_head``: ``[V, H]``, the initial value of the heads' own LM heads (the target's), or None.
    """

    def __init__(self, config: HydraConfig, *, rngs, param_dtype=jnp.float32, lm_head=None):
        self.config = config
        common = dict(rngs=rngs, param_dtype=param_dtype)
        size = config.hidden_size

        def head(k):
            first = FirstLayer((k + 2) * size, size, **common)
            rest = [ResBlock(size, bias=True, **common)] if config.num_layers > 1 else []
            return nnx.List([first, *rest])

        def own_lm_head():
            linear = Linear(size, config.vocab_size, bias=True, **common)
            if lm_head is not None:
                linear.weight[...] = jnp.asarray(lm_head, param_dtype)
            return linear

        heads = range(config.num_heads)
        self.heads = nnx.List([head(k) for k in heads])
        self.lm_heads = None if config.tied else nnx.List([own_lm_head() for _ in heads])
        layer = config.prefix
        self.prefix = None if layer is None else Decoder(layer, bare=True, **common)

    def state(self, k: int, x: jax.Array) -> jax.Array:
        """``[H, M]``, what the LM head reads of head ``k``, for columns ``x`` ``[(k + 2) H, M]``.

        As in the authors' code, all layers after the first share their weights.
        """
        first, *shared = self.heads[k]
        x = first(x)
        for _ in range(1, self.config.num_layers):
            x = shared[0](x)
        return x

    def head_logits(self, k: int, x: jax.Array, batch: int, target, params) -> jax.Array:
        """Logits float32 ``[B, N, V]`` of head ``k`` (counted from 0), for columns ``x``
        ``[(k + 2) H, B * N]``."""
        x = self.state(k, x)
        if self.lm_heads is None:
            return target.head(params, x, batch)
        own = self.lm_heads[k]
        logits = product(own.weight[...], x, transpose_out=True) + required(own.bias, "bias")[...]
        return logits.astype(jnp.float32).reshape(batch, -1, logits.shape[-1])

    def logits(self, hidden, tokens, target, params, segments=None) -> jax.Array:
        """The logits of all heads, with the true tokens in place of drafted ones, for training.

        Args:
          hidden: ``[B, T, H]``, the target's last hidden state, normed.
          tokens: int32 ``[B, T]`` at the same positions.
          target: the target, for embeddings and a tied LM head.
          params: the weights of the target.
          segments: int32 ``[B, T]`` or None; the prefix layer attends within a segment only.

        Returns:
          float32 ``[B, T, K, V]``: at position t, head k (counted from 0) predicts token t + 2 + k.
          Only positions t < T - 2 - k count: after them, tokens from the row's begin are read.
        """
        batch, steps, size = hidden.shape
        x = hidden.reshape(-1, size).T
        if self.prefix is not None:
            x = read_rows(self, x, jnp.pad(tokens, ((0, 0), (0, 1))), segments)
        embedded = target.embed(params, tokens).reshape(size, batch, steps)
        rows = []
        for k in range(self.config.num_heads):
            after = jnp.roll(embedded, -(k + 1), axis=2).reshape(size, -1)
            x = jnp.concatenate([x, after], axis=0)
            rows.append(self.head_logits(k, x, batch, target, params))
        return jnp.stack(rows, axis=2)

    def enter(self, hidden: jax.Array, after: jax.Array) -> jax.Array:
        """The input of the prefix layer: the target's hidden states, unchanged."""
        return hidden


@dataclasses.dataclass(frozen=True)
class Hydra(PrefixDrafter):
    """Drafts with Hydra heads, one head for each depth, over all nodes of that depth.

    ``params["drafter"]`` holds the weights of ``HydraHeads``. ``target``: the target whose hidden
    state and embeddings are read, and whose LM head tied heads share.
    """

    module = HydraHeads
    name = "hydra"
    stored_settings = ()  # the layout has a key for the layer

    def make_level(self, params, target_params, state, context):
        heads, batch = self.heads(params), state.feature.shape[0]

        def level(hidden, grown, since):
            if since == 0:
                hidden = self.read(params, state, context)  # [H, B]
            tokens = path_tokens(grown, since)  # [B, W, D + 1]
            wide, deep = tokens.shape[1:]
            embedded = self.target.embed(target_params, tokens.reshape(batch, -1))
            embedded = embedded.reshape(-1, batch * wide, deep)
            wider = jnp.repeat(hidden, wide, axis=1)  # [H, B * W]
            x = jnp.concatenate([wider, *(embedded[:, :, i] for i in range(deep))], axis=0)
            x = x.astype(state.feature.dtype)
            return heads.head_logits(deep - 1, x, batch, self.target, target_params), hidden

        return level, ()
