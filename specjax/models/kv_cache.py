"""The key/value cache, which ``commit`` alone writes.

A cache holds two arrays for each layer, keys and values (or one array that serves as both), each
``[B, K, S, E]``: rows, key/value heads, slots, features of a head. Slot ``i`` of a row holds the
entry of the row's token ``i``. Entries are never shifted or erased: the length of a row says how
many slots are valid, and later writes overwrite the other slots.

A layer with a sliding window may have a *ring* instead: the entry of token ``i`` lies in slot
``i mod S``, so that the entries of the last S tokens are kept. The length of a row says which token
each slot holds.
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
      leaves: the number of arrays of a layer: 2, or 1 where one array is both keys and values
        (``models/mla.py``).

    Returns:
      ``(keys, values)`` for each layer, each ``[B, K, S, E]``.
    """
    shapes = [(batch, heads, num, size) for num in slots]
    return tuple(tuple(jnp.zeros(shape, dtype) for _ in range(leaves)) for shape in shapes)


def slots_of(position: jax.Array, behind: jax.Array, slots: int, ring: bool) -> jax.Array:
    """Returns the slots int32 ``[B, T]`` to which entries are written.

    No slot is returned twice, because a scatter with two entries for one slot may keep either.

    Args:
      position: int32 ``[B, T]``, the positions of the entries.
      behind: int32, the number of entries that follow each of them.
      slots: S, the number of slots; it is also the result for entries that are not kept.
      ring: whether the slots are a ring.
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
      entries: leaves ``[B, K, N, E]``, one entry for each node.
      start: int32 ``[B]``, the position of the root.
      verdict: the entries of nodes ``path[:, :count + 1]`` are written to positions ``start,
        start + 1, ...``. Rows with ``count = -1`` and positions outside of the capacity are not
        written.
      rings: whether the slots of ``cache[i]`` are a ring, for each layer; None: no layer has a
        ring. If a ring has fewer slots than there are entries, the last entries are kept.

    Raises:
      ValueError: while tracing: a path has more nodes than there are entries.

    Returns:
      The cache with the entries; leaves ``[B, K, S, E]``.

    XLA updates a buffer in place only if every read of it is an ancestor of the write. A verdict
    depends on all reads of its round. The verdict of a prompt is known beforehand; there a
    condition on the last entry, which is never true, makes the same order.
    """
    steps = jnp.arange(verdict.path.shape[1])
    position = start[:, None] + steps
    behind = after(verdict.count, jax.tree.leaves(entries)[-1][:, 0, -1])[:, None] - steps
    path = verdict.path[:, None, :, None]

    def write(slots, fresh, ring):
        batch, heads, capacity, size = slots.shape
        if fresh.shape[2] < len(steps):
            raise ValueError(
                f"kv_cache.commit: the entries are those of {fresh.shape[2]} nodes, and a path has "
                f"up to {len(steps)}: verify returns the entries of all nodes of the draft, those "
                "of its argument entries first"
            )
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
