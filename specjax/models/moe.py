"""Experts: a router sends every token through a few of many feed-forward layers (dropless).

Nothing has a capacity: a token gets the experts that it chooses, whatever its batch mates choose,
and adds up what they return in its own order. Tokens that nobody looks at (padding, nodes that are
not scored, finished rows) choose none.

Shapes, besides the letters of ``types``: ``X`` experts, ``H`` features, ``I`` features within an
expert, ``M`` tokens (``B * N``), ``C`` experts that a token chooses.

While tokens are few, a pass costs the bytes of the experts that *any* of them chose. There are
three ways to the same sums, and ``mix`` takes one by what is known when it is compiled:

- On one CPU a loop over the chosen experts (``_grouped``), which reads nothing of the others. The
  pairs (token, expert) are sorted by expert; a turn of the loop multiplies one expert by some of
  its tokens. XLA copies what it slices; weights are sliced in blocks of rows that stay in the
  processor's cache, since an expert copied whole is read, written, and read again.
- On accelerators, where a turn of a loop costs more than a small product, and on several devices,
  where a loop would sum over them in each turn: for few tokens copies of the chosen experts
  (``_gathered``), while they are less than all; else all experts at once (``_dense``). For many
  tokens the loop. (These have been tested but not timed.)

``jax.lax.ragged_dot`` is none of them: on CPU, and on GPU by default, it multiplies all pairs by
all experts, through an operand of ``M * C * X * H`` elements.

One layer on 2 cores of an x86 server, not idle, float32, the least of several calls, ms (measured
once, by no suite)::

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

FEW = 64  # tokens; with fewer, products wait for the weights
TILE = (16, 128)  # tokens that a turn of the loop takes, at least and at most
BLOCK = 1 << 20  # weights sliced at a time on CPU: 4 MB of float32, which its cache holds


class Router(nnx.Module):
    """Which experts a token chooses, and with what weights; always computed in float32."""

    def __init__(self, config: DecoderConfig, *, rngs, param_dtype):
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        init = jax.random.normal(rngs.params(), shape) / math.sqrt(config.hidden_size)
        self.weight = nnx.Param(init.astype(param_dtype))
        corrected = config.routing == "noaux_tc"
        self.bias = nnx.Param(jnp.zeros((config.num_experts,), jnp.float32)) if corrected else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``x [H, M]`` to the chosen experts, int32 ``[M, C]``, and their weights, float32
        ``[M, C]``.

        ``greedy``: the most probable ones. ``group_limited_greedy`` (DeepSeek-V2, 2405.04434):
        of the groups whose best expert is most probable. ``noaux_tc`` (DeepSeek-V3, 2412.19437):
        experts have affinities of their own (a sigmoid each); a bias that balanced their load in
        training counts for the choice, by the two best of a group, but not for the weights.
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
    """A feed-forward layer of experts, beside a ``shared`` one that every token passes, or None."""

    def __init__(self, config: DecoderConfig, shared, *, rngs, param_dtype):
        common = dict(rngs=rngs, param_dtype=param_dtype)
        self.router = Router(config, **common)
        self.experts = Experts(config, **common)
        self.shared = shared

    def __call__(self, x: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """``[H, M] -> [H, M]``. ``live``: bool ``[M]`` or None (all); the others get no expert."""
        index, weight = self.router(x)
        if live is not None:
            index = jnp.where(live[:, None], index, self.router.config.num_experts)
        y = self.experts(x, index, weight)
        return y if self.shared is None else y + self.shared(x)


def mix(activation, x, index, weight, gate, up, down) -> jax.Array:
    """The weighted sum of what each token's experts return.

    Args:
      activation: an elementwise function.
      x: ``[H, M]``.
      index: int32 ``[M, C]``, experts; ``X``: none.
      weight: float32 ``[M, C]``.
      gate, up: ``[X, I, H]``; down: ``[X, H, I]``; either may be quantized.

    Returns:
      ``[H, M]`` in the type of ``x``. Differentiable in either mode (in that of ``_dense``).
    """
    tokens, chosen = index.shape
    if tokens > FEW or kernels.current().loops_over_experts():
        return _grouped(activation, x, index, weight, gate, up, down)
    if 3 * tokens * chosen <= quantize.shape(gate)[0]:  # a copy is read, written, and read again
        return _gathered(activation, x, index, weight, gate, up, down)
    return _dense(activation, x, index, weight, gate, up, down)


def _dense(activation, x, index, weight, gate, up, down):
    """Every token through every expert: as many bytes and operations as there are."""
    gate, up, down = (quantize.floats(w, x.dtype) for w in (gate, up, down))
    share = jax.nn.one_hot(index, len(gate), dtype=jnp.float32) * weight[:, :, None]
    share = jnp.sum(share, axis=1).T[:, None]  # [X, 1, M]
    wide = activation(jnp.einsum("eih,hm->eim", gate, x)) * jnp.einsum("eih,hm->eim", up, x)
    wide = jnp.where(share == 0, 0, wide * share.astype(x.dtype))  # or 0 * inf where not chosen
    return jnp.einsum("ehi,eim->hm", down, wide)


def _gathered(activation, x, index, weight, gate, up, down):
    """Every pair through a copy of its expert."""
    experts = quantize.shape(gate)[0]
    copies = (quantize.rows(w, index.reshape(-1)) for w in (gate, up, down))
    gate, up, down = (quantize.floats(w, x.dtype) for w in copies)  # [M * C, ...]
    each = jnp.repeat(x.T, index.shape[1], axis=0)
    wide = activation(jnp.einsum("pih,ph->pi", gate, each)) * jnp.einsum("pih,ph->pi", up, each)
    out = jnp.einsum("phi,pi->ph", down, wide).T.reshape(-1, *index.shape)
    return _summed(out, index < experts, weight)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _grouped(activation, x, index, weight, gate, up, down):
    """Every chosen expert, in turn, with its own tokens. As many turns as it takes: it costs what
    was chosen, and has no derivative of its own."""
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
        # what stands behind an expert's own tokens is overwritten by the next one's
        return jax.lax.dynamic_update_slice_in_dim(out, part, begin, axis=1)

    out = jax.lax.fori_loop(0, last[-1], turn, jnp.zeros_like(columns))
    out = out[:, jnp.argsort(order)].reshape(-1, tokens, chosen)
    return _summed(out, index < experts, weight)


@_grouped.defjvp
def _(activation, primals, tangents):
    out = _grouped(activation, *primals)
    return out, jax.jvp(functools.partial(_dense, activation), primals, tangents)[1]


def _summed(out, chosen, weight):
    """``[H, M]`` of what pairs returned, ``[H, M, C]``; idle ones hold anything."""
    return jnp.sum(jnp.where(chosen, out * weight.astype(out.dtype), 0), axis=2)


def _tile(tokens: int, expected: float) -> int:
    """Tokens a turn, where an expert is chosen ``expected`` times; multiples of 8, which CPU
    products like (see ``product``)."""
    tile = min(tokens, max(TILE[0], min(TILE[1], math.ceil(expected))))
    return tile if tile <= 4 else -(-tile // 8) * 8


def _by_rows(stacks, expert, x, combine):
    """``combine(stack[expert] @ x, ...)``, ``[out, tile]``; see ``BLOCK``."""
    _, rows, columns = quantize.shape(stacks[0])
    size = min(max(BLOCK // columns, 1), rows) if kernels.current().loops_over_experts() else rows

    def block(i, y):
        row = jnp.minimum(i * size, rows - size)  # the last one may overlap
        part = combine(*(quantize.dot_rows(w, expert, row, size, x) for w in stacks))
        return jax.lax.dynamic_update_slice_in_dim(y, part, row, axis=0)

    return jax.lax.fori_loop(0, -(-rows // size), block, jnp.zeros((rows, x.shape[1]), x.dtype))
