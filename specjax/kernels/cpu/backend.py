"""The library in C++ as a backend: what it is made for goes to it, all else to XLA."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp

from .. import attention, quantized
from ..xla_cpu import XlaCpuBackend
from . import calls, library

log = logging.getLogger("specjax")

MOST_COLUMNS_NORMED = 512  # beyond, XLA uses several threads
_KINDS = {jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.bfloat16)}  # of activations


class CpuBackend(XlaCpuBackend):
    """Products, attention, norms and argmax by the library in C++, where shapes suit it.

    With activations in float32, weights may be float32, bfloat16, or of eight or four bits; with
    activations in bfloat16, weights are bfloat16.
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
        plain = prefix is not None and not any(
            special.get(name) is not None for name in ("window", "softcap", "bias")
        )
        kinds = {x.dtype for x in (query, key, value, *(prefix or ()))}
        if prefix is None or not plain or kinds not in _KINDS:
            return super().attend(query, key, value, own_mask, prefix, length, choice, **special)

        def by_xla(query, keys, values, key, value, own_mask, length):
            index = attention.choice_of(keys.shape[2], length)
            return super(CpuBackend, self).attend(
                query, key, value, own_mask, (keys, values), length, index
            )

        return calls.attend(query, *prefix, key, value, own_mask, length, by_xla)

    def norm(self, x, weight, bias=None, *, eps, centered=False, plus_one=False):
        arrays = (x, weight) if bias is None else (x, weight, bias)
        wide = x.size > MOST_COLUMNS_NORMED * len(x) and not fixed_bits()
        if wide or {array.dtype for array in arrays} not in _KINDS:
            return super().norm(x, weight, bias, eps=eps, centered=centered, plus_one=plus_one)
        return calls.norm(x, weight, bias, eps, centered, plus_one, super().norm)

    def argmax(self, x):
        return calls.argmax(x) if x.dtype == jnp.float32 else super().argmax(x)

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


def _call_for(weights, x):
    """The call of the library that is made for such products, or None."""
    half = x.dtype == jnp.bfloat16
    most = calls.MOST_TILE_COLUMNS if half and library.has_tiles() else calls.MOST_COLUMNS
    if {x.dtype} not in _KINDS or x.shape[1] > most and not fixed_bits():
        return None
    if half:
        return calls.half_dots if all(_floats(w) and w.dtype == x.dtype for w in weights) else None
    if all(map(calls.fits, weights)):
        return calls.quantized_dots if _has_quantized() else None
    return calls.dots if all(map(_floats, weights)) else None


@functools.cache
def _has_quantized() -> bool:
    """Loads, or compiles, the kernels for weights in few bits when the first such weight comes."""
    problem = library.register("quantized")
    if problem:
        log.warning("quantized weights have no CPU kernels (decoding will be slower): %s", problem)
    return problem is None


def _floats(weight) -> bool:
    if quantized.is_quantized(weight) or weight.ndim != 2:
        return False
    return weight.dtype in (jnp.float32, jnp.bfloat16)


def cast_exact_bf16(params: dict) -> dict:
    """float32 weights of products, in bfloat16 where that holds exactly the same numbers.

    All weights stay as they are if nothing else would be float32: what drafts would then compute
    in bfloat16.
    """

    def cast(path, x):
        if x.ndim != 2 or path[-1].key != "weight" or x.dtype != jnp.float32:
            return x
        narrow = x.astype(jnp.bfloat16)
        return narrow if jnp.array_equal(narrow.astype(x.dtype), x) else x

    found = jax.tree_util.tree_map_with_path(cast, params)
    return found if any(x.dtype == jnp.float32 for x in jax.tree.leaves(found)) else params
