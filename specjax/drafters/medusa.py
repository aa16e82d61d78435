"""Medusa: heads on the target's last hidden state, each for a token further ahead.

    h_k = h + SiLU(W_k h + b_k)   (num_layers times),      logits_k = U_k h_k,      k = 1 ... K

``h`` is the hidden state of position t, whose logits produced the root; head k predicts token
t + 1 + k. Heads do not read each other's tokens: all nodes of one depth have the same law.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``. (Medusa's typical acceptance is another rule, and approximate.)

Example::

    config = MedusaConfig(hidden_size=4096, vocab_size=32000, num_heads=4)
    drafter = Medusa(config=config, target=lm.target, topology=trees.as_topology("3x2x1"))

References: Medusa, arXiv 2401.10774. The drafter is the same
for Medusa-1 and Medusa-2, which differ in training. Heads that share the target's LM head: the
authors' first trainer, and vLLM's ``original_lm_head``.
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
    """The shape of Medusa heads.

    Attributes:
      hidden_size: H, that of the target.
      vocab_size: V, that of the target.
      num_heads: K, how many tokens are drafted at most.
      num_layers: residual blocks in each head.
      bias: whether blocks have biases.
      tied: whether all heads share the target's LM head, which makes them small; else each head has
        an LM head of its own.
    """

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
                "of its own a head would repeat the target's logits; give num_layers=1"
            )


class ResBlock(nnx.Module):
    """``x + SiLU(W x + b)`` on ``[H, M]``; the identity until it is trained."""

    def __init__(self, size: int, *, bias: bool, rngs, param_dtype):
        self.linear = Linear(size, size, bias=bias, scale=0.0, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.silu(self.linear(x))


class MedusaHeads(nnx.Module):
    """The weights of Medusa heads.

    ``lm_head``: ``[V, H]``, the initial value of the heads' own LM heads (the target's), or None.
    """

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
        """``h_k`` of each head, ``[H, M]``, for hidden states ``x`` ``[H, M]``."""
        if not self.config.num_layers:
            return [x] * self.config.num_heads
        first = fused_linear(x, *[head[0].linear for head in self.heads])  # one call for all heads
        states = [x + jax.nn.silu(y) for y in first]
        for k, head in enumerate(self.heads):
            for block in head[1:]:
                states[k] = block(states[k])
        return states

    def logits(self, hidden: jax.Array, target, params) -> jax.Array:
        """The logits of all heads, for drafting (T = 1) and for training.

        Args:
          hidden: ``[B, T, H]``, the target's last hidden state, normed.
          target: the target, whose LM head tied heads use.
          params: the weights of the target.

        Returns:
          float32 ``[B, T, K, V]``: at position t, head k (counted from 0) predicts token t + 2 + k.
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
    """Drafts with Medusa heads, all of which are evaluated at once, at the root.

    ``params["drafter"]`` holds the weights of ``MedusaHeads``. ``target``: the target whose hidden
    state is read, and whose LM head tied heads share.
    """

    module = MedusaHeads
    name = "medusa"
    reads_last = True

    def make_level(self, params, target_params, state, context):
        heads, hidden = self.heads(params), state.feature[:, None]
        return independent_level(lambda: heads.logits(hidden, self.target, target_params)[:, 0])
