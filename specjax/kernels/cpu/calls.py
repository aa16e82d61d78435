"""Calls of the library in C++; ``library.register`` must have been successful."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import narrow

MOST_COLUMNS = 32  # that sums along inputs are fast for
MOST_TILE_COLUMNS = 4096  # the same of bfloat16 by tiles (AMX): chunks of 16 prompts
MOST_WEIGHTS = 8  # kMost of the source
_SUFFIXES = {jnp.dtype(name): f"_{name}" for name in ("bfloat16", "float16")} | {
    jnp.dtype("float32"): ""
}  # of the calls for each type of activations


def dot(weight: jax.Array, x: jax.Array, transpose_out: bool = False) -> jax.Array:
    """``dots`` of one weight."""
    return dots((weight,), x, transpose_out)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def dots(weights: tuple, x: jax.Array, transpose_out: bool = False) -> tuple:
    """``weight [out, in] @ x [in, M] -> [out, M]`` of up to 8 weights, float32, in one call.

    Args:
      weights: each ``[out, in]``, all float32, or all bfloat16: half of the bytes, and, to
        rounding, the results of the same numbers in float32. ``out`` may differ.
      x: ``[in, M]``, float32.
      transpose_out: whether the results are ``[M, out]``.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    _check_floats("dots", weights, x)
    return products("specjax_products", weights, weights, x, transpose_out)


def check_shapes(name: str, weights: tuple, x: jax.Array) -> None:
    """Raises ValueError unless ``name`` can multiply ``x`` ``[in, M]`` by as many weights."""
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"{name}: {len(weights)} weights, it takes 1 to {MOST_WEIGHTS}")
    for weight in weights:
        if weight.ndim != 2 or x.ndim != 2 or weight.shape[1] != x.shape[0] or x.shape[1] < 1:
            raise ValueError(f"{name}: weight {weight.shape} and x {x.shape} do not fit")
        if 0 in weight.shape:
            raise ValueError(
                f"{name}: weight {weight.shape} has no {'inputs' if weight.shape[0] else 'rows'}; "
                "it must have one at least"
            )


def _check_floats(name: str, weights: tuple, x: jax.Array) -> None:
    """Raises ValueError unless ``x`` is float32, all weights are that or all bfloat16, and they
    fit."""
    check_shapes(name, weights, x)
    check_types(x=x)
    if any(weight.dtype != jnp.bfloat16 for weight in weights):
        for weight in weights:
            check_types(weight=weight)


def products(call: str, weights: tuple, arrays: Iterable, x, transpose_out, **how) -> tuple:
    """Calls a kernel with the ``arrays`` of all weights."""
    sizes = [(weight.shape[0], x.shape[1]) for weight in weights]
    shapes = [jax.ShapeDtypeStruct(s[::-1] if transpose_out else s, x.dtype) for s in sizes]
    kernel = jax.ffi.ffi_call(call, shapes, vmap_method="sequential")
    return tuple(kernel(x, *arrays, transpose_out=np.bool_(transpose_out), **how))


@dots.defjvp
def _dots_jvp(transpose_out, primals, tangents):
    return _jvp_of(dots, transpose_out, primals, tangents)


