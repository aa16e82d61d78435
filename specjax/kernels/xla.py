"""XLA's operations as they are: for GPUs and TPUs, and the reference for every other backend."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from . import attention, quantized
from .interface import Backend


class XlaBackend(Backend):
    """XLA's operations, without a detour."""

    name = "XLA"

    def dots(self, weights, x, transpose_out=False):
        return tuple(self._dot(weight, x, transpose_out) for weight in weights)

    def _dot(self, weight, x, transpose_out):
        y = self._plain_dot(weight, x)
        return y.T if transpose_out else y

    def _plain_dot(self, weight, x):
        if quantized.is_quantized(weight):
            return quantized.dot(weight, x, by_blocks=self._quantized_by_blocks())
        return jnp.dot(weight, x)

    def _quantized_by_blocks(self) -> bool:
        return False

    def einsum_float32(self, subscripts, x, y):
        return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)

    def attend(
        self, query, key, value, own_mask, prefix: Any = None, length=None, choice=None, **special
    ):
        special.pop("rounded", None)  # nothing is rounded here
        return attention.attend(
            query, key, value, own_mask, prefix, length, choice, backend=self, **special
        )

    def norm(self, x, weight, bias=None, *, eps, centered=False, plus_one=False):
        shape = (-1,) + (1,) * (x.ndim - 1)
        y = x.astype(jnp.float32)
        if centered:
            y = y - jnp.mean(y, axis=0, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=0, keepdims=True) + eps)
        weight = weight.reshape(shape)
        if plus_one:
            y = (y * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        else:
            y = y.astype(x.dtype) * weight
        return y if bias is None else y + bias.reshape(shape)

    def argmax(self, x):
        """The maximum of every block, the first block that reaches the greatest, the first such
        number in that block: one pass over ``x`` and nothing of its size beside it. (On a CPU
        ``jnp.argmax`` is a scalar loop, ten times slower at 32k.)"""
        size = x.shape[-1]
        # blocks of equal size, since padding would copy x: a vocabulary of prime size is one block
        count = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
        if count == 1:
            best = jnp.max(x, axis=-1, keepdims=True)
            return jnp.where(jnp.isfinite(best)[..., 0], first_true(x == best), -1)
        blocks = x.reshape(*x.shape[:-1], count, size // count)
        tops = jnp.max(blocks, axis=-1)
        best = jnp.max(tops, axis=-1, keepdims=True)
        block = first_true(tops == best)
        inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
        offset = first_true(inside == best)
        return jnp.where(jnp.isfinite(best)[..., 0], block * (size // count) + offset, -1)

    def likeliest(self, x, count):
        index = best_by_blocks(x, count)[1]
        said = jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
        return only_real(index, jnp.take_along_axis(said, jnp.maximum(index, 0), axis=-1))


def only_real(index: jax.Array, said: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns indices and logarithms of probabilities, -1 and -inf where there is none of them."""
    real = (index >= 0) & (said <= 0)  # no NaN
    return jnp.where(real, index, -1), jnp.where(real, said, -jnp.inf)


def best_by_blocks(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ``count`` greatest numbers over the last axis and their indices, in descending
    order; of numbers that are not finite the index is -1."""
    size = x.shape[-1]
    blocks = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    if blocks > count:
        width = size // blocks
        parts = x.reshape(*x.shape[:-1], blocks, width)
        high = jnp.sort(jax.lax.top_k(jnp.max(parts, axis=-1), count)[1], axis=-1)
        inside = jnp.take_along_axis(parts, high[..., None], axis=-2)
        values, where = jax.lax.top_k(inside.reshape(*x.shape[:-1], -1), count)
        index = jnp.take_along_axis(high, where // width, axis=-1) * width + where % width
    else:
        values, index = jax.lax.top_k(x, count)
    return values, jnp.where(jnp.isfinite(values), index, -1).astype(jnp.int32)


def first_true(found: jax.Array) -> jax.Array:
    """int32, the first true position over the last axis; 0 where there is none."""
    size = found.shape[-1]
    first = jnp.min(jnp.where(found, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
    return jnp.where(first == size, 0, first)
