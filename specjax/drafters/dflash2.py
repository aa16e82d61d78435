"""DFlash2: a block drafter with convolutions, whose tokens are chosen among a few candidates.

    conv_s(x)_t = sum over o of (K_s[o] + D_s[o](y_t)) * x_{t - o},    x = 0 before the block
    x = x + conv_out(attention(conv_in(y))),    y = norm(x);           likewise around the MLP
    C_k = the K tokens with the greatest logits at the k-th mask, where the logits are u_k
    logits of the k-th drafted token = u_k(b) + <A[x_{k-1}] * (P h_k), B[b]>   for b in C_k

The kernels ``K`` have a number for each feature; ``D``, a projection of the normed input ``y_t``,
adds one for each group of features, and both convolutions around a sublayer read the same ``y_t``.
``h_k`` are the normed states of a block (``block.py``); ``x_0`` is the root. The layers run once a
round; then tokens are drawn from left to right among the candidates of their places, each from a
law that is given the one before, which is the law that the draft states. Where tokens are drawn,
those that are no candidates keep the probability that the block gives them (``candidates.py``).

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    heads = specjax.load_drafter(FOLDER, lm)  # of a DFlash2 drafter for lm
    specjax.generate(lm, "...", drafter=heads)

References: DFlash2, in sglang#35371 and vllm#52816; DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.pytree import pytree_dataclass
from ..models.decoder import DecoderLayer
from ..models.layers import Linear
from ..sampling import drawing
from .block import BlockConfig, BlockLayers
from .candidates import CandidateBlock, check_candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(BlockConfig):
    """The shape of a DFlash2 drafter.

    Attributes:
      conv_taps: how many places a convolution reads: its own and those before it.
      conv_group: how many neighbouring features have a dynamic kernel in common.
      selector_rank: the rank of the tables of predecessors and successors.
      num_candidates: K, how many tokens of a place may be drafted.
    """

    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    num_candidates: int = 16

    def __post_init__(self):
        super().__post_init__()
        for name in ("conv_taps", "conv_group", "selector_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.hidden_size % self.conv_group:
            raise ValueError(
                f"conv_group={self.conv_group}: it does not divide hidden_size={self.hidden_size}"
            )
        check_candidates(self)


class BlockConvolution(nnx.Module):
    """The two convolutions around a sublayer, over ``[H, B * N]`` of blocks of ``size`` places."""

    def __init__(self, config: Any, *, rngs, param_dtype):
        self.taps, self.group, self.size = config.conv_taps, config.conv_group, config.block_size
        hidden = config.hidden_size
        identity = jnp.zeros((2, self.taps, hidden), param_dtype).at[:, 0].set(1)
        self.base_kernel = nnx.Param(identity)
        kernels = 2 * self.taps * hidden // self.group
        self.kernel_projection = Linear(
            hidden, kernels, scale=0.0, rngs=rngs, param_dtype=param_dtype
        )

    def enter(self, x, batch) -> tuple[jax.Array, jax.Array]:
        """The sublayer's input, of its normed input; and the dynamic kernel of ``leave``."""
        dynamic = self.kernel_projection(x).reshape(2, self.taps, -1, x.shape[1])
        return self._convolved(x, dynamic[0], 0, batch), dynamic[1]

    def leave(self, out, dynamic, batch) -> jax.Array:
        """What is added to the residual stream, of the sublayer's output."""
        return self._convolved(out, dynamic, 1, batch)

    def _convolved(self, x, dynamic, side: int, batch: int) -> jax.Array:
        """``[H, M]``; ``dynamic`` is ``[taps, H / group, M]``."""
        hidden, columns = x.shape
        nodes = min(columns // batch, self.size)  # of one block; a row may hold several
        blocks = x.reshape(hidden, -1, nodes)
        total = jnp.zeros_like(blocks)
        for tap in range(min(self.taps, nodes)):
            kernel = self.base_kernel[...][side, tap][:, None]
            kernel = kernel + jnp.repeat(dynamic[tap], self.group, axis=0)
            moved = jnp.pad(blocks, ((0, 0), (0, 0), (tap, 0)))[:, :, :nodes]
            total += kernel.reshape(hidden, -1, nodes).astype(x.dtype) * moved
        return total.reshape(hidden, columns)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and MLP."""

    def __init__(self, config: Any, layer: int, *, rngs, param_dtype):
        super().__init__(config.layers, layer, rngs=rngs, param_dtype=param_dtype)
        common = dict(rngs=rngs, param_dtype=param_dtype)
        self.attention_conv = BlockConvolution(config, **common)
        self.mlp_conv = BlockConvolution(config, **common)

    def __call__(self, x, rope, batch, attention, live=None, without=frozenset(), gates=None):
        read, dynamic = self.attention_conv.enter(self.attention_norm(x), batch)
        out, entries = self.attention(read, rope, batch, attention)
        x = x + self.attention_conv.leave(out, dynamic, batch)
        read, dynamic = self.mlp_conv.enter(self.mlp_norm(x), batch)
        return x + self.mlp_conv.leave(self.mlp(read), dynamic, batch), entries


def convolved_layers(config: Any, **common) -> nnx.List:
    """The layers of a drafter whose ``config`` has ``conv_taps`` and ``conv_group``."""
    layers: list[DecoderLayer] = [
        ConvolvedLayer(config, i, **common) for i in range(config.layers.num_layers)
    ]
    return nnx.List(layers)


class CandidateSelector(nnx.Module):
    """Tables ``[V, R]`` of predecessors and successors, and a projection ``[R, H]`` of states."""

    def __init__(self, config: DFlash2Config, *, rngs, param_dtype):
        shape = config.vocab_size, config.selector_rank

        def table():
            values = jax.random.normal(rngs.params(), shape) * 0.02
            return nnx.Param(values.astype(param_dtype))

        self.predecessors, self.successors = table(), table()
        self.projection = Linear(
            config.hidden_size, config.selector_rank, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(self, before, projected, candidates) -> jax.Array:
        """What is added to the logits of candidates.

        Args:
          before: int32 ``[B, W]``, the tokens before.
          projected: ``[R, B]``, of the states of the place.
          candidates: int32 ``[B, K]``.

        Returns:
          float32 ``[B, W, K]``.
        """
        read = self.predecessors[...][before] * projected.T[:, None]
        edges = jnp.einsum("bwr,bkr->bwk", read, self.successors[...][candidates])
        return edges.astype(jnp.float32)

    def latent(self, before, hidden) -> jax.Array:
        """``A[before] * P hidden``, ``[R, M]``, whose products with the rows of ``successors`` are
        added to the logits of any token; int32 ``[M]`` and ``[H, M]``, for training."""
        return self.predecessors[...][before].T * self.projection(hidden)


class DFlash2Layers(BlockLayers):
    """The weights of a DFlash2 drafter."""

    def __init__(self, config: DFlash2Config, *, rngs, param_dtype=jnp.float32):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        self.layers.blocks = convolved_layers(config, **common)
        self.selector = CandidateSelector(config, **common)


@pytree_dataclass
class _Candidates:
    """What is known of the places of a block before tokens are drawn.

    Attributes:
      tokens: int32 ``[B, D, K]``, the candidates of each place.
      unary: float32 ``[B, D, K]``, their logits.
      projected: ``[R, B, D]``, the projected states.
    """

    tokens: jax.Array
    unary: jax.Array
    projected: jax.Array


@dataclasses.dataclass(frozen=True)
class DFlash2(CandidateBlock):
    """Drafts with DFlash2; ``params["drafter"]`` holds the weights of ``DFlash2Layers``."""

    module = DFlash2Layers
    name = "dflash2"

    def begin(self, heads, target_params, state, context, hidden, base) -> _Candidates:
        unary, tokens = drawing.greatest(base, self.config.num_candidates)
        projected = heads.selector.projection(hidden.reshape(len(hidden), -1))
        projected = projected.reshape(-1, *hidden.shape[1:])
        return _Candidates(tokens=tokens, unary=unary, projected=projected)

    def scores(self, heads, known: _Candidates, before, depth):
        edges = heads.selector(before, known.projected[:, :, depth], known.tokens[:, depth])
        return known.unary[:, depth, None] + edges
