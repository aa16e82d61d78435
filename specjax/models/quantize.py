"""Weights in eight bits, made by qwix; activations, norms and biases keep their type.

A quantized weight is a ``qwix.QArray``: values ``[out, in]`` in eight bits and one float32 scale
for each output channel, ``weight ≈ values * scale``. Products, the embedding and the head are
quantized alike: a tied head is as large as many layers, and is read in every pass.

Quantized weights are other weights. A *target* that has them is approximate, and is named so; a
*drafter* may have any weights and stays lossless.

How much changes, on the 208 held-out prompts of this package (16,317 positions of the embedded
target, every token given): int8 keeps 99.3 % of the most probable tokens (99.4 % if the embedding
stayed as it was), at a mean total variation of 0.005 from the law; fp8 97.1 % (97.6 %) and 0.021.

What a pass costs on a CPU (2 cores of an AMD EPYC, not quite idle; 110 M parameters in 438 or 110
MB, medians; like the figures above measured once, by no suite):
over one token 15.4 ms in float32, 10.5 in int8, 37 in fp8, whose conversion that backend emulates;
over eight, where float32 has a kernel of its own (``specjax.kernels``), 21, 31 and 56. The embedded
target, 17 MB that the processor's cache holds anyway, gains nothing: 0.8, 1.0 and 1.7 ms.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp

from .. import kernels
from ..kernels.quantized import is_quantized, sliceable

SCHEMES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
# small tables that are looked up, not multiplied; routers, whose few rows decide much; small
# weights that are used in parts; vectors, which are in no product
KEPT = (
    r"(.*\.)?(position_embedding|relative_bias)|.*\.(router|kv_b)\.weight|encoder\.conv\d\.weight"
)


def check_scheme(scheme: str | None) -> None:
    """Raises before anything is read.

    Raises:
      ValueError: an unknown scheme, qwix is not installed, or the backend lacks the type.
    """
    if scheme is None:
        return
    if scheme not in SCHEMES:
        raise ValueError(
            f"quantize={scheme!r} is unknown; accepted: {', '.join(SCHEMES)}, None (as stored)"
        )
    try:
        import qwix  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            f"quantize={scheme!r} needs qwix, which is not installed: pip install "
            "'specjax[quantize]'"
        ) from None
    if not computes(SCHEMES[scheme]):
        raise ValueError(
            f"quantize={scheme!r}: {kernels.platform()} devices cannot convert "
            f"{jnp.dtype(SCHEMES[scheme]).name}; use quantize='int8'"
        )


@functools.cache
def computes(dtype) -> bool:
    """Whether the devices in use can convert ``dtype`` to float32."""
    try:
        jax.jit(lambda x: x.astype(jnp.float32)).lower(jax.ShapeDtypeStruct((8,), dtype)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def encode(name: str, weight: jax.Array, scheme: str, dtype):
    """Quantizes the parameter ``name`` (a dotted path) if it is a matrix that is multiplied.

    Returns:
      A ``QArray`` for such a matrix or a stack of them; else ``weight`` in ``dtype``.

    Raises:
      ValueError: ``weight`` is quantized already.
    """
    if is_quantized(weight):
        raise ValueError(
            f"quantize={scheme!r}: {name} is quantized already ({weight.qvalue.dtype}); quantize "
            "the original weights, once"
        )
    if weight.ndim < 2 or re.fullmatch(KEPT, name):
        return weight.astype(dtype)
    return _encoded(weight, scheme)


@functools.partial(jax.jit, static_argnames="scheme")
def _encoded(weight, scheme):
    import qwix

    outputs = tuple(range(weight.ndim - 1))  # of each expert, in a stack
    return qwix.quantize(weight, SCHEMES[scheme], channelwise_axes=outputs, scale_dtype=jnp.float32)


def take(table, index: jax.Array, dtype) -> jax.Array:
    """Rows ``index [n]`` of an embedding ``[V, H]``, quantized or not: ``[n, H]`` in ``dtype``."""
    if not is_quantized(table):
        return table[index]
    bits, numbers = sliceable(table.qvalue)
    return (numbers(bits[index]).astype(jnp.float32) * table.scale[index]).astype(dtype)


def shape(weight) -> tuple[int, ...]:
    """The shape of a weight, quantized or not."""
    return weight.qvalue.shape if is_quantized(weight) else weight.shape


def floats(weight, dtype) -> jax.Array:
    """The weight in ``dtype``; a quantized one is multiplied by its scales."""
    if not is_quantized(weight):
        return weight
    return (weight.qvalue.astype(jnp.float32) * weight.scale).astype(dtype)


def rows(weight, index: jax.Array):
    """Entries ``index`` of a weight's first dimension, quantized as it is."""
    return jax.tree.map(lambda x: x[index], weight)


def dot_rows(stack, index, row, size: int, x: jax.Array) -> jax.Array:
    """``stack[index, row : row + size] @ x`` of a stack ``[X, out, in]``, quantized or not."""

    def cut(array):
        return jax.lax.dynamic_slice(array, (index, row, 0), (1, size, array.shape[2]))[0]

    if not is_quantized(stack):
        return jnp.dot(cut(stack), x)
    bits, numbers = sliceable(stack.qvalue)
    y = jnp.dot(numbers(cut(bits)).astype(x.dtype), x, preferred_element_type=jnp.float32)
    return (y * cut(stack.scale)).astype(x.dtype)
