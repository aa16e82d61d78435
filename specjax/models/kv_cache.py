"""The key/value cache, which ``commit`` alone writes.

A cache holds two arrays a layer, keys and values (or one array, where it serves as both), each
``[B, K, S, E]``: rows, key/value heads, slots, features of a head. Slot ``i`` of a row holds the
entry of the row's token ``i``. Nothing is ever shifted or erased: the length of a row says how many
slots count, and later writes overwrite the slots after these.

A layer with a sliding window may have a *ring* instead: token ``i`` lies in slot ``i mod S``, so
that the last S tokens are kept. The length of a row says which token each slot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from .._internal.ordering import after
from ..types import PyTree, Verdict


def init(slots: Sequence[int], batch: int, heads: int, size: int, dtype, leaves: int = 2) -> PyTree:
    """Makes a cache of zeros.

    Args:
      slots: S of each layer.
      batch: B, the number of rows.
      heads: K, the number of key/value heads.
      size: E, the features of a head.
      dtype: of the entries.
      leaves: arrays a layer: 2, or 1 where one array is both keys and values (``models/mla.py``).

    Returns:
      for each layer ``(keys, values)``, each ``[B, K, S, E]``.
    """
    shapes = [(batch, heads, num, size) for num in slots]
    return tuple(tuple(jnp.zeros(shape, dtype) for _ in range(leaves)) for shape in shapes)


def slots_of(position: jax.Array, behind: jax.Array, slots: int, ring: bool) -> jax.Array:
    """Where entries at ``position`` int32 ``[B, T]`` go, ``behind`` of them after each; ``slots``,
    which is none, for those that are not kept.

    Every slot is given out once: a scatter that has two entries for one may keep either.
    """
    kept = (behind >= 0) & (position >= 0)
    if ring:
        kept &= behind < slots
        position = position % slots
    return jnp.where(kept, position, slots)


def commit(
    cache: PyTree,
    entries: PyTree,
    start: jax.Array,
    verdict: Verdict,
    rings: Sequence[bool] | None = None,
) -> PyTree:
    """Writes the entries of the accepted path into the cache.

    Args:
      cache: leaves ``[B, K, S, E]``.
      entries: leaves ``[B, K, N, E]``, one entry a node.
      start: int32 ``[B]``, position of the root.
      verdict: nodes ``path[:, :count + 1]`` go to positions ``start, start + 1, ...``. Rows
        with ``count = -1``, positions below 0 and beyond the capacity are left alone.
      rings: for each layer, ``cache[i]``, whether its slots are a ring; None: none is. Of more
        entries than slots the last ones are kept.

    XLA updates a buffer in place only if every read of it is an ancestor of the write. A verdict
    depends on all reads of its round; for prompts, whose verdict is known beforehand, a condition
    on the last entry, which is never true, makes the same order.
    """
    steps = jnp.arange(verdict.path.shape[1])
    position = start[:, None] + steps
    behind = after(verdict.count, jax.tree.leaves(entries)[-1][:, 0, -1])[:, None] - steps
    path = verdict.path[:, None, :, None]

    def write(slots, fresh, ring):
        batch, heads, capacity, size = slots.shape
        where = slots_of(position, behind, capacity, ring)
        # [B * K, S, E]: with one row and one node, XLA copies a 4-D cache before it scatters
        rows, where = jnp.arange(batch * heads)[:, None], jnp.repeat(where, heads, axis=0)
        if fresh.shape[2] > 1:
            fresh = jnp.take_along_axis(fresh, path, axis=2, mode="clip")
        flat = slots.reshape(batch * heads, capacity, size)
        fresh = fresh.reshape(batch * heads, -1, size).astype(slots.dtype)
        return flat.at[rows, where].set(fresh, mode="drop").reshape(slots.shape)

    if rings is None:
        return jax.tree.map(lambda slots, fresh: write(slots, fresh, False), cache, entries)
    layers = zip(cache, entries, rings, strict=True)
    return tuple(jax.tree.map(partial(write, ring=r), slots, new) for slots, new, r in layers)
