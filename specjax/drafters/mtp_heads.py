"""Parallel heads of multi-token prediction (Meta): a Transformer layer each, on the target's trunk.

    x = Layer_k(h)_t        logits_k = U RMSNorm(x)        k = 0 ... K - 1

``h`` are the hidden states of all tokens so far which the target's last layer reads, and ``U`` is
the target's LM head: head k predicts token ``t + 2 + k`` at token ``t``, where the target's last
layer predicts token ``t + 1`` from the same states. Each layer keeps keys and values of all tokens
before the root in a cache of its own.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    # specjax train mtp_heads teacher=my-model num_heads=3 run.folder=runs/heads
    specjax.generate(lm, "...", drafter="runs/heads/model")

References: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction,
arXiv 2404.19737. (There heads are trained with their target; on a frozen target they can only find
what its states already hold.)
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
from ..models.decoder import Decoder
from ..models.layers import turns
from ..types import PyTree, Verdict
from .heads import HeadDrafter, HeadState, independent_level
from .layer_sizes import SizesOfLayers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHeadsConfig(SizesOfLayers):
    """The shape of parallel heads.

    ``layers``: that of the heads' layers, of which ``num_layers`` counts the heads.
    """

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


class MTPHeads(nnx.Module):
    """The weights: a layer for each head, and the norm that all share."""

    def __init__(self, config: MTPHeadsConfig, *, rngs, param_dtype=jnp.float32):
        self.config = config
        self.layers = Decoder(config.layers, bare=True, rngs=rngs, param_dtype=param_dtype)

    def logits(self, hidden, target, params, segments=None) -> jax.Array:
        """The logits of all heads over whole rows, with which the tests compare drafts.

        Args:
          hidden: ``[B, T, H]``, the target's hidden states that the heads read.
          target: the target, whose LM head is used.
          params: the weights of the target.
          segments: int32 ``[B, T]`` or None; heads attend within a segment only.

        Returns:
          float32 ``[B, T, K, V]``: at position t, head k (counted from 0) predicts token t + 2 + k.
        """
        states = [over_rows(self.config, own, hidden, segments) for own in self.layers.blocks]
        return self._head(states, target, params, len(hidden))

    def after(self, feature, cache, position, target, params) -> jax.Array:
        """The logits float32 ``[B, K, V]`` of all heads at one position a row.

        Args:
          feature: ``[B, H]``, the hidden state there.
          cache: the entries of the tokens before.
          position: int32 ``[B]``.
        """
        one, states = jnp.ones((1, 1, 1), bool), []
        length = jnp.maximum(position, 0)
        choice = choice_of(cache[0][0].shape[2], length)
        rope = turns(self.config.layers, position[:, None], True, feature.dtype)
        for block, pair in zip(self.layers.blocks, cache, strict=True):
            past = dict(prefix=pair, length=length, choice=choice)
            states.append(_run(block, feature[:, None], rope, one, **past))
        return self._head(states, target, params, len(feature))[:, 0]

    def entries(self, hidden: jax.Array, positions: jax.Array) -> PyTree:
        """The entries of each head, ``(keys, values)`` of ``[B, K, T, E]`` each, for tokens with
        hidden states ``[B, T, H]`` at ``positions`` int32 ``[B, T]``."""
        batch, _, size = hidden.shape
        x = hidden.reshape(-1, size).T
        rope = turns(self.config.layers, positions, True, x.dtype)
        return tuple(block.entries(x, rope, batch) for block in self.layers.blocks)

    def _head(self, states, target, params, batch):
        """Logits ``[B, N, K, V]`` of each head's states ``[H, B * N]``."""
        x = self.layers.norm(jnp.stack(states, axis=-1).reshape(len(states[0]), -1))
        logits = target.head(params, x, batch)  # [B, N * K, V]
        return logits.reshape(batch, -1, self.config.num_heads, logits.shape[-1])


def over_rows(config: MTPHeadsConfig, block, hidden, segments=None) -> jax.Array:
    """The states ``[H, B * T]`` of one head over whole rows, not normed, for training.

    Args:
      config: the shape of the heads.
      block: the layer of the head.
      hidden, segments: as of ``MTPHeads.logits``.
    """
    batch, steps, _ = hidden.shape
    sees = jnp.triu(jnp.ones((steps, steps), bool))[None]  # [key, query]
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])
    positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (batch, steps))
    rope = turns(config.layers, positions, True, hidden.dtype)
    return _run(block, hidden, rope, sees, causal=True)


def _run(block, hidden, rope, sees, **past) -> jax.Array:
    """The output ``[H, B * N]`` of a layer for hidden states ``[B, N, H]``."""

    def attention(query, key, value):
        return kernels.current().attend(query, key, value, sees, **past), None

    x = hidden.reshape(-1, hidden.shape[2]).T
    return block(x, rope, len(hidden), attention)[0]


@pytree_dataclass
class MTPHeadsState(HeadState):
    """The state of parallel heads between rounds.

    Attributes:
      feature: ``[B, H]``, the hidden state of the token before the root.
      cache: keys and values of each head, of all tokens before the root. (Those of the token before
        the root are computed again when that token is read.)
    """

    cache: PyTree


@dataclasses.dataclass(frozen=True)
class ParallelHeads(HeadDrafter):
    """Drafts with parallel heads; ``params["drafter"]`` holds the weights of ``MTPHeads``.

    All heads are evaluated at once, at the root: each runs its layer over one column. For the other
    tokens of the accepted path, only keys and values are computed. ``layer``: None is the trunk,
    the hidden states that the target's last layer reads.
    """

    module = MTPHeads
    name = "mtp_heads"
    stored_settings = ()  # the layout has a key for the layer

    def __post_init__(self):
        self.check_parts()
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
