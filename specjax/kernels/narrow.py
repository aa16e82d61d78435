"""Products of bfloat16 arrays, summed in float32, in the form that XLA computes fast on CPUs.

A product whose result is bfloat16 is computed by XLA on CPUs in float32, from copies of its
operands. With a float32 result it goes to a library that multiplies bfloat16, provided that what is
summed over comes last in the first operand; with AMX, five to ten times as fast as float32. The
derivatives of a product are products of the same kind.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

LEAST_COLUMNS = 64  # with fewer, reading the weights takes the time


def is_narrow(x, y) -> bool:
    """Whether both arrays are bfloat16."""
    return x.dtype == y.dtype == jnp.bfloat16


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """``jnp.einsum`` of two bfloat16 arrays, summed and returned in float32.

    Args:
      subscripts: explicit, such as ``"oi,im->om"``. Each letter stands in two or three of the
        terms, so that the derivatives are products as well.
      x, y: the operands.
    """
    return _summed(subscripts, x, y)


def _summed(subscripts, x, y):
    terms, out = subscripts.split("->")
    first, second = terms.split(",")
    kept = [letter for letter in first if letter in out]
    summed = [letter for letter in first if letter not in out]
    order = "".join(kept + summed)
    x, y = _in_order(jnp.einsum(f"{first}->{order}", x)), _in_order(y)
    return jnp.einsum(f"{order},{second}->{out}", x, y, preferred_element_type=jnp.float32)


def _in_order(x):
    """``x`` with its axes in memory in their order; otherwise XLA folds transpositions into the
    product, and the library does not take it."""
    return with_layout_constraint(x, Layout(major_to_minor=(*range(x.ndim),)))


def _forward(subscripts, x, y):
    return _summed(subscripts, x, y), (x, y)


def backward(subscripts: str, kept: tuple, slope: jax.Array) -> tuple:
    """The derivatives of ``einsum`` of the arrays ``kept``, for the ``slope`` of its result."""
    x, y = kept
    slope = slope.astype(x.dtype)
    terms, out = subscripts.split("->")
    first, second = terms.split(",")
    of_x = _summed(f"{out},{second}->{first}", slope, y)
    of_y = _summed(f"{first},{out}->{second}", x, slope)
    return of_x.astype(x.dtype), of_y.astype(y.dtype)


einsum.defvjp(_forward, backward)
