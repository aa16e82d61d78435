"""Weights in eight or four bits: how they are held, and their products by XLA."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 1 << 20  # weights converted at a time on a CPU: 4 MB of float32, which its cache holds
TILE = 32  # inputs whose values of four bits share 16 bytes; groups are multiples of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight ``[..., out, in]`` of small numbers, with a scale for each group of inputs.

    ``weight[o, i] = scale[o, g] * (value[o, i] - zero[o, g])`` with ``g = i // (in / G)``: the law
    of a quantized model is that of the float32 weights which this formula gives.

    Attributes:
      qvalue: int8 or float8 (e4m3) ``[..., out, in]``; or uint8 ``[..., out, in / 2]``, two
        values of 0 to 15 a byte: of every 32 inputs, byte ``j`` holds input ``j`` in its low and
        ``j + 16`` in its high bits.
      scale: float32 ``[..., out, G]``.
      zero: int8 ``[..., out, G]``, of four bits 0 to 16; None: 0 of eight bits, and 8 of four.
    """

    qvalue: Any
    scale: Any
    zero: Any = None

    def __getitem__(self, index):
        """Entries of the first dimensions, quantized as they are; ``weight[...]`` is the weight."""
        return self if index is Ellipsis else jax.tree.map(lambda x: x[index], self)

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 4 if self.qvalue.dtype == jnp.uint8 else 8

    @property
    def shape(self) -> tuple[int, ...]:
        """``[..., out, in]``."""
        *outer, last = self.qvalue.shape
        return (*outer, last * 8 // self.bits)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.qvalue.ndim

    @property
    def dtype(self):
        """float32: that of the numbers that the weight stands for."""
        return self.scale.dtype


def is_quantized(weight) -> bool:
    """Whether a weight is ``Quantized``, or a ``qwix.QArray`` (fp8), which is not imported here."""
    return hasattr(weight, "qvalue")


def pack(values: jax.Array) -> jax.Array:
    """Values of 0 to 15 ``[..., in]`` as uint8 ``[..., in / 2]``; ``in`` is a multiple of 32."""
    tiles = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, 2, TILE // 2)
    return (tiles[..., 0, :] | tiles[..., 1, :] << 4).reshape(*values.shape[:-1], -1)


def unpack(packed: jax.Array) -> jax.Array:
    """``pack`` undone: int8."""
    tiles = packed.reshape(*packed.shape[:-1], -1, 1, TILE // 2)
    both = jnp.concatenate([tiles & 15, tiles >> 4], axis=-2)
    return both.reshape(*packed.shape[:-1], -1).astype(jnp.int8)


def widen(weight, dtype=jnp.float32) -> jax.Array:
    """The numbers ``[..., out, in]`` that a quantized weight stands for."""
    if not isinstance(weight, Quantized):  # qwix, a scale an output
        return (weight.qvalue.astype(jnp.float32) * weight.scale).astype(dtype)
    values = unpack(weight.qvalue) if weight.bits == 4 else weight.qvalue
    return _scaled(weight, values).astype(dtype)


def _scaled(weight: Quantized, values: jax.Array) -> jax.Array:
    """Float32 numbers of ``values [..., out, n]``, of whose ``n`` every group has as many."""
    zero = weight.zero
    if zero is None:
        zero = jnp.full((1,) * weight.ndim, 8 if weight.bits == 4 else 0, jnp.int8)
    groups = values.reshape(*weight.scale.shape, -1).astype(jnp.float32)
    groups = (groups - zero[..., None].astype(jnp.float32)) * weight.scale[..., None]
    return groups.reshape(values.shape)


def rows(weight, start, size: int):
    """``size`` rows from ``start`` of a weight ``[out, in]``, quantized as it is."""

    def cut(array):
        bits, numbers = sliceable(array)
        return numbers(jax.lax.dynamic_slice_in_dim(bits, start, size))

    return jax.tree.map(cut, weight)


def take(table, index: jax.Array, dtype) -> jax.Array:
    """Rows ``index [n]`` of an embedding ``[V, H]``, quantized or not: ``[n, H]`` in ``dtype``."""
    if not is_quantized(table):
        found = _rows_of_bits(table, index) if table.dtype == jnp.bfloat16 else table[index]
        return found.astype(dtype)

    def picked(array):
        bits, numbers = sliceable(array)
        return numbers(bits[index])

    return widen(jax.tree.map(picked, table), dtype)


@jax.custom_jvp
def _rows_of_bits(table: jax.Array, index: jax.Array) -> jax.Array:
    """``table[index]`` of bfloat16. XLA's CPU backend would take these rows from a float32 copy of
    the whole table; it takes bits as they are, and copies the table as bits unless a barrier keeps
    that from being moved out of a loop."""
    table, index = jax.lax.optimization_barrier((table, index))
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[index], table.dtype)


@_rows_of_bits.defjvp
def _rows_of_bits_jvp(primals, tangents):
    (table, index), (d_table, _) = primals, tangents
    return _rows_of_bits(table, index), d_table[index]


def dot(weight, x: jax.Array, by_blocks: bool) -> jax.Array:
    """``weight [out, in] @ x [in, M] -> [out, M]`` of a quantized weight, in the type of ``x``.

    A weight with one scale an output is converted and its products scaled, which is the same as a
    product with the scaled weight and costs ``M / in`` as much; groups are scaled as they are
    converted. The barrier ties the conversion to ``x``: nothing can move the conversion out of the
    loop, where all weights would stand converted.

    Args:
      by_blocks: convert and multiply blocks of rows, one at a time. XLA's CPU backend fuses no
        conversion into a product and would hold all converted weights of a pass; a block stays in
        the processor's cache, which is also faster than reading float32. (Not on a mesh, where
        rows lie on several devices; ``qwix.dot`` converts the whole weight: three to four times
        slower.)
    """
    weight, x = jax.lax.optimization_barrier((weight, x))
    return (_by_blocks if by_blocks else product)(weight, x).astype(x.dtype)


def product(weight, x: jax.Array) -> jax.Array:
    """``dot`` in float32 without a barrier; only elementwise operations lie between the weight and
    the product, so that compilers can fuse them into it."""
    if weight.scale.shape[1] == 1 and getattr(weight, "zero", None) is None:
        if weight.qvalue.dtype != jnp.uint8:
            return _multiplied(weight.qvalue, x) * weight.scale
    if weight.bits == 8:
        return _multiplied(_scaled(weight, weight.qvalue), x)
    # instead of the weight, x is taken apart into the inputs of the low and of the high bits
    halves = x.reshape(-1, 2, TILE // 2, x.shape[1]).swapaxes(0, 1).reshape(2, -1, x.shape[1])
    low, high = (weight.qvalue & 15), (weight.qvalue >> 4)
    return sum(
        _multiplied(_scaled(weight, values), half)
        for values, half in zip((low, high), halves, strict=True)
    )


def _multiplied(numbers: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.dot(numbers.astype(x.dtype), x, preferred_element_type=jnp.float32)


def _by_blocks(weight, x: jax.Array) -> jax.Array:
    count, columns = weight.qvalue.shape[0], x.shape[0]
    size = min(max(BLOCK // columns, 1), -(-count // 2))

    def block(i, y):
        at = jnp.minimum(i * size, count - size)  # the last one may overlap
        part = product(rows(weight, at, size), x)
        return jax.lax.dynamic_update_slice_in_dim(y, part, at, axis=0)

    start = jnp.zeros((count, x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, -(-count // size), block, start)


def sliceable(values: jax.Array):
    """The array to take slices of, and the function that turns a slice into values again.

    XLA's CPU backend would take a slice of float8 from a float16 copy of the whole: it takes one
    of bytes.
    """
    if values.dtype.itemsize > 1 or jnp.issubdtype(values.dtype, jnp.integer):
        return values, lambda part: part
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return bits, lambda part: jax.lax.bitcast_convert_type(part, values.dtype)
