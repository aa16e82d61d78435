"""Calls of the library for weights in eight and four bits; ``library.register`` must have been
successful."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import quantized
from . import calls


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def quantized_dots(
    weights: tuple, x: jax.Array, transpose_out: bool = False, words: bool = False
) -> tuple:
    """``dots`` of up to 8 weights ``quantized.Quantized``: products with the float32 numbers that
    these stand for, to rounding.

    A column of a result has the same bits, however many others are computed beside it, unless
    ``words``. Where the processor has AVX-512 VNNI, ``x`` is rounded to 16 bits, with one scale for
    every 1,024 inputs of a column, before it meets weights of which ``fits_bytes`` is true.

    Args:
      weights: each ``[out, in]``, of eight bits with one scale an output or groups of a multiple
        of 32 inputs, or of four bits with such groups. ``out`` and kinds may differ.
      x: ``[in, M]``, float32.
      transpose_out: whether the results are ``[M, out]``.
      words: whether weights of four bits may meet more than 32 columns in 16 bits, where the
        processor has tiles (AMX): scaled, and rounded with one scale for every 1,024 inputs.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    calls.check_shapes("quantized_dots", weights, x)
    calls.check_types(x=x)
    arrays = []
    for weight in weights:
        if not fits(weight):
            raise ValueError(
                f"quantized_dots: {weight.qvalue.dtype} values {weight.qvalue.shape} with scales "
                f"{weight.scale.shape}: groups must be multiples of {quantized.TILE} inputs"
            )
        zero = jnp.zeros((0,), jnp.int8) if weight.zero is None else weight.zero
        arrays += [weight.qvalue, weight.scale, zero]
    how = dict(words=np.bool_(words))
    return calls.products("specjax_quantized", weights, arrays, x, transpose_out, **how)


def quantized_words(weights: tuple, x: jax.Array, transpose_out: bool = False) -> tuple:
    """``quantized_dots`` with ``words``."""
    made: Any = quantized_dots(weights, x, transpose_out, True)
    return made


def fits(weight) -> bool:
    """Whether ``quantized_dots`` takes such a weight."""
    if not isinstance(weight, quantized.Quantized) or weight.ndim != 2:
        return False
    out, inputs = weight.shape
    groups = weight.scale.shape[1]
    if weight.scale.shape[0] != out or weight.scale.dtype != jnp.float32 or inputs % groups:
        return False
    if weight.zero is not None:
        if weight.zero.shape != weight.scale.shape or weight.zero.dtype != jnp.int8:
            return False
    elif weight.qvalue.dtype == jnp.int8 and groups == 1:
        return True
    return weight.qvalue.dtype in (jnp.int8, jnp.uint8) and inputs // groups % quantized.TILE == 0


def fits_bytes(weight) -> bool:
    """Whether ``quantized_dots`` multiplies the bytes of such a weight, of which ``fits`` is true,
    on processors with AVX-512 VNNI, and takes any number of columns there."""
    if weight.qvalue.dtype == jnp.uint8:
        return True
    return weight.zero is None and weight.scale.shape[1] == 1


@quantized_dots.defjvp
def _quantized_dots_jvp(transpose_out, words, primals, tangents):
    """With respect to scales and ``x``; integers have no derivative."""
    (weights, x), (d_weights, d_x) = primals, tangents

    def plain(scales, x):
        held = zip(weights, scales, strict=True)
        return [jnp.dot(quantized.widen(dataclasses.replace(w, scale=s)), x) for w, s in held]

    scales, d_scales = [w.scale for w in weights], [d.scale for d in d_weights]
    _, changes = jax.jvp(plain, (scales, x), (d_scales, d_x))
    made = quantized_dots(weights, x, transpose_out, words)
    return made, tuple(y.T if transpose_out else y for y in changes)
