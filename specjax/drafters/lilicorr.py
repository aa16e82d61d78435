"""LiLiCorr: a block drafter whose candidates are matched by a small network over all of them.

    C_k = the K tokens with the greatest logits of the k-th mask, b its r-th,  l the log of its law
    x_{k,b} = T e(b) + P h_k + F [l, exp l, l - max l, r / (K - 1), r = 0] + slot_k + rank_r
    x = some layers of attention among all candidates of all places, and MLPs
    f = silu(M [x; a; x * a]),    a = norm(Q c),    logits of b below p = s cos(O f_p, I f_b)

``h_k`` are the normed states of a block (``block.py``), ``c`` what the target's features of the
token before the root are made into there, and the logits below the root are ``s cos(R a, I f_b)``.
Queries and keys of two places add a number by their distance, and those of one place another. The
network runs once a round; then tokens are drawn from left to right among the candidates of their
places, each from a law that is given the one before, which is the law that the draft states. Where
tokens are drawn, those that are no candidates keep the probability that the block gives them
(``candidates.py``); below such a token the law is the block's. The logits of the block decide
nothing else but who is a candidate, and are an input of the network.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    heads = specjax.load_drafter(lilicorr_folder, lm)
    specjax.generate(lm, "...", drafter=heads)

Differs from the authors' code: theirs walks to the best candidate at each place (drawing is an
option of their server); here tokens may be drawn, and trees are drafted too. A draft that is less
deep than a block has masks takes part of the places alone, as in their server.

References: LiLiCorr, arXiv 2608.20530; Model-Optimizer#2342 (training), sglang#37462, vllm#57934.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models.layers import Linear, Norm
from ..sampling import drawing
from ..types import PyTree
from .block import BlockConfig, BlockLayers
from .candidates import CandidateBlock, check_candidates
from .dflash2 import convolved_layers
from .heads import last_feature

NUM_FEATURES = 5  # of a candidate, by its law and its rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(BlockConfig):
    """The shape of a LiLiCorr drafter.

    Attributes:
      num_candidates: K, how many tokens of a place may be drafted.
      lattice_size: features of a candidate in the network.
      lattice_layers: how many layers of attention it has.
      lattice_heads: heads of each of them.
      mlp_ratio: features within an MLP, as a multiple of ``lattice_size``.
      factor_size: features of the vectors that are matched.
      vector_eps: the least length by which a vector is divided.
      logit_scale: s, by which a cosine becomes a logit.
      conv_taps: of convolutions as in DFlash2; 0: there are none.
      conv_group: of these.
    """

    num_candidates: int = 16
    lattice_size: int
    lattice_layers: int = 2
    lattice_heads: int
    mlp_ratio: float = 2.0
    factor_size: int
    vector_eps: float = 1e-4
    logit_scale: float = 8.0
    conv_taps: int = 0
    conv_group: int = 16

    def __post_init__(self):
        super().__post_init__()
        check_candidates(self)
        for name in ("lattice_size", "lattice_layers", "lattice_heads", "factor_size"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name}={vars(self)[name]}: it must be at least 1")
        for name in ("mlp_ratio", "vector_eps", "logit_scale"):
            if vars(self)[name] <= 0:
                raise ValueError(f"{name}={vars(self)[name]}: it must be above 0")
        if self.lattice_size % self.lattice_heads:
            raise ValueError(
                f"lattice_heads={self.lattice_heads}: it does not divide "
                f"lattice_size={self.lattice_size}"
            )
        if self.from_root:
            raise ValueError(
                "from_root=True: the place of the root has no candidates in LiLiCorr; leave "
                "from_root out"
            )
        if self.conv_taps < 0 or (self.conv_taps and self.hidden_size % self.conv_group):
            raise ValueError(
                f"conv_taps={self.conv_taps}, conv_group={self.conv_group}: taps are at least 0, "
                f"and the group must divide hidden_size={self.hidden_size}"
            )


def unit(x: jax.Array, eps: float) -> jax.Array:
    """Vectors along axis 0, divided by their length or by ``eps`` if that is greater."""
    square = jnp.sum(x * x, axis=0, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(square, eps**2))  # whose derivative at 0 is finite


class LatticeLayer(nnx.Module):
    """Attention among all candidates, and an MLP, over ``[S, B * n]``."""

    def __init__(self, config: LiLiCorrConfig, *, rngs, param_dtype):
        size, self.num_heads = config.lattice_size, config.lattice_heads
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        inner = int(size * config.mlp_ratio)
        self.attention_norm = Norm(size, config.layers, kind="rms", param_dtype=param_dtype)
        self.qkv = Linear(size, 3 * size, bias=True, **common)
        self.out = Linear(size, size, bias=True, **common)
        self.mlp_norm = Norm(size, config.layers, kind="rms", param_dtype=param_dtype)
        self.up = Linear(size, inner, bias=True, **common)
        self.down = Linear(inner, size, bias=True, **common)

    def __call__(self, x: jax.Array, bias: jax.Array, batch: int) -> jax.Array:
        """``bias``: ``[heads, n, n]``, of query and key."""
        size = len(x)
        read = self.qkv(self.attention_norm(x)).reshape(3, self.num_heads, -1, batch, len(bias[0]))
        q, k, v = read
        scores = jnp.einsum("hebq,hebk->bhqk", q, k) / math.sqrt(size // self.num_heads)
        weights = jax.nn.softmax(scores.astype(jnp.float32) + bias, axis=-1).astype(x.dtype)
        x = x + self.out(jnp.einsum("bhqk,hebk->hebq", weights, v).reshape(size, -1))
        return x + self.down(jax.nn.silu(self.up(self.mlp_norm(x))))


class Lattice(nnx.Module):
    """The network over the candidates of a block."""

    def __init__(self, config: LiLiCorrConfig, *, rngs, param_dtype):
        self.config, size, width = config, config.lattice_size, config.hidden_size
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)

        def learned(*shape):
            return nnx.Param(jnp.zeros(shape, param_dtype))

        def linear(num_in, num_out):
            return Linear(num_in, num_out, bias=True, **common)

        self.token = None if size == width else linear(width, size)
        self.state = linear(width, size)
        self.feature_norm = Norm(
            NUM_FEATURES, config.layers, kind="layer", eps=1e-5, param_dtype=param_dtype
        )
        self.feature_up, self.feature_down = linear(NUM_FEATURES, size), linear(size, size)
        self.slots = learned(1, 1, config.block_size - 1, 1, size)  # shapes of the files
        self.ranks = learned(1, 1, 1, config.num_candidates, size)
        self.distances = learned(config.lattice_heads, 2 * config.block_size - 1)
        self.same = learned(config.lattice_heads)
        self.context = linear(width, size)
        self.layers = nnx.List(
            [LatticeLayer(config, **common) for _ in range(config.lattice_layers)]
        )
        norms = dict(kind="rms", param_dtype=param_dtype)
        self.norm = Norm(size, config.layers, **norms)
        self.anchor_norm = Norm(size, config.layers, **norms)
        self.factor = linear(3 * size, size)
        ends = [
            Linear(size, config.factor_size, bias=True, scale=0.02 * math.sqrt(size), **common)
            for _ in range(3)
        ]
        self.leave, self.enter, self.anchor_leave = ends

    def bias(self, places: int) -> jax.Array:
        """What scores of attention add, float32 ``[heads, n, n]`` of n candidates."""
        place = jnp.repeat(jnp.arange(places), self.config.num_candidates)
        apart = place[:, None] - place
        found = self.distances[...][:, apart + self.config.block_size - 1]
        return (found + self.same[...][:, None, None] * (apart == 0)).astype(jnp.float32)

    def __call__(self, embedded, logs, hidden, context, known) -> tuple[jax.Array, jax.Array]:
        """The logits of candidates.

        Args:
          embedded: ``[H, B * D * K]``, embeddings of the candidates of D places.
          logs: float32 ``[B, D, K]``, the logs of their probabilities, the greatest first.
          hidden: ``[H, B, D]``, the states of the places.
          context: ``[H, B]``, c.
          known: bool ``[B]``, whether there is a token before the root.

        Returns:
          float32 ``[B, K]`` below the root; and ``[B, D - 1, K, K]`` below the candidates before.
        """
        config, (batch, places, count) = self.config, logs.shape
        shape = (-1, batch, places, count)
        rank = jnp.arange(count, dtype=jnp.float32)
        parts = (logs, jnp.exp(logs), logs - jnp.max(logs, axis=2, keepdims=True))
        parts = (*parts, rank / max(count - 1, 1), rank == 0)
        features = jnp.stack([jnp.broadcast_to(x, logs.shape).astype(jnp.float32) for x in parts])
        features = features.reshape(NUM_FEATURES, -1).astype(hidden.dtype)
        inner = jax.nn.silu(self.feature_up(self.feature_norm(features)))
        x = (embedded if self.token is None else self.token(embedded)) + self.feature_down(inner)
        state = self.state(hidden.reshape(len(hidden), -1)).reshape(-1, batch, places, 1)
        slots, ranks = self.slots[...][0, 0, :places, 0], self.ranks[...][0, 0, 0]
        x = x.reshape(shape) + state + slots.T[:, None, :, None] + ranks.T[:, None, None]
        x = x.reshape(len(x), -1)
        bias = self.bias(places)
        for layer in self.layers:
            x = layer(x, bias, batch)
        x = self.norm(x).reshape(shape)
        anchor = self.anchor_norm(jnp.where(known, self.context(context), 0))
        beside = jnp.broadcast_to(anchor[:, :, None, None], x.shape)
        read = jnp.concatenate([x, beside, x * beside]).reshape(3 * len(x), -1)
        factor = jax.nn.silu(self.factor(read))
        leave, enter, first = (
            unit(of(read).astype(jnp.float32), config.vector_eps)
            for of, read in (
                (self.leave, factor),
                (self.enter, factor),
                (self.anchor_leave, anchor),
            )
        )
        leave, enter = leave.reshape(shape), enter.reshape(shape)
        start = jnp.einsum("fb,fbk->bk", first, enter[:, :, 0])
        pairs = jnp.einsum("fbdp,fbdk->bdpk", leave[:, :, :-1], enter[:, :, 1:])
        return config.logit_scale * start, config.logit_scale * pairs


class LiLiCorrLayers(BlockLayers):
    """The weights of a LiLiCorr drafter: those of a block drafter, and of its network."""

    config: LiLiCorrConfig

    def __init__(self, config: LiLiCorrConfig, *, rngs, param_dtype=jnp.float32):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        if config.conv_taps:
            self.layers.blocks = convolved_layers(config, **common)
        self.lattice = Lattice(config, **common)

    def match(self, base, hidden, context, known, target, target_params):
        """The candidates of places, and their logits.

        Args:
          base: float32 ``[B, D, V]``, logits of the places.
          hidden: ``[H, B, D]``, their states.
          context: ``[k * H, B]``, features of the token before the root.
          known: bool ``[B]``, whether there is one.
          target: the target, whose embeddings are used.
          target_params: its weights.

        Returns:
          int32 ``[B, D, K]``, and as ``Lattice``.
        """
        logs, tokens = drawing.greatest(base, self.lattice.config.num_candidates)
        logs = logs - jax.nn.logsumexp(base, axis=-1, keepdims=True)
        embedded = target.embed(target_params, tokens.reshape(len(tokens), -1))
        read = self.hidden_norm(self.fc(context))
        return tokens, *self.lattice(embedded.astype(hidden.dtype), logs, hidden, read, known)


@pytree_dataclass
class LiLiCorrState:
    """The state between rounds.

    Attributes:
      cache: keys and values of every layer, of all tokens before the root.
      feature: ``[B, F]``, the target's features of the token before the root.
      pending, count: as in ``BlockState``.
    """

    cache: PyTree
    feature: jax.Array
    pending: jax.Array | None = None
    count: jax.Array | None = None


@pytree_dataclass
class _Matched:
    """``tokens``: int32 ``[B, D, K]``, the candidates; ``unary``: float32 ``[B, D, K]``, the logits
    that the block gives them; ``start`` and ``pairs``: as ``Lattice``."""

    tokens: jax.Array
    unary: jax.Array
    start: jax.Array
    pairs: jax.Array


@dataclasses.dataclass(frozen=True)
class LiLiCorr(CandidateBlock):
    """Drafts with LiLiCorr; ``params["drafter"]`` holds the weights of ``LiLiCorrLayers``."""

    module = LiLiCorrLayers
    name = "lilicorr"

    def init(self, params, target_params, batch, capacity, inputs=None):
        inner = super().init(params, target_params, batch, capacity, inputs)
        size = len(self.config.target_layers) * self.config.hidden_size
        feature = jnp.zeros((batch, size), self.dtype_of(params))
        lag = dict(pending=inner.pending, count=inner.count)
        return LiLiCorrState(cache=inner.cache, feature=feature, **lag)

    def observe(self, params, target_params, state, segment):
        inner = super().observe(params, target_params, state, segment)
        features = required(segment.features, "features")
        feature = last_feature(state.feature, features, segment.num)
        return dataclasses.replace(inner, feature=feature)

    def begin(self, heads, target_params, state, context, hidden, base) -> _Matched:
        known = context.length > 1
        given = state.feature.T, known, self.target, target_params
        tokens, start, pairs = heads.match(base, hidden, *given)
        unary = jnp.take_along_axis(base, tokens, axis=2)
        return _Matched(tokens=tokens, unary=unary, start=start, pairs=pairs)

    def scores(self, heads, known: _Matched, before, depth):
        if depth == 0:
            return jnp.broadcast_to(known.start[:, None], (*before.shape, known.start.shape[1]))
        which = known.tokens[:, depth - 1, None] == before[:, :, None]
        among = jnp.argmax(which, axis=2)[:, :, None]
        scores = jnp.take_along_axis(known.pairs[:, depth - 1], among, axis=1)
        # below a token that is no candidate, no pairs are known
        return jnp.where(jnp.any(which, axis=2, keepdims=True), scores, known.unary[:, depth, None])
