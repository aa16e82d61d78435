"""The library in C++ as a backend: what it is made for goes to it, all else to XLA."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import attention, interface, prompts, quantized
from ..xla_cpu import PREFILL_CHUNK, XlaCpuBackend, on_mesh
from . import calls, library, quantized_calls

log = logging.getLogger("specjax")

MOST_COLUMNS_NORMED = 512  # beyond, XLA uses several threads
MOST_LIKELIEST = 64  # they are kept in order while a row is read, one by one
# what is said once a process where products are slower than they could be
FEW_BITS_WIDENED = (
    "weights in 8 and 4 bits are widened to floats for each product: this processor, or the "
    "compiler of the kernels, has no AVX-512 VNNI, which would multiply them as bytes, faster in "
    "long passes above all"
)
HALF_WIDENED = (
    "bfloat16 is widened to float32 for each product, which saves reading and no computing: this "
    "processor, or the compiler of the kernels, has neither AMX nor AVX-512 BF16, which would "
    "multiply it as such, faster in passes over several tokens"
)
_FLOAT32, _BFLOAT16, _FLOAT16 = map(jnp.dtype, ("float32", "bfloat16", "float16"))


class CpuBackend(XlaCpuBackend):
    """Products, attention, norms and the choice of tokens by the library in C++, where shapes suit
    it.

    With activations in float32, weights may be float32, bfloat16, or of eight or four bits; with
    activations in bfloat16 or float16, weights are of the same type, or of eight or four bits.
    The latter are multiplied in float32, and each product is rounded once.
    """

    name = "C++"

    def dots(self, weights, x, transpose_out=False):
        """One call for all weights: where these are small, a call costs as much as its product."""
        call = _call_for(weights, x)
        if call is None:
            return tuple(self._one(weight, x, transpose_out) for weight in weights)
        most = calls.MOST_WEIGHTS
        groups = [tuple(weights[i : i + most]) for i in range(0, len(weights), most)]
        return tuple(y for group in groups for y in call(group, x, transpose_out))

    def _one(self, weight, x, transpose_out):
        call = _call_for((weight,), x)
        if call is None:
            return self._dot(weight, x, transpose_out)
        return call((weight,), x, transpose_out)[0]

    def attend(
        self, query, key, value, own_mask, prefix: Any = None, length=None, choice=None, **special
    ):
        rounded = special.pop("rounded", False) or query.dtype == _BFLOAT16
        plain = prefix is not None and not any(
            special.get(name) is not None for name in ("window", "softcap", "bias")
        )
        if prefix is None or not plain or not _takes(query, key, value, *prefix):
            return super().attend(query, key, value, own_mask, prefix, length, choice, **special)

        def by_xla(query, keys, values, key, value, own_mask, length):
            index = attention.choice_of(keys.shape[2], length)
            return super(CpuBackend, self).attend(
                query, key, value, own_mask, (keys, values), length, index
            )

        tiled = bool(rounded and bits_may_move())
        return calls.attend(query, *prefix, key, value, own_mask, length, by_xla, tiled)

    def norm(self, x, weight, bias=None, *, eps, centered=False, plus_one=False):
        arrays = (x, weight) if bias is None else (x, weight, bias)
        tiles = x.dtype == _BFLOAT16 and library.has_tiles()  # norms go with products
        most = calls.MOST_TILE_COLUMNS if tiles else MOST_COLUMNS_NORMED
        wide = x.size > most * len(x) and not fixed_bits()
        if wide or not _takes(*arrays):
            return super().norm(x, weight, bias, eps=eps, centered=centered, plus_one=plus_one)
        return calls.norm(x, weight, bias, eps, centered, plus_one, super().norm)

    def swiglu(self, gate, up):
        """Of any width, so that a column has the same bits beside others."""
        if on_mesh() or not _takes(gate, up):
            return super().swiglu(gate, up)
        return calls.swiglu(gate, up, super().swiglu)

    def swiglu_dots(self, gate, up, x):
        """One call where ``dots`` would call the kernel for floats and few columns: between two
        calls, threads would fetch products from the caches of others."""
        if on_mesh() or _call_for((gate, up), x) is not calls.dots:
            return super().swiglu_dots(gate, up, x)
        return calls.swiglu_dots(gate, up, x, super().swiglu)

    def columns(self, table, index, dtype):
        held = not quantized.is_quantized(table) and table.dtype in (_FLOAT32, _BFLOAT16)
        if held and dtype == _FLOAT32 and index.size <= MOST_COLUMNS_NORMED:
            return calls.columns(table, index)
        return super().columns(table, index, dtype)

    def write(self, slots, entries, path, where):
        """One call for all caches: XLA's loop over single slots takes longer."""
        if on_mesh():
            return super().write(slots, entries, path, where)
        return calls.write(tuple(slots), tuple(entries), path, where, super().write)

    def materialize(self, x):
        """A call, into which nothing is fused."""
        return calls.copy(x)

    def prefill_chunk(self, weights):
        """More tokens where the library multiplies many columns: a column of many costs less."""
        kinds = {w.dtype for w in weights if not quantized.is_quantized(w)}
        floats = _FLOAT32 in kinds and _FLOAT16 not in kinds  # activations are float32
        held = [w for w in weights if quantized.is_quantized(w)]
        fit = all(quantized_calls.fits(w) and quantized_calls.fits_bytes(w) for w in held)
        loaded = not held or fit and _has("quantized", "quantized weights")
        as_bytes = not held or loaded and library.has_byte_dots()
        by_tiles = not held and (floats or kinds == {_BFLOAT16}) and library.has_tiles()
        if by_tiles:
            return interface.PREFILL_CHUNK  # of floats, weights are divided once a chunk
        if as_bytes and (floats or held):
            opened = library.has_tiles() and any(w.bits == 4 for w in held)
            return interface.PREFILL_CHUNK if opened else PREFILL_CHUNK  # opened once a chunk
        return super().prefill_chunk(weights)

    def argmax(self, x):
        return calls.argmax(x) if x.dtype == jnp.float32 else super().argmax(x)

    def likeliest(self, x, count):
        fits = x.dtype == jnp.float32 and count <= MOST_LIKELIEST
        return calls.likeliest(x, count) if fits else super().likeliest(x, count)

    def matrix_dtype(self, stored, dtype):
        """What a checkpoint holds in bfloat16 stays so: half of the bytes are read, and the
        products are those of the same numbers in float32."""
        return stored if (stored, dtype) == (_BFLOAT16, _FLOAT32) else dtype

    def store(self, params):
        """Weights of products in bfloat16 where that holds the same numbers: half of the bytes."""
        return cast_exact_bf16(params)


