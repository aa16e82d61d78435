"""Factors and switches on the outputs of sublayers, as arrays that no program is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def gated(
    gate: jax.Array | None, x: jax.Array, sublayer: Callable[[], tuple[jax.Array, Any]]
) -> tuple[jax.Array, Any]:
    """Returns the residual stream after a sublayer, and what else the sublayer computed.

    Args:
      gate: None: the sublayer runs. A bool scalar: it runs where the gate is True; where it is
        False nothing of it is computed, and what else it would have computed is zeros. A floating
        scalar or ``[B * N]``: a factor on its output.
      x: ``[H, B * N]``, the residual stream before it.
      sublayer: a function that returns the sublayer's output ``[H, B * N]`` and anything else.
    """
    if gate is not None and gate.dtype == jnp.bool_:
        return jax.lax.cond(gate, lambda: _run(x, sublayer, None), lambda: _leave(x, sublayer))
    return _run(x, sublayer, gate)


def as_gates(gates, dtype, nodes: int) -> jax.Array:
    """Returns ``gates`` of ``decoder.run_blocks`` as layers read them.

    Args:
      gates: bool ``[L, 2]``, or factors ``[L, 2]`` or ``[L, 2, B]``.
      dtype: of the residual stream.
      nodes: N, the number of nodes of a row.
    """
    gates = jnp.asarray(gates)
    if gates.dtype == jnp.bool_:
        return gates
    gates = gates.astype(dtype)
    return gates if gates.ndim == 2 else jnp.repeat(gates, nodes, axis=2)


def _run(x, sublayer, factor):
    out, others = sublayer()
    return x + (out if factor is None else out * factor), others


def _leave(x, sublayer):
    _, others = jax.eval_shape(sublayer)
    return x, jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), others)
