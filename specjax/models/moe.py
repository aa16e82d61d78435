"""Experts: a router sends every token through a few of many feed-forward layers (dropless).

Experts have no capacity limit: a token is processed by the experts that it chooses, whatever other
tokens of the batch choose, and their outputs are summed in the token's own order. Tokens that are
not used (padding, nodes that are not scored, finished rows) choose no expert.

Letters of shapes besides those of ``types``: ``X`` experts, ``H`` features, ``I`` features within
an expert, ``M`` tokens (``B * N``), ``C`` experts that a token chooses.

While tokens are few, the time of a pass is that of reading the experts that *any* token chose.
``mix`` has three ways to compute the same sums, and chooses one when it is compiled:

- On one CPU: a loop over the chosen experts (``_grouped``), which reads no other expert. The pairs
  (token, expert) are sorted by expert, and a turn of the loop multiplies one expert by some of its
  tokens. XLA copies what it slices, so weights are sliced in blocks of rows that fit into the
  processor's cache; a whole expert would be read, written, and read again.
- On accelerators, where a turn of a loop costs more than a small product, and on several devices,
  where each turn would need a sum over the devices: copies of the chosen experts (``_gathered``)
  while these are fewer than all experts, else all experts at once (``_dense``). For many tokens,
  the loop. (These were tested, not timed.)

``jax.lax.ragged_dot`` is not used: on CPU, and by default on GPU, it multiplies all pairs by all
experts, through an operand of ``M * C * X * H`` elements.

The time of one layer in ms, float32, on 2 cores of an x86 server that was not idle; the least of
several calls, measured once by no suite::

                       8 experts of 44 MB, 2 chosen      64 experts of 4.7 MB, 8 chosen
    tokens               1     4     8    64   512          1     8    64   512
    _grouped           4.9   8.3    20    27   102        1.7    13    30   118
    _dense              38    37    40    61   334         35    34    51   516
    _gathered           22    96   182     -     -         11    71     -     -
    ragged_dot         156   154   180   238     -          -     -     -     -
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from .. import kernels
from . import quantize
from .config import DecoderConfig
from .layers import ACTIVATIONS, product

FEW = 64  # tokens; with fewer, reading the weights takes longer than multiplying by them
TILE = (16, 128)  # the least and the greatest number of tokens in a turn of the loop
BLOCK = 1 << 20  # weights sliced at a time on CPU: 4 MB of float32, which its cache holds


class Router(nnx.Module):
    """Chooses the experts of each token and their weights; always computed in float32."""

    def __init__(self, config: DecoderConfig, *, rngs, param_dtype):
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        init = jax.random.normal(rngs.params(), shape) / math.sqrt(config.hidden_size)
        self.weight = nnx.Param(init.astype(param_dtype))
        corrected = config.routing == "noaux_tc"
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32)) if corrected else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Routes tokens, by ``config.routing``.

        - ``greedy``: each token gets its most probable experts.
        - ``group_limited_greedy`` (DeepSeek-V2, 2405.04434): the most probable experts of the
          groups whose best expert is most probable.
        - ``noaux_tc`` (DeepSeek-V3, 2412.19437): each expert has an affinity of its own (a
          sigmoid). A bias, which balanced the load in training, is added to choose groups (by
          their two best experts) and experts; the weights are computed without it.

        Args:
          x: ``[H, M]``.

        Returns:
          The chosen experts, int32 ``[M, C]``, and their weights, float32 ``[M, C]``.
        """
        c = self.config
        f32 = jnp.float32
        logits = product(self.weight[...].astype(f32), x.astype(f32), transpose_out=True)  # [M, X]
        if c.routing == "noaux_tc":
            scores = jax.nn.sigmoid(logits)
            wanted, best = scores + self.bias[...], 2
        else:
            scores = wanted = jax.nn.softmax(logits, axis=-1)
            best = 1
        if c.routing != "greedy":
            groups = wanted.reshape(len(wanted), c.expert_groups, -1)
            total = jnp.sum(jax.lax.top_k(groups, best)[0], axis=-1)
            kept = jax.lax.top_k(total, c.groups_per_token)[1]
            open_ = jnp.any(kept[:, :, None] == jnp.arange(c.expert_groups), axis=1)
            wanted = jnp.where(open_[:, :, None], groups, -jnp.inf).reshape(wanted.shape)
        index = jax.lax.top_k(wanted, c.experts_per_token)[1]
        weight = jnp.take_along_axis(scores, index, axis=1)
        if c.norm_expert_weights:
            weight = weight / (jnp.sum(weight, axis=1, keepdims=True) + 1e-20)
        return index, weight * c.expert_scale