def fixed_bits() -> bool:
    """Whether ``SPECJAX_BITS=fixed`` asks for results that do not depend on the width of a pass,
    where that costs time: the kernels then take products and norms of any number of columns.

    Raises:
      ValueError: the variable has another value.
    """
    wish = os.environ.get("SPECJAX_BITS", "")
    if wish not in ("", "fixed"):
        raise ValueError(f"SPECJAX_BITS={wish!r}: it must be fixed, or not be set")
    return wish == "fixed"


def bits_may_move() -> bool:
    """Whether results may have other last bits than those of few columns: where a prompt is read,
    without ``fixed_bits``."""
    return prompts.are_read() and not fixed_bits()


def _call_for(weights, x):
    """The call of the library that is made for such products, or None."""
    if not (x.size and _takes(x)):
        return None
    if all(map(quantized_calls.fits, weights)):
        return _call_for_few_bits(weights, x)
    tiles = x.dtype == _BFLOAT16 and library.has_tiles()
    most = calls.MOST_TILE_COLUMNS if tiles else calls.MOST_COLUMNS
    few = x.shape[1] <= most or fixed_bits()
    if x.dtype != _FLOAT32:
        taken = few and all(_floats(w, x.dtype) for w in weights)
        if taken and x.dtype == _BFLOAT16 and not library.has_half_dots():
            _warn(HALF_WIDENED)
        return calls.half_dots if taken else None
    taken = any(all(_floats(w, kind) for w in weights) for kind in (_FLOAT32, _BFLOAT16))
    if not taken:
        return None
    return calls.dots if few else calls.many_dots


def _call_for_few_bits(weights, x):
    """``_call_for`` weights in eight and four bits, whose products are computed in float32."""
    bytes_fit = [quantized_calls.fits_bytes(w) for w in weights]
    few = x.shape[1] <= calls.MOST_COLUMNS or fixed_bits()
    if not (few or all(bytes_fit)) or not _has("quantized", "quantized weights"):
        return None
    if not library.has_byte_dots():
        if any(bytes_fit):
            _warn(FEW_BITS_WIDENED)
        if not few:
            return None
    words = bits_may_move()
    call = quantized_calls.quantized_words if words else quantized_calls.quantized_dots
    return call if x.dtype == _FLOAT32 else functools.partial(_in_float32, call)


def _in_float32(call, weights, x, transpose_out):
    """The products of activations in a narrower type, rounded to it once."""
    made = call(weights, x.astype(_FLOAT32), transpose_out)
    return tuple(y.astype(x.dtype) for y in made)


def _takes(*arrays) -> bool:
    """Whether activations of these types, which must be one, are computed by the library."""
    kinds = {array.dtype for array in arrays}
    for narrow in (_BFLOAT16, _FLOAT16):
        if kinds == {narrow}:
            return _has(narrow.name, f"activations in {narrow.name}")
    return kinds == {_FLOAT32}


@functools.cache
def _has(name: str, what: str) -> bool:
    """Loads, or compiles, the library ``name`` of kernels when the first such array comes."""
    problem = library.register(name)
    if problem:
        log.warning("%s have no CPU kernels (decoding will be slower): %s", what, problem)
    return problem is None


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)


def _floats(weight, *kinds) -> bool:
    """Whether a weight is a matrix of floats of one of these types."""
    return not quantized.is_quantized(weight) and weight.ndim == 2 and weight.dtype in kinds


def cast_exact_bf16(params: dict) -> dict:
    """float32 weights of products, in bfloat16 where that holds exactly the same numbers.

    All weights stay as they are if nothing else would be float32: what drafts would then compute
    in bfloat16.
    """

    def cast(path, x):
        if x.ndim != 2 or path[-1].key != "weight" or x.dtype != jnp.float32:
            return x
        bits = np.asarray(x).view(np.uint16)  # little-endian: the lower half of each comes first
        if bits[:, ::2].any():
            return x
        return jax.device_put(bits[:, 1::2].copy().view(jnp.bfloat16))

    found = jax.tree_util.tree_map_with_path(cast, params)
    return found if any(x.dtype == jnp.float32 for x in jax.tree.leaves(found)) else params
