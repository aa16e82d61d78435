"""Weights in eight bits (``qwix.QArray``): what products need to know of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 1 << 20  # weights converted at a time on a CPU: 4 MB of float32, which its cache holds


def is_quantized(weight) -> bool:
    """Whether a weight is a ``qwix.QArray``; asks without importing qwix, which takes seconds."""
    return hasattr(weight, "qvalue")


def dot(weight, x: jax.Array, by_blocks: bool) -> jax.Array:
    """``weight [out, in] @ x [in, M] -> [out, M]`` of a quantized weight, in the type of ``x``.

    Values are converted and the products scaled, which is the same as a product with the scaled
    weight and costs ``M / in`` as much. The barrier ties the conversion to ``x``: nothing can move
    the conversion out of the loop, where all weights would stand converted.

    Args:
      by_blocks: convert and multiply blocks of rows, one at a time. XLA's CPU backend fuses no
        conversion into a product and would hold all converted weights of a pass; a block stays in
        the processor's cache, which is also faster than reading float32. (Not on a mesh, where
        rows lie on several devices; ``qwix.dot`` converts the whole weight: three to four times
        slower.)
    """
    values, x = jax.lax.optimization_barrier((weight.qvalue, x))
    if by_blocks:
        y = _by_blocks(values, x)
    else:
        y = jnp.dot(values.astype(x.dtype), x, preferred_element_type=jnp.float32)
    return (y * weight.scale).astype(x.dtype)


def _by_blocks(values: jax.Array, x: jax.Array) -> jax.Array:
    rows, columns = values.shape
    size = min(max(BLOCK // columns, 1), -(-rows // 2))
    bits, numbers = sliceable(values)

    def block(i, y):
        at = jnp.minimum(i * size, rows - size)  # the last one may overlap
        part = numbers(jax.lax.dynamic_slice_in_dim(bits, at, size))
        part = jnp.dot(part.astype(x.dtype), x, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, part, at, axis=0)

    return jax.lax.fori_loop(0, -(-rows // size), block, jnp.zeros((rows, x.shape[1]), jnp.float32))


def sliceable(values: jax.Array):
    """The array to take slices of, and the function that turns a slice into values again.

    XLA's CPU backend would take a slice of float8 from a float16 copy of the whole: it takes one
    of bytes.
    """
    if values.dtype == jnp.int8:
        return values, lambda part: part
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return bits, lambda part: jax.lax.bitcast_convert_type(part, values.dtype)
