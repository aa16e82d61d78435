"""Parallel heads of multi-token prediction (Meta): a Transformer layer each, on the target's trunk.

    x = Layer_k(h)_t        logits_k = U RMSNorm(x)        k = 0 ... K - 1

for hidden states ``h`` of all tokens so far, what the target's last layer reads, and the target's
own LM head ``U``: head k at token ``t`` is about token ``t + 2 + k``. The target's last layer says
token ``t + 1`` from the same trunk.

Each layer has its keys and values of all tokens before the root in a cache of its own.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .. import kernels
from .._internal.pytree import pytree_dataclass
from ..kernels.attention import choice_of
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import Decoder, turns
from ..types import PyTree, Verdict
from .heads import HeadDrafter, HeadState, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHeadsConfig:
    """``layers``: as many as there are heads, in the shape of the target's own layers."""

    layers: DecoderConfig

    def __post_init__(self):
        c = self.layers
        if c.kv_rank or c.num_experts or c.window or c.positions != "rope":
            raise ValueError(
                "layers: parallel heads have plain attention over all tokens, rotary positions and "
                f"no experts; these, of {c.model_type!r}, have others"
            )

    @property
    def num_heads(self) -> int:
        return self.layers.num_layers

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size


class MTPHeads(nnx.Module):
    """The heads' layers and the norm that they share."""

    def __init__(self, config: MTPHeadsConfig, *, rngs, param_dtype=jnp.float32):
        self.config = config
        self.layers = Decoder(config.layers, bare=True, rngs=rngs, param_dtype=param_dtype)

    def logits(self, hidden, target, params, segments=None) -> jax.Array:
        """All heads over whole rows, for training.

        Args:
          hidden: ``[B, T, H]``, the target's hidden state that the heads read.
          target, params: the target and its weights, for the LM head.
          segments: int32 ``[B, T]`` or None: what attention keeps apart.

        Returns:
          float32 ``[B, T, K, V]``: at position t head k (from 0) is about token t + 2 + k.
        """
        batch, steps, size = hidden.shape
        sees = jnp.triu(jnp.ones((steps, steps), bool))[None]  # [key, query]
        if segments is not None:
            sees = sees & (segments[:, :, None] == segments[:, None, :])
        positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (batch, steps))
        past = [{}] * self.config.num_heads
        x = self._states(hidden.reshape(-1, size).T, positions, sees, past)
        return self._head(x, target, params, batch)

    def after(self, feature, cache, position, target, params) -> jax.Array:
        """float32 ``[B, K, V]`` of all heads at ``position`` int32 ``[B]``, whose hidden state is
        ``feature`` ``[B, H]``; ``cache`` holds the entries of what stands before."""
        batch, one = len(feature), jnp.ones((1, 1, 1), bool)
        length = jnp.maximum(position, 0)
        choice = choice_of(cache[0][0].shape[2], length)
        past = [dict(prefix=pair, length=length, choice=choice) for pair in cache]
        x = self._states(feature.T, position[:, None], one, past)
        return self._head(x, target, params, batch)[:, 0]

    def entries(self, hidden: jax.Array, positions: jax.Array) -> PyTree:
        """What each head keeps of tokens with hidden states ``[B, T, H]`` at ``positions`` int32
        ``[B, T]``: ``(keys, values)``, each ``[B, K, T, E]``."""
        batch, _, size = hidden.shape
        x = hidden.reshape(-1, size).T
        rope = turns(self.config.layers, positions, True, x.dtype)
        return tuple(block.entries(x, rope, batch) for block in self.layers.blocks)

    def _states(self, x, positions, sees, past) -> jax.Array:
        """Normed states ``[H, B * N * K]`` of all heads, which read one ``x`` ``[H, B * N]``."""
        batch, states = len(positions), []
        rope = turns(self.config.layers, positions, True, x.dtype)
        for block, own in zip(self.layers.blocks, past, strict=True):

            def attention(query, key, value, own=own):
                return kernels.current().attend(query, key, value, sees, **own), None

            states.append(block(x, rope, batch, attention)[0])
        return self.layers.norm(jnp.stack(states, axis=-1).reshape(x.shape[0], -1))

    def _head(self, x, target, params, batch):
        logits = target.head(params, x, batch)  # [B, N * K, V]
        return logits.reshape(batch, -1, self.config.num_heads, logits.shape[-1])


@pytree_dataclass
class MTPHeadsState(HeadState):
    """``feature``: of the token before the root, what the heads read. ``cache``: each head's keys
    and values of all tokens before the root (that token's own are made again when it is read)."""

    cache: PyTree


@dataclasses.dataclass(frozen=True)
class ParallelHeads(HeadDrafter):
    """Drafts with parallel heads; ``params["drafter"]`` are the weights of ``MTPHeads``.

    All heads are asked at once, at the root: one column each through its layer. Of the accepted
    path's other tokens keys and values alone are made.

    ``layer``: None is the trunk, what the target's last layer reads.

    Lossless: yes, under ``greedy`` and ``delta``; with
    ``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection``.

    References: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction,
    arXiv 2404.19737 (trained with their target; on a frozen one, heads find what it has).
    """

    module = MTPHeads
    name = "mtp_heads"

    def __post_init__(self):
        if self.layer is None:
            object.__setattr__(self, "layer", self.target.num_layers - 1)
        super().__post_init__()

    def init(self, params, target_params, batch, capacity, inputs=None):
        state, c = super().init(params, target_params, batch, capacity, inputs), self.config.layers
        feature = state.feature
        slots = [capacity] * c.num_layers
        cache = kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, feature.dtype)
        return MTPHeadsState(feature=feature, cache=cache)

    def make_level(self, params, target_params, state, context):
        heads, at = self.heads(params), context.length - 2
        return independent_level(
            lambda: heads.after(state.feature, state.cache, at, self.target, target_params)
        )

    def observe(self, params, target_params, state, segment):
        index = jnp.arange(segment.tokens.shape[1], dtype=jnp.int32)
        features = segment.features.astype(state.feature.dtype)
        entries = self.heads(params).entries(features, segment.start[:, None] + index)
        path = jnp.broadcast_to(index, segment.tokens.shape)
        verdict = Verdict(path=path, count=segment.num - 1, token=segment.num)
        cache = kv_cache.commit(state.cache, entries, segment.start, verdict)
        state = super().observe(params, target_params, state, segment)
        return dataclasses.replace(state, cache=cache)
