"""The key/value cache, which ``commit`` alone writes.

A cache holds two arrays for each layer, keys and values (or one array that serves as both), each
``[B, K, S, E]``: rows, key/value heads, slots, features of a head. Slot ``i`` of a row holds the
entry of the row's token ``i``. Entries are never shifted or erased: the length of a row says how
many slots are valid, and later writes overwrite the other slots.

A layer with a sliding window may have a *ring* instead: the entry of token ``i`` lies in slot
``i mod S``, so that the entries of the last S tokens are kept. The length of a row says which token
each slot holds. A ring may come after *sinks*: the first A slots keep the entries of the first A
tokens for good, and that of a later token ``i`` lies in slot ``A + (i - A) mod (S - A)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import kernels
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


def slots_of(
    position: jax.Array, following: jax.Array, slots: int, ring: bool, sinks: int = 0
) -> jax.Array:
    """Returns the slots int32 ``[B, T]`` to which entries are written.

    No slot is returned twice, because a scatter with two entries for one slot may keep either.

    Args:
      position: int32 ``[B, T]``, the positions of the entries.
      following: int32, the number of entries that follow each of them.
      slots: S, the number of slots; it is also the result for entries that are not kept.
      ring: whether the slots are a ring.
      sinks: A, the slots before the ring.
    """
    kept = (following >= 0) & (position >= 0)
    if ring:
        size, first = slots - sinks, position < sinks
        kept &= first | (following < size)
        position = jnp.where(first, position, sinks + (position - sinks) % size)
    return jnp.where(kept, position, slots)


def held(slots: int, length: jax.Array, sinks: int) -> jax.Array:
    """Returns the position that each slot of a ring after sinks holds, int32 ``[B, slots]``.

    Args:
      length: int32 ``[B]``, the number of committed tokens. A slot that holds none yet has its own
        number, which is at least the length.
      sinks: A, the slots before the ring.
    """
    slot, newest = jnp.arange(slots, dtype=jnp.int32), length[:, None] - 1
    last = newest - (newest - slot) % (slots - sinks)
    return jnp.where((slot < sinks) | (last < slot), slot, last)


def recent(
    cache: PyTree,
    length: jax.Array,
    budgets: Sequence[tuple[int, int] | None],
    chosen: Sequence[jax.Array | None] | None = None,
) -> PyTree:
    """Returns the entries of the first and of the last tokens, in the slots of a ring after sinks.

    Args:
      cache: leaves ``[B, K, S, E]``, in whose slot ``i`` is the entry of token ``i``.
      length: int32 ``[B]``, the number of committed tokens.
      budgets: for each layer its window and A, the number of sinks; None: the layer stays as it is.
      chosen: for each layer int32 ``[B, K, R]`` or None, positions of tokens that stand in place of
        the last R of A sinks, in rows with more tokens than ``A + window``; None: there are none.

    Returns:
      leaves ``[B, K, A + window, E]`` of layers that have more slots; the others as they are.
    """

    def take(slots, budget, places):
        if budget is None or slots.shape[2] <= sum(budget):
            return slots
        where = held(sum(budget), length, budget[1])[:, None]
        if places is not None:
            batch, heads, count = places.shape
            where = jnp.broadcast_to(where, (batch, heads, where.shape[2]))
            first, instead, ring = jnp.split(where, (budget[1] - count, budget[1]), axis=2)
            instead = jnp.where((length > sum(budget))[:, None, None], places, instead)
            where = jnp.concatenate([first, instead, ring], axis=2)
        return jnp.take_along_axis(slots, where[..., None], axis=2, mode="clip")

    layers = zip(cache, budgets, chosen or [None] * len(cache), strict=True)
    return tuple(tuple(take(slots, *given) for slots in layer) for layer, *given in layers)


def commit(
    cache: PyTree,
    entries: PyTree,
    start: jax.Array,
    verdict: Verdict,
    rings: Sequence[bool] | None = None,
    sinks: Sequence[int] | None = None,
) -> PyTree:
    """Writes the entries of the accepted path into the cache.

    Args:
      cache: leaves ``[B, K, S, E]``.
      entries: leaves ``[B, K, N, E]``, one entry for each node; with ``rings``, None for a layer
        that stays as it is.
      start: int32 ``[B]``, the position of the root.
      verdict: the entries of nodes ``path[:, :count + 1]`` are written to positions ``start,
        start + 1, ...``. Rows with ``count = -1`` and positions outside of the capacity are not
        written.
      rings: whether the slots of ``cache[i]`` are a ring, for each layer; None: no layer has a
        ring. If a ring has fewer slots than there are entries, the last entries are kept.
      sinks: the number of slots before the ring of each layer; None: no layer has any.

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
    following = after(verdict.count, jax.tree.leaves(entries)[-1][:, 0, -1])[:, None] - steps
    plain, layers = rings is None, [(cache, entries, (False, 0))]
    if rings is not None:
        kinds = zip(rings, sinks or [0] * len(cache), strict=True)
        layers = zip(cache, entries, kinds, strict=True)
    written, alike = [], {}  # the caches that are written; their numbers by equal slots
    for slots, new, kind in layers:
        own = [] if new is None else zip(jax.tree.leaves(slots), jax.tree.leaves(new), strict=True)
        for x, fresh in own:
            if fresh.shape[2] < len(steps):
                raise ValueError(
                    f"kv_cache.commit: the entries are those of {fresh.shape[2]} nodes, and a path "
                    f"has up to {len(steps)}: verify returns the entries of all nodes of the "
                    "draft, those of its argument entries first"
                )
            alike.setdefault((x.shape[2], *kind), []).append(len(written))
            written.append((x, fresh.astype(x.dtype)))
    for (capacity, *kind), numbers in alike.items():
        where = slots_of(position, following, capacity, *kind)
        given = zip(*[written[i] for i in numbers], strict=True)
        made = kernels.current().write(*given, verdict.path, where)
        for i, x in zip(numbers, made, strict=True):
            written[i] = x
    found = iter(written)
    if plain:
        return jax.tree.map(lambda x: next(found), cache)
    return tuple(
        slots if new is None else jax.tree.map(lambda x: next(found), slots)
        for slots, new in zip(cache, entries, strict=True)
    )
