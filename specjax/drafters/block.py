"""A block drafter: all drafted tokens from one pass over masks (DFlash).

    c_i = RMSNorm(W [f_i^1; ... f_i^k])                                   of every token i < root
    block = [e(root), e(mask), ... e(mask)]   at the positions root, root + 1, ...
    keys, values of layer l:  K_l c_i, V_l c_i  for i < root,   then those of the block's states
    logits of the j-th drafted token = head(norm(state of the j-th mask))

or, with ``from_root``, those of the place before it, so that the root's drafts as well.

``f`` are hidden states of several layers of the target, ``e`` its embeddings and ``head`` its LM
head. The tokens of a block attend to each other in both directions and, in every layer, to all
tokens before the root. Of those, only keys and values are ever computed; they are in a cache, to
which each round adds the keys and values of its accepted path.

With ``topology=trees.Expand(width, depth, nodes)`` the draft is the tree of the ``nodes`` paths of
the greatest products of these laws, found anew in each row and round. It is DDTree's tree wherever
that has, at each depth, at most ``width`` nodes with children, and at most ``width`` children below
each of them. With ``trees.whole_families(siblings, depth, nodes)`` and ``causal=True`` tree and
model are JetSpec's. All depths come from the same one pass.

Lossless: yes, under ``greedy`` and ``delta`` (trees that are grown also under ``traversal``, their
tokens as point masses); with ``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection``
(each token is drawn from the law of its position).

Example::

    heads = specjax.load_drafter("z-lab/Qwen3-4B-DFlash-b16", lm)
    specjax.generate(lm, "...", drafter=heads)
    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(tree="expand:32x15x64"))

References: DFlash, arXiv 2602.06036; DDTree, arXiv 2604.12989, algorithm 1; JetSpec, arXiv
2606.18394.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.keywords import counted
from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.layers import Linear, Norm, fused_linear, turns
from ..trees.levels import Words
from ..types import PyTree, Verdict
from . import resting
from .feature_module import logits_of
from .heads import HeadDrafter, VocabMap, independent_level
from .layer_sizes import SizesOfLayers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(SizesOfLayers):
    """The shape of a block drafter.

    Attributes:
      layers: the shape of its decoder layers, as wide as the target (the authors use five of
        Qwen3's).
      block_size: the number of places of a block, that of the root included.
      mask_token: the id whose embedding stands for a token to be drafted.
      target_layers: the hidden states of the target that are read, counted as ``hidden_states[i]``
        of Hugging Face. (``target_layer_ids`` in files count from 0 after the embeddings: i - 1.)
      causal: whether a token of the block attends only to tokens before it; None: only in layers
        with a sliding window, as in the authors' code.
      from_root: whether each place says the token after it, so that the root's drafts too; else
        each says the token in it, and the root's, which is known, says nothing. (DeepSpec's files
        are of the first kind, those of DFlash's authors of the second.)
      draft_vocab_size: Vd, how many tokens of the target can be drafted, where they are not all:
        the drafter then has an LM head of its own over these, and ``vocab`` says which they are.
        None: all, by the target's LM head.
    """

    layers: DecoderConfig
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    causal: bool | None = None
    from_root: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self):
        few = self.draft_vocab_size
        if few is not None and not 1 <= few < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={few}: it must be at least 1 and less than the target's "
                f"vocabulary, {self.vocab_size}; leave it out where all tokens can be drafted"
            )
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
        """The number of tokens that a block drafts."""
        return self.block_size - 1 + self.from_root


def spread_layers(num_layers: int, count: int) -> list[int]:
    """``count`` hidden states, at least 2, spread evenly as in DFlash, from that of the second of n
    layers to that of the third last; of few layers some of them are equal.

    The authors round the numbers of layers, which count from 0, and Python rounds halves to even.
    """
    return [1 + round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a block drafter reads of a target with n layers, if none are named.

    Up to five of ``spread_layers``; of fewer than four layers that of the one in the middle.
    """
    if num_layers < 4:
        return ((num_layers + 1) // 2,)
    return tuple(sorted({*spread_layers(num_layers, 5)}))


class BlockLayers(nnx.Module):
    """The weights of a block drafter, which uses the embeddings and the LM head of the target.

    ``draft_lm_head [Vd, H]`` and ``vocab`` are among them where there is a draft vocabulary.
    """

    def __init__(self, config: BlockConfig, *, rngs, param_dtype=jnp.float32):
        self.config, layers = config, config.layers
        common = dict(rngs=rngs, param_dtype=param_dtype)
        size = layers.hidden_size
        self.fc = Linear(len(config.target_layers) * size, size, **common)
        self.hidden_norm = Norm(size, layers, param_dtype=param_dtype)
        self.layers = Decoder(layers, bare=True, **common)
        few = config.draft_vocab_size
        self.draft_lm_head = None if few is None else Linear(size, few, **common)
        self.vocab = None if few is None else VocabMap(jnp.arange(few, dtype=jnp.int32))

    def entries(self, features: jax.Array, positions: jax.Array) -> PyTree:
        """The keys and values of committed tokens.

        Args:
          features: ``[B, T, k * H]``, hidden states of k layers of the target, side by side.
          positions: int32 ``[B, T]``.

        Returns:
          For each layer ``(keys, values)``, each ``[B, K, T, E]``.
        """
        layers, batch = self.config.layers, len(features)
        x = self.hidden_norm(self.fc(features.reshape(-1, features.shape[-1]).T))
        parts: list[Any] = [block.attention for block in self.layers.blocks]
        made = fused_linear(x, *[layer for own in parts for layer in (own.k, own.v)])  # in one call
        full = [not layers.is_local(i) for i in range(layers.num_layers)]
        ropes = {kind: turns(layers, positions, kind, x.dtype) for kind in {*full}}
        return tuple(
            own.entries(made[2 * i], made[2 * i + 1], ropes[full[i]], batch)
            for i, own in enumerate(parts)
        )

    def __call__(self, tokens, positions, sees, target, params, **past) -> jax.Array:
        """Normed states ``[H, B * N]`` of blocks, for drafting and for training.

        Args:
          tokens: int32 ``[B, N]``; the mask token where a token is to be drafted.
          positions: int32 ``[B, M]`` of earlier entries and then of these tokens.
          sees: bool ``[B or 1, M, N]``: whether token ``n`` attends to entry ``m`` of both; causal
            layers are restricted further here.
          target: the target, whose embeddings are used.
          params: the weights of the target.
          past: ``prefix`` and ``length``, a cache of ``entries`` and int32 ``[B]``, how many slots
            of it are visible; or ``earlier``, such ``entries`` themselves. See ``Decoder.hidden``.
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
    """The state of a block drafter.

    Attributes:
      cache: keys and values of every layer, of all tokens before the root but the pending ones.
      pending: ``[B, P, F]``, features of the last tokens before the root, which rounds without a
        draft committed; None: all are read at once.
      count: int32 ``[B]``, how many are pending; None where ``pending`` is.
    """

    cache: PyTree
    pending: jax.Array | None = None
    count: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class BlockDrafter(HeadDrafter):
    """Drafts with a block drafter; ``params["drafter"]`` holds the weights of ``BlockLayers``.

    Each round takes one pass, over the root and as many masks as the tree is deep (with
    ``from_root`` one fewer). The laws of the
    positions are independent, so that a tree has the same tokens below every node of a depth.
    Blocks shorter than ``block_size`` can be drafted, as in the authors' code and in servers,
    though training shows none.

    Attributes:
      whole_block: whether all places of a block are computed, however deep the tree is.
      can_draw_from_part: whether there may be a draft vocabulary.
      lag: P, the tokens that may be pending while nothing is drafted; see ``resting``.

    Raises:
      ValueError: the target lacks such hidden states, the tree is deeper than a block has masks, or
        there is a draft vocabulary where the method knows none.
    """

    lag: int = dataclasses.field(default=0, kw_only=True)
    module = BlockLayers
    name = "block"
    whole_block: ClassVar[bool] = False
    can_draw_from_part: ClassVar[bool] = True

    def __post_init__(self):
        self.check_parts()
        few = self.config.draft_vocab_size
        if few is not None and not self.can_draw_from_part:
            raise ValueError(
                f"draft_vocab_size={few}: a {type(self).__name__} scores all {self.vocab_size} "
                "tokens of the target; leave it out"
            )
        most = self.target.num_layers
        if max(self.config.target_layers) > most:
            raise ValueError(
                f"target_layers={self.config.target_layers}: the target has {most} layers; hidden "
                f"states are counted from 0, the embeddings, to {most}"
            )
        super().__post_init__()

    @property
    def can_rewind(self) -> bool:
        """Places see each other: where a shorter draft has fewer of them, its tokens are others."""
        return self.whole_block

    @property
    def features(self):
        return self.config.target_layers

    @property
    def depth_limit(self):
        size = self.config.block_size
        return f"{counted(self.config.num_heads, 'place')} for drafted tokens (block_size={size})"

    def words(self, params):
        vocab = self.heads(params).vocab
        return None if vocab is None else Words(vocab[...], self.vocab_size)

    def init(self, params, target_params, batch, capacity, inputs=None):
        c = self.config.layers
        slots = [c.slots(i, capacity) for i in range(c.num_layers)]
        dtype = self.dtype_of(params)
        cache = kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype)
        if not self.lag:
            return BlockState(cache=cache)
        width = len(self.features) * c.hidden_size
        pending = jnp.zeros((batch, self.lag, width), dtype)
        return BlockState(cache=cache, pending=pending, count=jnp.zeros((batch,), jnp.int32))

    def lagging(self, num_tokens):
        return dataclasses.replace(self, lag=max(self.lag, num_tokens))

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if state.count is None:
            return state
        live = state.count if before == "prompt" else jnp.where(context.budget > 0, state.count, 0)
        most = self.lag - 1 if before == "rest" else 0
        count = jnp.where(jnp.any(live > most), live, 0)
        begin = context.length - 1 - state.count

        def read(cache, features, offset, num):
            return self._commit(params, cache, features, begin + offset, num)

        cache, count = resting.read_by_chunks(
            read, state.cache, state.pending, count, chunk=resting.CHUNK
        )
        return dataclasses.replace(state, cache=cache, count=state.count - count)

    def places(self, heads, target_params, state, context) -> jax.Array:
        """The normed states ``[H, B, N]`` of all places of a block, that of the root first."""
        masks = self.config.block_size - 1
        if not self.whole_block:
            masks = self.depth - self.config.from_root
        tokens = jnp.pad(
            context.root[:, None], ((0, 0), (0, masks)), constant_values=self.config.mask_token
        )
        hidden = self.read_blocks(heads, target_params, state, context, tokens[:, None])
        return hidden[:, :, 0]

    def read_blocks(self, heads, target_params, state, context, tokens) -> jax.Array:
        """The normed states ``[H, B, W, N]`` of W blocks for each row, int32 ``[B, W, N]``, all of
        which begin at the row's root; blocks do not see each other."""
        batch, blocks, size = tokens.shape
        root, place = context.length - 1, jnp.tile(jnp.arange(size, dtype=jnp.int32), blocks)
        own = jnp.repeat(jnp.arange(blocks), size)
        hidden = heads(
            tokens.reshape(batch, -1),
            root[:, None] + place,
            (own[:, None] == own)[None],
            self.target,
            target_params,
            prefix=state.cache,
            length=root,
        )
        return hidden.reshape(-1, batch, blocks, size)

    def states(self, heads, target_params, state, context) -> jax.Array:
        """The normed states ``[H, B, D]`` of the places that draft, of which D are wanted."""
        first = 0 if self.config.from_root else 1
        hidden = self.places(heads, target_params, state, context)
        return hidden[:, :, first : first + self.depth]

    def read_places(self, heads, target_params, state, context) -> tuple[jax.Array, jax.Array]:
        """The ``states``, and the logits float32 ``[B, D, V]`` that the LM head makes of them;
        ``[B, D, Vd]`` where there is a draft vocabulary."""
        hidden = self.states(heads, target_params, state, context)
        size, batch, _ = hidden.shape
        flat = hidden.reshape(size, -1)
        if heads.draft_lm_head is not None:
            return hidden, logits_of(heads.draft_lm_head, flat, batch)
        return hidden, self.target.head(target_params, flat, batch)

    def make_level(self, params, target_params, state, context):
        def say():
            return self.read_places(self.heads(params), target_params, state, context)[1]

        return independent_level(say)

    def observe(self, params, target_params, state, segment):
        some = segment.num > 0
        if state.count is not None and resting.is_rest(segment):
            (new,) = resting.first_column(segment, ("features",))
            pending = resting.append(state.pending, new, state.count, some)
            return dataclasses.replace(state, pending=pending, count=state.count + some)
        cache = self._commit(params, state.cache, segment.features, segment.start, segment.num)
        return dataclasses.replace(state, cache=cache)

    def _commit(self, params, cache, features, start, num):
        """The cache with the first ``num`` int32 ``[B]`` tokens of ``features`` ``[B, T, F]``,
        which begin at ``start`` int32 ``[B]``."""
        index, c = jnp.arange(features.shape[1], dtype=jnp.int32), self.config.layers
        features = features.astype(cache[0][0].dtype)
        positions = start[:, None] + index
        entries = self.heads(params).entries(features, positions)
        path = jnp.broadcast_to(index, positions.shape)
        verdict = Verdict(path=path, count=num - 1, token=num)
        rings = [c.is_ring(i, keys.shape[2]) for i, (keys, _) in enumerate(cache)]
        return kv_cache.commit(cache, entries, start, verdict, rings)