def _jvp_of(call, transpose_out, primals, tangents):
    (weights, x), (d_weights, d_x) = primals, tangents
    pairs = zip(weights, d_weights, strict=True)
    changes = [jnp.dot(d_weight, x) + jnp.dot(weight, d_x) for weight, d_weight in pairs]
    return call(weights, x, transpose_out), tuple(y.T if transpose_out else y for y in changes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def many_dots(weights: tuple, x: jax.Array, transpose_out: bool = False) -> tuple:
    """``dots`` where ``x [in, M]`` has many columns, as a prompt has.

    The sums of a column are made in another order, which does not depend on other columns either.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    _check_floats("many_dots", weights, x)
    return products("specjax_many_products", weights, weights, x, transpose_out)


@many_dots.defjvp
def _many_dots_jvp(transpose_out, primals, tangents):
    return _jvp_of(many_dots, transpose_out, primals, tangents)


def half_dots(weights: tuple, x: jax.Array, transpose_out: bool = False) -> tuple:
    """``dots`` of weights and ``x [in, M]`` that are all bfloat16, or all float16: summed in
    float32, and rounded once.

    For bfloat16 the processor's own dot products are used where it has them: tiles (AMX), else
    pairs (AVX-512 BF16); else numbers are widened to float32, as float16 always is. A column of a
    result has the same bits, however many others are computed beside it; which of the three ways
    it is changes last bits of sums.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    check_shapes("half_dots", weights, x)
    kinds = {array.dtype for array in (x, *weights)}
    if kinds not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        named = ", ".join(sorted(map(str, kinds)))
        raise ValueError(f"half_dots: arrays of {named}; all must be bfloat16, or all float16")
    made: Any = _half_dots(weights, x, transpose_out)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _half_dots(weights, x, transpose_out):
    name = f"specjax_products{_SUFFIXES[x.dtype]}"
    return products(name, weights, weights, x, transpose_out)


def _half_dots_forward(weights, x, transpose_out):
    return _half_dots(weights, x, transpose_out), (weights, x)


def _half_dots_backward(transpose_out, kept, slopes):
    weights, x = kept
    turned = [slope.T if transpose_out else slope for slope in slopes]
    pairs = zip(weights, turned, strict=True)
    of_weights, of_x = zip(
        *[narrow.backward("oi,im->om", (w, x), s) for w, s in pairs], strict=True
    )
    return of_weights, sum(of_x[1:], start=of_x[0])


_half_dots.defvjp(_half_dots_forward, _half_dots_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(7, 8))
def attend(
    query, keys, values, own_keys, own_values, own_mask, length, by_xla, tiled=False
) -> jax.Array:
    """Softmax attention over ``length`` slots of a cache and a draft's own entries.

    All are float32, or all are bfloat16 or float16, whose result is computed in float32 and rounded
    once. The result of a node has the same bits, however many others there are and whether the
    entries that it sees are in the cache or the draft's own, unless ``tiled``.

    Args:
      query: ``[B, K, E, G, N]``, not scaled.
      keys, values: ``[B, K, S, E]``.
      own_keys, own_values: ``[B, K, M, E]``.
      own_mask: bool ``[B or 1, M, N]``: node ``n`` sees entry ``m``.
      length: int32 ``[B]``.
      by_xla: a function of these seven by XLA, for derivatives.
      tiled: whether more than 32 nodes, a multiple of 16, may be computed by tiles (AMX), where the
        processor has them: weights are then rounded to bfloat16, and float32 numbers to 16 bits.

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
    floats = dict(keys=keys, values=values, own_keys=own_keys, own_values=own_values)
    check_types(_kind_of(query), query=query, **floats)
    if own_mask.dtype != jnp.bool or length.dtype != jnp.int32:
        raise ValueError(f"attend: own_mask is {own_mask.dtype}, length {length.dtype}")
    query = query.transpose(1, 3, 2, 0, 4)  # [K, G, E, B, N], the layout of a projection
    shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    name = f"specjax_attention{_SUFFIXES[query.dtype]}"
    call = jax.ffi.ffi_call(name, shape, vmap_method="sequential")
    tiles = dict(tiled=np.bool_(tiled))
    out = call(query, keys, values, own_keys, own_values, own_mask, length, **tiles)
    return out.transpose(3, 0, 2, 1, 4)


@attend.defjvp
def _attend_jvp(by_xla, tiled, primals, tangents):
    return jax.jvp(by_xla, primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def norm(x, weight, bias, eps: float, centered: bool, plus_one: bool, by_xla) -> jax.Array:
    """``Backend.norm`` over axis 0, in one call.

    A column has the same bits, however many others there are.

    Args:
      x: ``[F, ...]``, float32, bfloat16 or float16.
      weight, bias: ``[F]``, in the type of ``x``; bias may be None.
      by_xla: ``Backend.norm`` by XLA, for derivatives.
    """
    del by_xla
    bias = jnp.zeros((0,), x.dtype) if bias is None else bias
    check_types(_kind_of(x), x=x, weight=weight, bias=bias)
    if weight.shape != x.shape[:1] or bias.shape not in ((0,), weight.shape):
        raise ValueError(f"norm: weight {weight.shape}, bias {bias.shape}, x {x.shape}: no fit")
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    name = f"specjax_norm{_SUFFIXES[x.dtype]}"
    call = jax.ffi.ffi_call(name, shape, vmap_method="sequential")
    kind = dict(centered=np.bool_(centered), plus_one=np.bool_(plus_one))
    return call(x, weight, bias, eps=np.float32(eps), **kind)


@norm.defjvp
def _norm_jvp(eps, centered, plus_one, by_xla, primals, tangents):
    plain = functools.partial(by_xla, eps=eps, centered=centered, plus_one=plus_one)
    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def swiglu(gate: jax.Array, up: jax.Array, by_xla) -> jax.Array:
    """``Backend.swiglu``, computed in float32 and rounded once.

    Args:
      gate, up: of one shape, float32, bfloat16 or float16.
      by_xla: ``Backend.swiglu`` by XLA, for derivatives.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    check_types(_kind_of(gate), gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {gate.shape} and up {up.shape} do not fit")
    shape = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    name = f"specjax_swiglu{_SUFFIXES[gate.dtype]}"
    return jax.ffi.ffi_call(name, shape, vmap_method="broadcast_all")(gate, up)


@swiglu.defjvp
def _swiglu_jvp(by_xla, primals, tangents):
    return jax.jvp(by_xla, primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def swiglu_dots(gate: jax.Array, up: jax.Array, x: jax.Array, by_xla) -> jax.Array:
    """``swiglu`` of two of ``dots``, with the same bits, in one call.

    Args:
      gate, up: weights ``[out, in]``, both float32 or both bfloat16.
      x: ``[in, M]``, float32.
      by_xla: ``Backend.swiglu`` by XLA, for derivatives.

    Returns:
      ``[out, M]``, float32.

    Raises:
      ValueError: other shapes or types.
    """
    del by_xla
    _check_floats("swiglu_dots", (gate, up), x)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu_dots: gate {gate.shape} and up {up.shape} do not fit")
    shape = jax.ShapeDtypeStruct((len(gate), x.shape[1]), x.dtype)
    call = jax.ffi.ffi_call("specjax_swiglu_products", shape, vmap_method="sequential")
    return call(x, gate, up)


@swiglu_dots.defjvp
def _swiglu_dots_jvp(by_xla, primals, tangents):
    def apart(gate, up, x):
        return swiglu(*dots((gate, up), x), by_xla)

    return jax.jvp(apart, primals, tangents)


def argmax(x: jax.Array) -> jax.Array:
    """The first index of the greatest over the last axis of ``x`` float32, int32; -1 where that is
    not finite, or one of the numbers is NaN.

    Raises:
      ValueError: another type, or no number to choose from.
    """
    check_types(x=x)
    if not (x.ndim and x.shape[-1]):
        raise ValueError(
            f"argmax: x {x.shape} has no numbers over its last axis; give one at least"
        )
    shape = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
    call = jax.ffi.ffi_call("specjax_argmax", shape, vmap_method="broadcast_all")
    return call(jax.lax.stop_gradient(x))


def likeliest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The indices of the ``count`` greatest of ``x`` float32 over its last axis, int32, and the
    logarithms of their probabilities, float32, see ``Backend.likeliest``.

    Raises:
      ValueError: another type.
    """
    check_types(x=x)
    shape = (*x.shape[:-1], count)
    shapes = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_likeliest", shapes, vmap_method="broadcast_all")
    return tuple(call(jax.lax.stop_gradient(x)))


@jax.custom_jvp
def columns(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows ``index`` int32 ``[n]`` of ``table`` ``[V, H]``, float32 or bfloat16, as columns,
    float32 ``[H, n]``. Indices outside of the table are treated as by ``table[index]``.

    Raises:
      ValueError: other types.
    """
    if table.dtype != jnp.bfloat16:
        check_types(table=table)
    shape = jax.ShapeDtypeStruct((table.shape[1], *index.shape), jnp.float32)
    call = jax.ffi.ffi_call("specjax_columns", shape, vmap_method="sequential")
    return call(table, index.astype(jnp.int32))


@columns.defjvp
def _columns_jvp(primals, tangents):
    (table, index), (change, _) = primals, tangents
    return columns(table, index), change[index].astype(jnp.float32).T


@jax.custom_jvp
def copy(x: jax.Array) -> jax.Array:
    """``x``, which nothing is fused into."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    same = dict(vmap_method="broadcast_all", input_output_aliases={0: 0})
    return jax.ffi.ffi_call("specjax_copy", shape, **same)(x)


@copy.defjvp
def _copy_jvp(primals, tangents):
    (x,), (change,) = primals, tangents
    return copy(x), change


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def write(slots: tuple, entries: tuple, path: jax.Array, where: jax.Array, by_xla) -> tuple:
    """``Backend.write``, in one call.

    Args:
      slots, entries, path, where: those of ``Backend.write``.
      by_xla: ``Backend.write`` by XLA, for derivatives.

    Raises:
      ValueError: arrays that do not fit; the kernel itself checks nothing.
    """
    if {path.dtype, where.dtype} != {jnp.dtype(jnp.int32)} or path.shape != where.shape:
        raise ValueError(f"write: path {path.dtype}{path.shape}, where {where.dtype}{where.shape}")
    for cache, new in zip(slots, entries, strict=True):
        sizes = [x.shape[:2] + x.shape[3:] for x in (cache, new)]
        fit = cache.ndim == new.ndim == 4 and sizes[0] == sizes[1] and new.dtype == cache.dtype
        if not fit or len(cache) != len(path):
            raise ValueError(
                f"write: entries {new.dtype}{new.shape} of {len(path)} rows and a cache "
                f"{cache.dtype}{cache.shape} do not fit"
            )
    shapes = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in slots]
    same = {2 + i: i for i in range(len(slots))}
    how: dict[str, Any] = dict(vmap_method="sequential", input_output_aliases=same)
    return tuple(jax.ffi.ffi_call("specjax_write", shapes, **how)(path, where, *slots, *entries))


@write.defjvp
def _write_jvp(by_xla, primals, tangents):
    slots, entries, path, where = primals
    plain = functools.partial(by_xla, path=path, where=where)
    _, changes = jax.jvp(plain, (slots, entries), tangents[:2])
    return write(slots, entries, path, where, by_xla), changes


def _kind_of(x: jax.Array):
    """The type in which all arrays of a call must be, the first of which is ``x``."""
    return x.dtype if x.dtype in _SUFFIXES else jnp.dtype(jnp.float32)


def check_types(kind=jnp.float32, **arrays) -> None:
    for name, array in arrays.items():
        if array.dtype != kind:
            raise ValueError(
                f"{name} is {array.dtype}: the kernels compute in {jnp.dtype(kind).name}"
            )
