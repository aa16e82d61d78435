"""The key/value cache: every leaf ``[B, K, S, E]``, one pair a layer, one writer.

Slot ``i`` of a row holds the entry of its token ``i``. Nothing is ever shifted or erased: a
row's length says how many slots count, and what lies beyond is overwritten in its time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .types import PyTree, Verdict


def init(layers: int, batch: int, heads: int, capacity: int, size: int, dtype) -> PyTree:
    """Zeros: per layer ``(keys, values)``, each ``[B, K, S, E]``."""
    shape = (batch, heads, capacity, size)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def commit(cache: PyTree, entries: PyTree, start: jax.Array, verdict: Verdict) -> PyTree:
    """Writes the accepted path's entries; the only place where a cache changes.

    Args:
      cache: leaves ``[B, K, S, E]``.
      entries: leaves ``[B, K, N, E]``, one entry a node.
      start: int32 ``[B]``, position of the root.
      verdict: nodes ``path[:, :count + 1]`` go to positions ``start, start + 1, ...``. Rows
        with ``count = -1``, positions below 0 and beyond the capacity are left alone.

    XLA updates a buffer in place only if every read of it is an ancestor of the write. A verdict
    depends on all reads of its round; for prompts, whose verdict is known beforehand, a condition
    on the last entry, which is never true, makes the same order.
    """
    batch, heads, capacity, size = jax.tree.leaves(cache)[0].shape
    steps = verdict.path.shape[1]
    position = start[:, None] + jnp.arange(steps)
    keep = (jnp.arange(steps) <= verdict.count[:, None]) & (position >= 0)
    last = jax.tree.leaves(entries)[-1][:, 0, -1, :1]
    keep &= ~((last != last) & (last == last))
    position = jnp.where(keep, position, capacity)  # beyond the last slot: dropped
    # [B * K, S, E]: with one row and one node, XLA copies a 4-D cache before it scatters
    rows = jnp.arange(batch * heads)[:, None]
    where = jnp.repeat(position, heads, axis=0)
    path = verdict.path[:, None, :, None]

    def write(slots, fresh):
        if fresh.shape[2] > 1:
            fresh = jnp.take_along_axis(fresh, path, axis=2, mode="clip")
        flat = slots.reshape(batch * heads, capacity, size)
        fresh = fresh.reshape(batch * heads, -1, size).astype(slots.dtype)
        return flat.at[rows, where].set(fresh, mode="drop").reshape(slots.shape)

    return jax.tree.map(write, cache, entries)