class Experts(nnx.Module):
    """Gated feed-forward layers, stacked: ``gate, up [X, I, H]``, ``down [X, H, I]``."""

    def __init__(self, config: DecoderConfig, *, rngs, param_dtype):
        count, wide, hidden = config.num_experts, config.expert_size, config.hidden_size
        self.activation = ACTIVATIONS[config.activation]

        def stacked(num_out, num_in, scale=1.0):
            init = jax.random.normal(rngs.params(), (count, num_out, num_in), jnp.float32)
            return nnx.Param((init * (scale / math.sqrt(num_in))).astype(param_dtype))

        self.gate, self.up = stacked(wide, hidden), stacked(wide, hidden)
        self.down = stacked(hidden, wide, (2 * config.num_layers) ** -0.5)

    def __call__(self, x, index, weight):
        stacks = self.gate[...], self.up[...], self.down[...]
        return mix(self.activation, x, index, weight, *stacks)


class MoE(nnx.Module):
    """A feed-forward layer of experts, and a ``shared`` one (or None) for every token."""

    def __init__(self, config: DecoderConfig, shared, *, rngs, param_dtype):
        common = dict(rngs=rngs, param_dtype=param_dtype)
        self.router = Router(config, **common)
        self.experts = Experts(config, **common)
        self.shared = shared

    def __call__(self, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """Applies the layer.

        Args:
          x: ``[H, M]``.
          live: bool ``[M]``, the tokens that are used; None: all. The others get no expert.

        Returns:
          ``[H, M]``.
        """
        index, weight = self.router(x)
        if live is not None:
            index = jnp.where(live[:, None], index, self.router.config.num_experts)
        y = self.experts(x, index, weight)
        return y if self.shared is None else y + self.shared(x)


def mix(activation, x, index, weight, gate, up, down) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts.

    Args:
      activation: an elementwise function.
      x: ``[H, M]``.
      index: int32 ``[M, C]``, the experts of each token; ``X`` stands for no expert.
      weight: float32 ``[M, C]``.
      gate, up: ``[X, I, H]``; down: ``[X, H, I]``; either may be quantized.

    Returns:
      ``[H, M]`` in the dtype of ``x``. Derivatives, in either mode, are those of ``_dense``.
    """
    tokens, chosen = index.shape
    if tokens > FEW or kernels.current().loops_over_experts():
        return _grouped(activation, x, index, weight, gate, up, down)
    if 3 * tokens * chosen <= quantize.shape(gate)[0]:  # a copy is read, written, and read again
        return _gathered(activation, x, index, weight, gate, up, down)
    return _dense(activation, x, index, weight, gate, up, down)


def _dense(activation, x, index, weight, gate, up, down):
    """Applies every expert to every token."""
    gate, up, down = (quantize.floats(w, x.dtype) for w in (gate, up, down))
    share = jax.nn.one_hot(index, len(gate), dtype=jnp.float32) * weight[:, :, None]
    share = jnp.sum(share, axis=1).T[:, None]  # [X, 1, M]
    wide = activation(jnp.einsum("eih,hm->eim", gate, x)) * jnp.einsum("eih,hm->eim", up, x)
    wide = jnp.where(share == 0, 0, wide * share.astype(x.dtype))  # or 0 * inf where not chosen
    return jnp.einsum("ehi,eim->hm", down, wide)


def _gathered(activation, x, index, weight, gate, up, down):
    """Applies to each pair (token, expert) a copy of its expert."""
    experts = quantize.shape(gate)[0]
    copies = (quantize.rows(w, index.reshape(-1)) for w in (gate, up, down))
    gate, up, down = (quantize.floats(w, x.dtype) for w in copies)  # [M * C, ...]
    each = jnp.repeat(x.T, index.shape[1], axis=0)
    wide = activation(jnp.einsum("pih,ph->pi", gate, each)) * jnp.einsum("pih,ph->pi", up, each)
    out = jnp.einsum("phi,pi->ph", down, wide).T.reshape(-1, *index.shape)
    return _summed(out, index < experts, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _grouped(activation, x, index, weight, gate, up, down):
    """Applies the chosen experts in turn, each to its own tokens.

    The number of turns depends on the choice, so this loop has no derivative of its own.
    """
    tokens, chosen = index.shape
    experts, pairs = quantize.shape(gate)[0], index.size
    tile = _tile(tokens, pairs / experts)

    flat = index.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # idle pairs, those of expert X, come last
    counts = jnp.zeros((experts,), jnp.int32).at[flat].add(1, mode="drop")
    starts = jnp.cumsum(counts) - counts
    turns = -(-counts // tile)
    last = jnp.cumsum(turns)
    columns = jnp.pad(x[:, order // chosen], ((0, 0), (0, tile)))  # [H, pairs + tile]

    def turn(i, out):
        expert = jnp.searchsorted(last, i, side="right")
        begin = starts[expert] + (i - last[expert] + turns[expert]) * tile
        part = jax.lax.dynamic_slice_in_dim(columns, begin, tile, axis=1)
        part = _by_rows((gate, up), expert, part, lambda g, u: activation(g) * u)
        part = _by_rows((down,), expert, part, lambda y: y)
        # columns after an expert's own tokens are overwritten by the next expert
        return jax.lax.dynamic_update_slice_in_dim(out, part, begin, axis=1)

    out = jax.lax.fori_loop(0, last[-1], turn, jnp.zeros_like(columns))
    out = out[:, jnp.argsort(order)].reshape(-1, tokens, chosen)
    return _summed(out, index < experts, weight)


@_grouped.defjvp
def _(activation, primals, tangents):
    out = _grouped(activation, *primals)
    return out, jax.jvp(functools.partial(_dense, activation), primals, tangents)[1]


def _summed(out, chosen, weight):
    """Sums the outputs ``[H, M, C]`` of pairs to ``[H, M]``; those of idle pairs are ignored."""
    return jnp.sum(jnp.where(chosen, out * weight.astype(out.dtype), 0), axis=2)


def _tile(tokens: int, expected: float) -> int:
    """The tokens of a turn if an expert is chosen ``expected`` times.

    It is a multiple of 8, for which products are fast on a CPU (see ``product``).
    """
    tile = min(tokens, max(TILE[0], min(TILE[1], math.ceil(expected))))
    return tile if tile <= 4 else -(-tile // 8) * 8


def _by_rows(stacks, expert, x, combine):
    """Returns ``combine(stack[expert] @ x, ...)``, ``[out, tile]``, computed in blocks of rows."""
    _, rows, columns = quantize.shape(stacks[0])
    size = min(max(BLOCK // columns, 1), rows) if kernels.current().loops_over_experts() else rows

    def block(i, y):
        row = jnp.minimum(i * size, rows - size)  # the last one may overlap
        part = combine(*(quantize.dot_rows(w, expert, row, size, x) for w in stacks))
        return jax.lax.dynamic_update_slice_in_dim(y, part, row, axis=0)

    return jax.lax.fori_loop(0, -(-rows // size), block, jnp.zeros((rows, x.shape[1]), x.dtype))
