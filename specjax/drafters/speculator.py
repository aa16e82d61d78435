"""MLP and LSTM speculators: a small recurrent cell that begins with the target's last hidden state.

    mlp:   s_{i+1} = GELU(norm(P s_i + w E[t_i]))
    lstm:  f, i, o, c = P s_i + w E[t_i];  cell = σ(f) cell + σ(i) GELU(norm(c))
           s_{i+1} = σ(o) GELU(norm'(cell))
    logits of the token after t_i:  H s_{i+1}

``s_0`` is the hidden state whose logits produced the root, ``t_0`` the root, and ``t_i`` the i-th
drafted token. In a tree each node goes on from the state of its parent. With a prefix layer
(``prefix.py``; not in published speculators) ``s_0`` is the output of that layer for
``fc [norm(E[t]); norm(h)]`` of all tokens so far, where ``t`` is the token after each.

Lossless: yes; ``sibling_sampling="top"`` under ``greedy`` and ``delta``; drawn trees (``iid``,
``distinct``), whose laws are stated, also under ``rejection``.

Example::

    heads = specjax.load_drafter("ibm-ai-platform/llama3-8b-accelerator", lm)
    specjax.generate(lm, "...", drafter=heads)

References: Wertheimer et al., arXiv 2404.19124 (whose drafts are the most likely tokens); the LSTM
cell is that of Arctic speculator, github.com/snowflakedb/ArcticTraining.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.optional import required
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.layers import Linear, fused_linear, product
from .heads import states_of_parents
from .prefix import PrefixDrafter, check_prefix, read_rows

CELLS = ("mlp", "lstm")
EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculatorConfig:
    """The shape of a speculator.

    Attributes:
      hidden_size: F, that of the target.
      vocab_size: V, that of the target.
      inner_size: D, the size of the cell's state.
      num_heads: n, the number of tokens that it is trained to draft.
      cell: ``"mlp"`` or ``"lstm"``.
      tied: whether all steps share their weights, except for the first projection, which reads F
        numbers; an ``"lstm"`` always does.
      scaled: whether the target's state is divided by its root mean square and by ``sqrt(2)``.
      one_table: (``"lstm"``) whether the four gates share one table of embeddings.
      prefix: the shape of a prefix layer (``prefix.py``), W wide; None: no such layer, as in all
        published speculators.
    """

    hidden_size: int
    vocab_size: int
    inner_size: int
    num_heads: int = 3
    cell: str = "mlp"
    tied: bool = False
    scaled: bool = False
    one_table: bool = True
    prefix: DecoderConfig | None = None

    def __post_init__(self):
        if self.cell not in CELLS:
            raise ValueError(f"cell={self.cell!r} is unknown; accepted: {', '.join(CELLS)}")
        for name in ("hidden_size", "vocab_size", "inner_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.cell == "lstm" and not self.tied:
            raise ValueError("cell='lstm' has one set of weights for all steps: give tied=True")
        if self.cell == "mlp" and self.tied and self.num_heads == 1:
            raise ValueError("num_heads=1 leaves nothing to tie: give tied=False")
        check_prefix(self.prefix)

    @property
    def state_size(self) -> int:
        """The size of the state with which the cell begins: F, or W with a prefix layer."""
        return self.hidden_size if self.prefix is None else self.prefix.hidden_size

    @property
    def gates(self) -> int:
        """The number of vectors of size D that a step computes: forget, input, output and cell; or
        one."""
        return 4 if self.cell == "lstm" else 1

    @property
    def token_weight(self) -> float:
        """``w``, the weight of a token's embedding relative to the projected state: such that the
        target's state is expected to make up half of the state at the last step."""
        state = 0.5 ** (0.5 / self.num_heads)
        return math.sqrt((1 - state**2) * self.inner_size / 2) / state


