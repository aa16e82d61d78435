"""Multi-head latent attention (DeepSeek-V2, 2405.04434): the cache holds the latents from which
keys and values are projected, not the keys and values themselves.

Letters of shapes besides those of ``types``: ``A`` heads, ``R`` features of a latent (``kv_rank``),
``P`` rotated features (``rope_dim``), ``U`` features of a head's query that are not rotated
(``nope_dim``), ``W`` features of a head's value (``value_dim``).

The entry of a token is its normed latent ``c [R]`` and one rotated key ``r [P]`` that all heads
share. In DeepSeek-V3 an entry is 576 numbers, where the keys and values of 128 heads are 40,960.
Head ``a`` has the key ``(U_a c, r)`` and the value ``W_a c``, neither of which is ever computed:
because ``q · U_a c = U_aᵀ q · c``, the up-projections are *absorbed* into queries and outputs,
which attend to the latents as to a single key head whose values are its keys::

    scores = ((U_aᵀ q, q_r) · (c, r)) / sqrt(U + P)      out_a = W_a Σ softmax(scores) c

A step reads each token's entry once for all heads. The price is arithmetic: a score takes
``R + P`` products instead of ``U + P``, and an output takes ``R + P`` instead of ``W``. While few
tokens are decoded, reading the cache costs more than this arithmetic. For a long prompt, the
attention of DeepSeek-V3 computes 3.6 times as many products as without absorption.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from .config import DecoderConfig
from .layers import Linear, Norm, rotate, score_factor

EPS = 1e-6  # of the norms of the latents, whatever the config says of the others


class LatentAttention(nnx.Module):
    """Latent attention in the place of ``decoder.Attention``; the caller passes ``attention``."""

    def __init__(self, config: DecoderConfig, *, rngs, param_dtype):
        self.config = c = config
        common = dict(rngs=rngs, param_dtype=param_dtype)
        wide = c.num_heads * (c.nope_dim + c.rope_dim)

        def norm(size):
            return Norm(size, config, kind="rms", eps=EPS, param_dtype=param_dtype)

        if c.q_rank is None:
            self.q = Linear(c.hidden_size, wide, **common)
        else:
            self.q_a = Linear(c.hidden_size, c.q_rank, bias=c.qkv_bias, **common)
            self.q_a_norm = norm(c.q_rank)
            self.q_b = Linear(c.q_rank, wide, **common)
        self.kv_a = Linear(c.hidden_size, c.kv_rank + c.rope_dim, bias=c.qkv_bias, **common)
        self.kv_a_norm = norm(c.kv_rank)
        self.kv_b = Linear(c.kv_rank, c.num_heads * (c.nope_dim + c.value_dim), **common)
        scale = (2 * c.num_layers) ** -0.5
        inner = c.num_heads * c.value_dim
        self.o = Linear(inner, c.hidden_size, bias=c.o_bias, scale=scale, **common)

    def __call__(self, x, rope, batch, attention):
        c, nodes = self.config, x.shape[1] // batch
        cos, sin = (turn[:, :, None] for turn in rope)  # [P / 2, B, 1, N]

        q = self.q(x) if c.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        q = q.reshape(c.num_heads, -1, batch, nodes)
        plain, turned = jnp.split(q, [c.nope_dim], axis=1)
        turned = rotate(self._paired(turned, 1), *rope, axis=1)

        latent, key = jnp.split(self.kv_a(x), [c.kv_rank])
        latent = self.kv_a_norm(latent).reshape(c.kv_rank, batch, 1, nodes)
        key = rotate(self._paired(key, 0).reshape(c.rope_dim, batch, 1, nodes), cos, sin, axis=0)
        entry = jnp.concatenate([latent, key]).transpose(1, 2, 3, 0)  # [B, 1, N, R + P]

        ups = self.kv_b.weight[...].reshape(c.num_heads, -1, c.kv_rank)
        to_keys, to_values = jnp.split(ups, [c.nope_dim], axis=1)  # [A, U, R], [A, W, R]
        absorbed = jnp.einsum("aur,aubn->arbn", to_keys, plain)
        q = jnp.concatenate([absorbed, turned], axis=1) * self._scale()  # [A, R + P, B, N]
        out, entries = attention(q[None].transpose(3, 0, 2, 1, 4), entry)  # [B, 1, R + P, A, N]
        out = out.transpose(1, 3, 2, 0, 4)[0, :, : c.kv_rank]
        out = jnp.einsum("awr,arbn->awbn", to_values, out)
        return self.o(out.reshape(-1, batch * nodes)), entries

    def _paired(self, x, axis):
        """Reorders features to the layout of ``rotate``, in which pairs are half of them apart.

        DeepSeek stores pairs side by side. Queries and keys are reordered alike, so scores stay.
        """
        if not self.config.rope_interleaved:
            return x
        first, second = (jax.lax.slice_in_dim(x, i, None, 2, axis) for i in (0, 1))
        return jnp.concatenate([first, second], axis)

    def _scale(self) -> float:
        """The factor on queries, which ``attend`` divides by the square root of their size."""
        c = self.config
        factor = score_factor(c.rope_scaling)
        return factor * ((c.kv_rank + c.rope_dim) / (c.nope_dim + c.rope_dim)) ** 0.5
