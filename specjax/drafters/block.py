"""A block drafter: all drafted tokens from one pass over masks (DFlash).

    c_i = RMSNorm(W [f_i^1; ... f_i^k])                                   of every token i < root
    block = [e(root), e(mask), ... e(mask)]   at the positions root, root + 1, ...
    keys, values of layer l:  K_l c_i, V_l c_i  for i < root,   then those of the block's own states
    logits of the j-th drafted token = head(norm(state of the j-th mask))

for hidden states ``f`` of several layers of the target, its embeddings ``e`` and its LM head. The
tokens of the block see each other in both directions and, in every layer, all that went before; of
what went before only keys and values are ever made. They lie in a cache, to which each round adds
those of its accepted path.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import Decoder, turns
from ..models.layers import Linear, Norm, fused_linear
from ..types import PyTree, Verdict
from .heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Shape of a block drafter.

    Attributes:
      layers: its own decoder layers (the authors': Qwen3's, five of them), as wide as the target.
      block_size: tokens of a block, the root counted; no more are drafted at once.
      mask_token: the id whose embedding stands for what is to be drafted.
      target_layers: which hidden states of the target are read, counted as ``hidden_states[i]`` of
        Hugging Face (the files' ``target_layer_ids`` count from 0 behind the embeddings: i - 1).
      causal: whether a token of the block sees none behind it; None: in layers with a sliding
        window alone, as the authors' code has it.
    """

    layers: DecoderConfig
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    causal: bool | None = None

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(
                f"block_size={self.block_size}: a block is the root and at least one mask"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token={self.mask_token}: the target's embedding table has "
                f"{self.vocab_size} rows"
            )
        if not self.target_layers or min(self.target_layers) < 0:
            raise ValueError(
                f"target_layers={self.target_layers}: give at least one, counted from 0, the "
                "target's embeddings"
            )
        if self.layers.kv_rank or self.layers.num_experts or self.layers.positions != "rope":
            raise ValueError(
                "layers: a block drafter's have plain attention with rotary positions and no "
                f"experts; those of {self.layers.model_type!r} have others"
            )

    @property
    def num_heads(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - 1

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size


class BlockLayers(nnx.Module):
    """The drafter's weights; embeddings and LM head are the target's."""

    def __init__(self, config: BlockConfig, *, rngs, param_dtype=jnp.float32):
        self.config, layers = config, config.layers
        common = dict(rngs=rngs, param_dtype=param_dtype)
        size = layers.hidden_size
        self.fc = Linear(len(config.target_layers) * size, size, **common)
        self.hidden_norm = Norm(size, layers, param_dtype=param_dtype)
        self.layers = Decoder(layers, bare=True, **common)

    def entries(self, features: jax.Array, positions: jax.Array) -> PyTree:
        """What every layer keeps of committed tokens.

        Args:
          features: ``[B, T, k * H]``, hidden states of the target, layer behind layer.
          positions: int32 ``[B, T]``.

        Returns:
          per layer ``(keys, values)``, each ``[B, K, T, E]``.
        """
        layers, batch = self.config.layers, len(features)
        x = self.hidden_norm(self.fc(features.reshape(-1, features.shape[-1]).T))
        parts = [block.attention for block in self.layers.blocks]
        made = fused_linear(x, *[layer for own in parts for layer in (own.k, own.v)])  # in one call
        full = [layers.window_of(i) is None for i in range(layers.num_layers)]
        ropes = {kind: turns(layers, positions, kind, x.dtype) for kind in {*full}}
        return tuple(
            own.entries(made[2 * i], made[2 * i + 1], ropes[full[i]], batch)
            for i, own in enumerate(parts)
        )

    def __call__(self, tokens, positions, sees, target, params, **past) -> jax.Array:
        """Normed states ``[H, B * N]`` of blocks, for drafting and for training.

        Args:
          tokens: int32 ``[B, N]``; the mask where a token is to be drafted.
          positions: int32 ``[B, M]`` of (earlier entries, these tokens).
          sees: bool ``[B or 1, M, N]``: token ``n`` sees entry ``m`` of (earlier, these); what is
            causal besides is seen to here.
          target, params: the target and its weights, for the embeddings.
          past: ``prefix`` and ``length``, a cache of ``entries`` and int32 ``[B]`` how many slots
            are seen, or ``earlier``, ``entries`` as they are; see ``Decoder.hidden``.
        """
        nodes = tokens.shape[1]
        ahead = positions[:, :, None] <= positions[:, None, -nodes:]
        causal = self.config.causal
        x = target.embed(params, tokens)
        x = x.astype(jnp.promote_types(x.dtype, self.fc.weight[...].dtype))
        hidden, _, _ = self.layers.hidden(
            tokens,
            positions,
            sees & ahead if causal else sees,
            local_mask=sees & ahead if causal is None else None,
            states=x,
            **past,
        )
        return hidden


@pytree_dataclass
class BlockState:
    """``cache``: every layer's keys and values of all tokens before the root."""

    cache: PyTree


@dataclasses.dataclass(frozen=True)
class BlockDrafter(HeadDrafter):
    """Drafts with a block drafter; ``params["drafter"]`` are the weights of ``BlockLayers``.

    One pass a round, over the root and as many masks as the tree is deep, whatever is drafted: the
    laws of the positions know nothing of each other, so that a tree has at each depth the same
    tokens below every node. Blocks shorter than ``block_size`` are drafted too, as the authors'
    code and the servers do, though none was seen in training.

    ``target``: whose hidden states and embeddings are read, and whose LM head says the tokens.

    Lossless: yes, under ``greedy`` and ``delta``; with
    ``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection`` (each token is
    drawn from the law of its own position).

    Raises:
      ValueError: hidden states that the target does not have; a deeper tree than a block has masks.

    References: DFlash, arXiv 2602.06036.
    """

    module = BlockLayers
    name = "block"

    def __post_init__(self):
        most = self.target.num_layers
        if max(self.config.target_layers) > most:
            raise ValueError(
                f"target_layers={self.config.target_layers}: the target has {most} layers; hidden "
                f"states are counted from 0, the embeddings, to {most}"
            )
        super().__post_init__()

    @property
    def features(self):
        return self.config.target_layers

    def init(self, params, target_params, batch, capacity, inputs=None):
        c = self.config.layers
        slots = [c.slots(i, capacity) for i in range(c.num_layers)]
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return BlockState(cache=kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype))

    def make_level(self, params, target_params, state, context):
        heads, masks = self.heads(params), self.topology.depth

        def say():
            tokens = jnp.pad(
                context.root[:, None], ((0, 0), (0, masks)), constant_values=self.config.mask_token
            )
            root = context.length - 1
            hidden = heads(
                tokens,
                root[:, None] + jnp.arange(masks + 1, dtype=jnp.int32),
                jnp.ones((1, masks + 1, masks + 1), bool),
                self.target,
                target_params,
                prefix=state.cache,
                length=root,
            )
            batch = len(root)
            hidden = hidden.reshape(-1, batch, masks + 1)[:, :, 1:].reshape(-1, batch * masks)
            return self.target.head(target_params, hidden, batch)

        return independent_level(say)

    def observe(self, params, target_params, state, segment):
        index = jnp.arange(segment.tokens.shape[1], dtype=jnp.int32)
        cache, c = state.cache, self.config.layers
        features = segment.features.astype(cache[0][0].dtype)
        positions = segment.start[:, None] + index
        entries = self.heads(params).entries(features, positions)
        path = jnp.broadcast_to(index, segment.tokens.shape)
        verdict = Verdict(path=path, count=segment.num - 1, token=segment.num)
        rings = [c.is_ring(i, keys.shape[2]) for i, (keys, _) in enumerate(cache)]
        return BlockState(cache=kv_cache.commit(cache, entries, segment.start, verdict, rings))
