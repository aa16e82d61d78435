"""Medusa: heads on the target's last hidden state, each about a token further ahead.

    h_k = h + SiLU(W_k h + b_k)   (num_layers times),      logits_k = U_k h_k,      k = 1 ... K

for the hidden state ``h`` of position t, whose own next token is the root: head k is about token
t + 1 + k. The heads do not see each other's tokens: all nodes of a depth have the same law.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.layers import Linear, fused_linear, product
from .heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """``num_layers``: residual blocks a head. ``tied``: all heads share the target's own LM head,
    which makes them small (and one pass over it says all); else each has one of its own."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    bias: bool = True
    tied: bool = False

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.num_layers < self.tied:
            raise ValueError(
                f"num_layers={self.num_layers}, tied={self.tied}: without a layer and an LM head "
                "of its own a head would say what the target says; give num_layers=1"
            )


class ResBlock(nnx.Module):
    """``x + SiLU(W x + b)`` on ``[H, M]``; an identity until it is trained."""

    def __init__(self, size: int, *, bias: bool, rngs, param_dtype):
        self.linear = Linear(size, size, bias=bias, scale=0.0, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class MedusaHeads(nnx.Module):
    """The heads' weights. ``lm_head`` ``[V, H]``: what the own LM heads begin as (the target's)."""

    def __init__(self, config: MedusaConfig, *, rngs, param_dtype=jnp.float32, lm_head=None):
        self.config = config
        common = dict(rngs=rngs, param_dtype=param_dtype)

        def head():
            blocks = range(config.num_layers)
            return nnx.List(
                [ResBlock(config.hidden_size, bias=config.bias, **common) for _ in blocks]
            )

        def own_lm_head():
            linear = Linear(config.hidden_size, config.vocab_size, **common)
            if lm_head is not None:
                linear.weight[...] = jnp.asarray(lm_head, param_dtype)
            return linear

        heads = range(config.num_heads)
        self.heads = nnx.List([head() for _ in heads])
        self.lm_heads = None if config.tied else nnx.List([own_lm_head() for _ in heads])

    def states(self, x: jax.Array) -> list[jax.Array]:
        """What each head makes of ``x`` ``[H, M]``, likewise ``[H, M]``."""
        if not self.config.num_layers:
            return [x] * self.config.num_heads
        first = fused_linear(x, *[head[0].linear for head in self.heads])  # one call for all heads
        states = [x + jax.nn.silu(y) for y in first]
        for k, head in enumerate(self.heads):
            for block in head[1:]:
                states[k] = block(states[k])
        return states

    def logits(self, hidden: jax.Array, target, params) -> jax.Array:
        """All heads at once, for drafting (T = 1) and for training.

        Args:
          hidden: ``[B, T, H]``, the target's last hidden state, normed.
          target, params: the target and its weights, of which tied heads take the LM head.

        Returns:
          float32 ``[B, T, K, V]``: at position t head k (from 0) is about token t + 2 + k.
        """
        batch, steps, size = hidden.shape
        states = self.states(hidden.reshape(-1, size).T)
        if self.lm_heads is None:
            columns = jnp.stack(states, axis=-1).reshape(size, -1)  # [H, B * T * K]
            logits = target.head(params, columns, batch)
        else:
            pairs = zip(self.lm_heads, states, strict=True)
            rows = [product(head.weight[...], x, transpose_out=True) for head, x in pairs]
            logits = jnp.stack(rows, axis=1).astype(jnp.float32)  # [B * T, K, V]
        return logits.reshape(batch, steps, self.config.num_heads, -1)


@dataclasses.dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Drafts with Medusa heads; ``params["drafter"]`` are the weights of ``MedusaHeads``.

    All heads are asked at once, at the root.

    ``target``: whose hidden state is read, and whose LM head tied heads share.

    Lossless: yes, under ``greedy`` and ``delta``; with
    ``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection``.
    (Medusa's typical acceptance is another rule, and approximate.)

    References: Medusa, arXiv 2401.10774 (how heads are trained, 1 or 2, is not the drafter's
    business); tied heads: the authors' first trainer, vLLM's ``original_lm_head``.
    """

    module = MedusaHeads
    name = "medusa"

    def make_level(self, params, target_params, state, context):
        heads, hidden = self.heads(params), state.feature[:, None]
        return independent_level(lambda: heads.logits(hidden, self.target, target_params)[:, 0])
