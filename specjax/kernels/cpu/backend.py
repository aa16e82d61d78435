"""The library in C++ as a backend: what it is made for goes to it, all else to XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import attention, quantized
from ..xla_cpu import XlaCpuBackend
from . import calls


class CpuBackend(XlaCpuBackend):
    """Products, attention and argmax in float32 by the library in C++, where shapes suit it."""

    name = "C++"

    def dots(self, weights, x, transpose_out=False):
        """One call for all weights: where these are small, a call costs as much as its product."""
        if not all(_suits(weight, x) for weight in weights):
            return tuple(self._one(weight, x, transpose_out) for weight in weights)
        most = calls.MOST_WEIGHTS
        groups = [tuple(weights[i : i + most]) for i in range(0, len(weights), most)]
        return tuple(y for group in groups for y in calls.dots(group, x, transpose_out))

    def _one(self, weight, x, transpose_out):
        if _suits(weight, x):
            return calls.dot(weight, x, transpose_out)
        return self._dot(weight, x, transpose_out)

    def attend(
        self, query, key, value, own_mask, prefix: Any = None, length=None, choice=None, **special
    ):
        plain = prefix is not None and not any(
            special.get(name) is not None for name in ("window", "softcap", "bias")
        )
        if not plain or any(x.dtype != jnp.float32 for x in (query, key, value, *prefix)):
            return super().attend(query, key, value, own_mask, prefix, length, choice, **special)

        def by_xla(query, keys, values, key, value, own_mask, length):
            index = attention.choice_of(keys.shape[2], length)
            return super(CpuBackend, self).attend(
                query, key, value, own_mask, (keys, values), length, index
            )

        return calls.attend(query, *prefix, key, value, own_mask, length, by_xla)

    def argmax(self, x):
        return calls.argmax(x) if x.dtype == jnp.float32 else super().argmax(x)

    def store(self, params):
        """Weights of products in bfloat16 where that holds the same numbers: half of the bytes."""
        return cast_exact_bf16(params)


def _suits(weight, x) -> bool:
    """Whether the library is made for such a product."""
    if quantized.is_quantized(weight) or weight.ndim != 2:
        return False
    fits = x.shape[1] <= calls.MOST_COLUMNS and weight.dtype in (jnp.float32, jnp.bfloat16)
    return fits and x.dtype == jnp.float32


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
