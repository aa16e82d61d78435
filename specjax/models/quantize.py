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

from .. import sharding

SCHEMES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
# looked up and not multiplied, and small; a few rows that decide all; used in parts, and small; not
# products
KEPT = (
    r"(.*\.)?(position_embedding|relative_bias)|.*\.(router|kv_b)\.weight|encoder\.conv\d\.weight"
)
BLOCK = 1 << 20  # weights converted at a time on CPU: 4 MB of float32, which its cache holds


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
            f"quantize={scheme!r}: the {jax.default_backend()} backend cannot convert "
            f"{jnp.dtype(SCHEMES[scheme]).name}; use quantize='int8'"
        )


@functools.cache
def computes(dtype) -> bool:
    """Whether the default backend compiles the conversion of ``dtype`` to float32."""
    try:
        jax.jit(lambda x: x.astype(jnp.float32)).lower(jax.ShapeDtypeStruct((8,), dtype)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def is_quantized(weight) -> bool:
    """Whether a weight is a ``qwix.QArray``; asks without importing qwix, which takes seconds."""
    return hasattr(weight, "qvalue")


def encode(name: str, weight: jax.Array, scheme: str, dtype):
    """The parameter ``name`` (dotted path): a ``QArray`` if it is a matrix (or a stack of them)
    that is multiplied, else in ``dtype``.

    Raises:
      ValueError: it is quantized already.
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


def dot(weight, x: jax.Array) -> jax.Array:
    """``weight [out, in] @ x [in, M] -> [out, M]`` in the type of ``x``.

    Values are converted, the products scaled, which is the same and costs ``M / in`` as much. The
    barrier ties the conversion to ``x``: nothing can move it out of the loop, where all weights
    would stand converted. XLA's CPU backend fuses no conversion into a product and would still
    hold all converted weights of a pass; there a loop over blocks of rows holds one at a time,
    which is also faster than reading float32 (not on a mesh: rows lie on
    several devices; ``qwix.dot`` converts the whole weight: three to
    four times slower).
    """
    values, x = jax.lax.optimization_barrier((weight.qvalue, x))
    if jax.default_backend() == "cpu" and not sharding.in_use():
        y = _by_blocks(values, x)
    else:
        y = jnp.dot(values.astype(x.dtype), x, preferred_element_type=jnp.float32)
    return (y * weight.scale).astype(x.dtype)


def _by_blocks(values: jax.Array, x: jax.Array) -> jax.Array:
    rows, columns = values.shape
    size = min(max(BLOCK // columns, 1), -(-rows // 2))
    bits, numbers = _pieces_of(values)

    def block(i, y):
        at = jnp.minimum(i * size, rows - size)  # the last one may overlap
        part = numbers(jax.lax.dynamic_slice_in_dim(bits, at, size))
        part = jnp.dot(part.astype(x.dtype), x, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(y, part, at, axis=0)

    return jax.lax.fori_loop(0, -(-rows // size), block, jnp.zeros((rows, x.shape[1]), jnp.float32))


def take(table, index: jax.Array, dtype) -> jax.Array:
    """Rows ``index [n]`` of an embedding ``[V, H]``, quantized or not: ``[n, H]`` in ``dtype``."""
    if not is_quantized(table):
        return table[index]
    bits, numbers = _pieces_of(table.qvalue)
    return (numbers(bits[index]).astype(jnp.float32) * table.scale[index]).astype(dtype)


def shape(weight) -> tuple[int, ...]:
    """Of a weight, quantized or not."""
    return weight.qvalue.shape if is_quantized(weight) else weight.shape


def floats(weight, dtype) -> jax.Array:
    """The weight itself, or what a quantized one stands for."""
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
    bits, numbers = _pieces_of(stack.qvalue)
    y = jnp.dot(numbers(cut(bits)).astype(x.dtype), x, preferred_element_type=jnp.float32)
    return (y * cut(stack.scale)).astype(x.dtype)


def _pieces_of(values: jax.Array):
    """The array to take slices of, and what turns a slice into values again.

    XLA's CPU backend would take a slice of float8 from a float16 copy of the whole: it takes one
    of bytes.
    """
    if values.dtype == jnp.int8:
        return values, lambda part: part
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return bits, lambda part: jax.lax.bitcast_convert_type(part, values.dtype)