class ShiftedNorm(nnx.Module):
    """An RMS norm over axis 0 with a scale and a shift."""

    def __init__(self, size: int, *, param_dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((size,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normed(x) * self.weight[...][:, None] + self.bias[...][:, None]


class SpeculatorCell(nnx.Module):
    """The weights of a speculator, by the names of the module's equations.

    A state is ``(s [D, M],)``, or ``(s, cell)`` of an LSTM, feature-major over M columns.
    """

    def __init__(self, config: SpeculatorConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.config = c = config
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        steps = range(1 if c.tied else c.num_heads)

        def table():
            values = jax.random.normal(rngs.params(), (c.vocab_size, c.inner_size))
            return nnx.Param((values * c.inner_size**-0.5).astype(param_dtype))

        def projections(size):
            return nnx.List([Linear(size, c.inner_size, **common) for _ in range(c.gates)])

        def norms():
            return nnx.List([ShiftedNorm(c.inner_size, param_dtype=param_dtype) for _ in steps])

        tables = range(1 if c.one_table else c.gates)
        self.embeddings = nnx.List([nnx.List([table() for _ in tables]) for _ in steps])
        inputs = [c.state_size] + [c.inner_size] * (1 if c.tied else c.num_heads - 1)
        self.projections = nnx.List([projections(size) for size in inputs])
        self.norms = norms()
        self.cell_norms = norms() if c.cell == "lstm" else None
        self.lm_heads = nnx.List([Linear(c.inner_size, c.vocab_size, **common) for _ in steps])
        layer, num_in = c.prefix, c.inner_size + c.hidden_size
        self.fc = None if layer is None else Linear(num_in, layer.hidden_size, **common)
        self.prefix = None if layer is None else Decoder(layer, bare=True, **common)

    def enter(self, hidden: jax.Array, after: jax.Array) -> jax.Array:
        """The input ``[W, M]`` of the prefix layer.

        Args:
          hidden: ``[F, M]``, the target's hidden states.
          after: int32 ``[M]``, the token that follows each.
        """
        token = self.embeddings[0][0][...][after].T
        return required(self.fc, "fc")(jnp.concatenate([_normed(token), _normed(hidden)], axis=0))

    def start(self, hidden: jax.Array) -> tuple[jax.Array, ...]:
        """The state before the first token; ``hidden`` ``[F, M]``, or ``[W, M]`` of the prefix
        layer."""
        state = _normed(hidden) * 0.5**0.5 if self.config.scaled else hidden
        if self.config.cell == "mlp":
            return (state,)
        return state, jnp.zeros((self.config.inner_size, hidden.shape[1]), hidden.dtype)

    def step(self, i: int, state, tokens: jax.Array) -> tuple[jax.Array, ...]:
        """The state after step ``i``, which reads ``tokens`` int32 ``[M]``."""
        c, own = self.config, 0 if self.config.tied else i
        projected = fused_linear(state[0], *self.projections[min(i, 1) if c.tied else i])
        read = [table[...][tokens].T * c.token_weight for table in self.embeddings[own]]
        mixed = [x + read[min(k, len(read) - 1)] for k, x in enumerate(projected)]
        if c.cell == "mlp":
            return (_gelu(self.norms[own](mixed[0])),)
        forget, write, show = (jax.nn.sigmoid(x) for x in mixed[:3])
        cell = state[1] * forget + _gelu(self.norms[own](mixed[3])) * write
        return _gelu(required(self.cell_norms, "cell_norms")[own](cell)) * show, cell

    def table(self, i: int) -> jax.Array:
        """The LM head ``H`` of step ``i``, ``[V, D]``."""
        return self.lm_heads[0 if self.config.tied else i].weight[...]

    def head(self, i: int, state: jax.Array) -> jax.Array:
        """Logits float32 ``[M, V]`` of the token after the one that step ``i`` read."""
        return product(self.table(i), state, transpose_out=True).astype(jnp.float32)

    def states(self, hidden: jax.Array, tokens: Sequence[jax.Array]) -> list[jax.Array]:
        """The states ``[D, M]`` of the first steps, with given tokens in place of drafted ones.

        Args:
          hidden: as that of ``start``.
          tokens: int32 ``[M]`` for each step.
        """
        state, found = self.start(hidden), []
        for i, read in enumerate(tokens):
            state = self.step(i, state, read)
            found.append(state[0])
        return found

    def logits(self, hidden: jax.Array, tokens: jax.Array, segments=None) -> jax.Array:
        """The logits of all steps, with the true tokens in place of drafted ones, for training.

        Args:
          hidden: ``[B, T, F]``, the target's last hidden state, normed.
          tokens: int32 ``[B, T]`` at the same positions.
          segments: int32 ``[B, T]`` or None; the prefix layer attends within a segment only.

        Returns:
          float32 ``[B, T, n, V]``: at position t, step i (counted from 0) predicts token t + 2 + i.
          Only positions t < T - 2 - i count: after them, tokens from the row's begin are read.
        """
        batch, length, size = hidden.shape
        steps = range(self.config.num_heads)
        read = [jnp.roll(tokens, -(i + 1), axis=1).reshape(-1) for i in steps]
        x = hidden.reshape(-1, size).T
        if self.prefix is not None:
            x = read_rows(self, x, jnp.concatenate([tokens, tokens[:, :1]], axis=1), segments)
        states = self.states(x, read)
        logits = jnp.stack([self.head(i, states[i]) for i in steps], axis=1)
        return logits.reshape(batch, length, len(steps), -1)


@dataclasses.dataclass(frozen=True)
class Speculator(PrefixDrafter):
    """Drafts with an MLP or LSTM speculator.

    ``params["drafter"]`` holds the weights of a ``SpeculatorCell``. ``target``: the target whose
    last hidden state is read.
    """

    module = SpeculatorCell
    name = "speculator"

    def make_level(self, params, target_params, state, context):
        cell = self.heads(params)

        def level(states, grown, since):
            """``states``: those of the nodes of each depth before this one."""
            i, tokens = len(states), grown.tokens[:, since:]
            if states:
                before = states_of_parents(states[-1], grown, since)
            else:
                before = cell.start(self.read(params, state, context))
            after = cell.step(i, before, tokens.reshape(-1))
            return cell.head(i, after[0]).reshape(*tokens.shape, -1), (*states, after)

        return level, ()


def _normed(x):
    """``x`` divided by its root mean square over axis 0, computed in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=0, keepdims=True) + EPS)).astype(x.dtype)


def _gelu(x):
    return jax.nn.gelu(x, approximate=False)
