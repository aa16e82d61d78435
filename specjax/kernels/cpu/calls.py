"""Calls of the library in C++; ``library.register`` must have been successful."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

MOST_COLUMNS = 32  # beyond, XLA's own product is as fast
MOST_WEIGHTS = 8  # kMost of the source


def dot(weight: jax.Array, x: jax.Array, transpose_out: bool = False) -> jax.Array:
    """``dots`` of one weight."""
    return dots((weight,), x, transpose_out)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def dots(weights: tuple, x: jax.Array, transpose_out: bool = False) -> tuple:
    """``weight [out, in] @ x [in, M] -> [out, M]`` of up to 8 weights, float32, in one call.

    Args:
      weights: each ``[out, in]``, float32, or bfloat16: half of the bytes, and, to rounding,
        the results of the same numbers in float32. ``out`` may differ.
      x: ``[in, M]``, float32.
      transpose_out: whether the results are ``[M, out]``.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"dots: {len(weights)} weights, it takes 1 to {MOST_WEIGHTS}")
    for weight in weights:
        fits = weight.ndim == 2 and x.ndim == 2 and weight.shape[1] == x.shape[0]
        if not fits or x.shape[1] < 1:
            raise ValueError(f"dots: weight {weight.shape} and x {x.shape} do not fit")
        if weight.dtype != jnp.bfloat16:
            _check_types(weight=weight)
    _check_types(x=x)
    sizes = [(weight.shape[0], x.shape[1]) for weight in weights]
    shapes = [jax.ShapeDtypeStruct(s[::-1] if transpose_out else s, jnp.float32) for s in sizes]
    call = jax.ffi.ffi_call("specjax_products", shapes, vmap_method="sequential")
    return tuple(call(x, *weights, transpose_out=np.bool_(transpose_out)))


@dots.defjvp
def _dots_jvp(transpose_out, primals, tangents):
    (weights, x), (d_weights, d_x) = primals, tangents
    pairs = zip(weights, d_weights, strict=True)
    changes = [jnp.dot(d_weight, x) + jnp.dot(weight, d_x) for weight, d_weight in pairs]
    return dots(weights, x, transpose_out), tuple(y.T if transpose_out else y for y in changes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(7,))
def attend(query, keys, values, own_keys, own_values, own_mask, length, by_xla) -> jax.Array:
    """Softmax attention over ``length`` slots of a cache and a draft's own entries, float32.

    Args:
      query: ``[B, K, E, G, N]``, not scaled.
      keys, values: ``[B, K, S, E]``.
      own_keys, own_values: ``[B, K, M, E]``.
      own_mask: bool ``[B or 1, M, N]``: node ``n`` sees entry ``m``.
      length: int32 ``[B]``.
      by_xla: a function of these seven by XLA, for derivatives.

    Returns:
      ``[B, K, E, G, N]``.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    batch, heads, size, _, nodes = query.shape
    slots, own = keys.shape[2], own_keys.shape[2]
    shapes = {
        "keys": (keys, (batch, heads, slots, size)),
        "values": (values, (batch, heads, slots, size)),
        "own_keys": (own_keys, (batch, heads, own, size)),
        "own_values": (own_values, (batch, heads, own, size)),
        "own_mask": (own_mask, (own_mask.shape[0], own, nodes)),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape or name == "own_mask" and shape[0] not in (1, batch):
            raise ValueError(f"attend: {name} is {array.shape}, query {query.shape}: no fit")
    _check_types(query=query, keys=keys, values=values, own_keys=own_keys, own_values=own_values)
    if own_mask.dtype != jnp.bool or length.dtype != jnp.int32:
        raise ValueError(f"attend: own_mask is {own_mask.dtype}, length {length.dtype}")
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_attention", shape, vmap_method="sequential")
    return call(query, keys, values, own_keys, own_values, own_mask, length)


@attend.defjvp
def _attend_jvp(by_xla, primals, tangents):
    return jax.jvp(by_xla, primals, tangents)


def argmax(x: jax.Array) -> jax.Array:
    """The first index of the greatest over the last axis of ``x`` float32, int32; -1 where that is
    not finite, or one of the numbers is NaN.

    Raises:
      ValueError: another type.
    """
    _check_types(x=x)
    shape = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
    call = jax.ffi.ffi_call("specjax_argmax", shape, vmap_method="broadcast_all")
    return call(jax.lax.stop_gradient(x))


def _check_types(**arrays) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}: the kernels compute in float32")
