"""Entries of a key/value cache in eight bits.

    int8:  code = round(x / scale),  scale = max |x| / 127   over the features of a head
    fp8:   code = x rounded to float8 e4m3 (3 bits of mantissa, at most 448), without a scale

An entry is encoded once, when its pass computes it, and every token that sees it, in the same draft
too, sees what the code stands for. So what a model computes follows from the text alone, and not
from the rounds in which it was committed. Attention multiplies the codes as they are and scales the
scores, or the shares, of a whole slot: no decoded copy of a cache is stored.

The codes of fp8 are stored as the bytes that they are, because compilers widen whole buffers of
float8 where a part of them is written.

Lossless: as a drafter, yes: the draft states the law of the model with this cache, from which it
was drawn. As a target the model is approximate, and every result says so.

References: int8 with a scale for each token and head, as KIVI's values, arXiv 2402.02750; e4m3:
FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..kernels.attention import numbers
from ..types import PyTree
from . import kv_cache
from .config import FP8

MOST_INT8, MOST_FP8 = 127.0, 448.0

Leaves = tuple[jax.Array, ...]


def init(kind: str, slots: Sequence[int], batch: int, heads: int, size: int) -> PyTree:
    """Makes a cache of zeros; the arguments are those of ``kv_cache.init``.

    Returns:
      of each layer codes of keys and values, uint8 or int8 ``[B, K, S, E]``, and with ``int8``
      their scales, float32 ``[B, K, S, 1]``.
    """
    if kind == FP8:
        return kv_cache.init(slots, batch, heads, size, jnp.uint8)
    codes = kv_cache.init(slots, batch, heads, size, jnp.int8)
    scales = kv_cache.init(slots, batch, heads, 1, jnp.float32)
    return tuple(x + scale for x, scale in zip(codes, scales, strict=True))


def encoded(kind: str | None, entries: Leaves) -> Leaves:
    """The leaves that stand for keys and values ``[B, K, M, E]``, each ``[B, K, M, E or 1]``."""
    if kind is None:
        return entries
    if kind == FP8:
        return tuple(_bytes(x) for x in entries)
    pairs = [_codes(x) for x in entries]
    return *(codes for codes, _ in pairs), *(scale for _, scale in pairs)


def decoded(kind: str | None, leaves: Leaves, dtype) -> Leaves:
    """The keys and values that leaves of ``encoded`` stand for."""
    if kind is None:
        return leaves
    found = numbers(leaves[:2], dtype)
    if len(leaves) == 2:
        return found
    return tuple(x * scale.astype(dtype) for x, scale in zip(found, leaves[2:], strict=True))


def _codes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / MOST_INT8
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    return jnp.clip(codes, -MOST_INT8, MOST_INT8).astype(jnp.int8), scale


def _bytes(x: jax.Array) -> jax.Array:
    kept = jnp.clip(x.astype(jnp.float32), -MOST_FP8, MOST_FP8).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(kept, jnp.uint8)
