"""Where the end of a text occurred before: an index that a compiled loop can keep and ask.

The places of a text stand in the order of the tokens that lead up to them, read backwards. A token
that is appended adds one place and moves no other, and the places whose contexts are most like the
end of the text are the neighbours of its own slot: a binary search finds them all, for every length
of the match at once.

Cost, for a text of n tokens: a search compares ``O(depth log n)`` tokens. New places are merged
``block`` at a time, and compared one by one until then; a merge moves the ``4 L`` bytes of a row
once and compares ``O(block (block + log n) depth)`` tokens, so a token costs ``4 L / block`` bytes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass, static


@pytree_dataclass
class ContextIndex:
    """Places in the order of what leads up to them.

    Attributes:
      order: int32 ``[B, L]``; the first ``count`` of a row are the places ``0 .. count - 1``.
      count: int32 ``[B]``.
      block: static; how many places are merged at once.
    """

    order: jax.Array
    count: jax.Array
    block: int = static()


def empty(batch: int, capacity: int, block: int = 64) -> ContextIndex:
    """The index of no text, for buffers of ``capacity`` tokens."""
    order = jnp.zeros((batch, max(capacity, block)), jnp.int32)
    return ContextIndex(order=order, count=jnp.zeros((batch,), jnp.int32), block=block)


def contexts(tokens: jax.Array, places: jax.Array, depth: int) -> jax.Array:
    """The tokens up to each place, the nearest first.

    Args:
      tokens: int32 ``[R, L]``, R is B or 1: one text for all rows.
      places: int32 ``[B, P]``.

    Returns:
      int32 ``[B, P, depth]``, -1 before the beginning of the text.
    """
    where = places[:, :, None] - jnp.arange(depth, dtype=jnp.int32)
    return jnp.where(where >= 0, look(tokens, jnp.maximum(where, 0)), -1)


def extend(index: ContextIndex, tokens, length, live, depth: int) -> ContextIndex:
    """Merges places into the index until fewer than ``index.block`` of a live row are left out.

    Args:
      tokens: int32 ``[B, L]``, of which ``length`` int32 ``[B]`` are the text.
      live: bool ``[B]``, rows whose index may change.
      depth: how many tokens of a context are compared.
    """

    def lacking(index):
        return live & (length - 1 - index.count >= index.block)

    def merge(index):
        places = index.count[:, None] + jnp.arange(index.block, dtype=jnp.int32)
        merged = _merged(index, tokens, places, depth)
        wanted = lacking(index)
        return dataclasses.replace(
            index,
            order=jnp.where(wanted[:, None], merged, index.order),
            count=jnp.where(wanted, index.count + index.block, index.count),
        )

    return jax.lax.while_loop(lambda index: jnp.any(lacking(index)), merge, index)


def forget(index: ContextIndex, length) -> ContextIndex:
    """Leaves places out that are not before the last of ``length`` int32 ``[B]`` tokens, because
    what followed them was taken back. Where there are none, nothing is moved."""

    def beyond(index):
        return index.count > jnp.maximum(length - 1, 0)

    def drop(index):
        order, size = index.order, index.order.shape[1]
        stays = (order < length[:, None] - 1) & (jnp.arange(size) < index.count[:, None])
        slot = jnp.where(stays, jnp.cumsum(stays, axis=1) - 1, size)
        rows = jnp.arange(order.shape[0])[:, None]
        kept = jnp.zeros_like(order).at[rows, slot].set(order, mode="drop")
        wanted, count = beyond(index), jnp.sum(stays, axis=1, dtype=jnp.int32)
        return dataclasses.replace(
            index,
            order=jnp.where(wanted[:, None], kept, order),
            count=jnp.where(wanted, count, index.count),
        )

    return jax.lax.while_loop(lambda index: jnp.any(beyond(index)), drop, index)


def nearest(index: ContextIndex, tokens, end, length, most: int):
    """The places whose contexts share most tokens with ``end``.

    Args:
      tokens: int32 ``[R, L]``, the indexed text; R is B, or 1 for one text.
      end: int32 ``[B, depth]``, the last token first, -1 before the beginning.
      length: int32 ``[R]``, places before ``length - 1`` count; those that are not indexed yet must
        be fewer than ``index.block``.
      most: how many places are wanted.

    Returns:
      ``(places, matched)`` int32 ``[B, most]``, the longest match first, of equal ones the latest
      place; where fewer occur, ``matched`` is 0. Of more than ``most`` matches of one length any.
    """
    slot = rank(index, tokens, end[:, None])  # [B, 1]
    near = slot + jnp.arange(-most, most, dtype=jnp.int32)
    order, count = index.order, jnp.broadcast_to(index.count[:, None], slot.shape)
    inside = (near >= 0) & (near < count)
    size = order.shape[1]
    sorted_ = look(order, jnp.clip(near, 0, size - 1))
    recent = count + jnp.arange(index.block, dtype=jnp.int32)
    places = jnp.concatenate([sorted_, recent], axis=1)
    last = jnp.broadcast_to(length[:, None] - 1, slot.shape)
    known = jnp.concatenate([inside, recent < last], axis=1)
    places = jnp.minimum(places, tokens.shape[1] - 1)
    same = contexts(tokens, places, end.shape[1]) == end[:, None]
    same &= (end >= 0)[:, None]
    matched = jnp.sum(jnp.cumprod(same, axis=2, dtype=jnp.int32), axis=2)
    matched = jnp.where(known, matched, 0)
    key = jnp.where(matched > 0, matched * tokens.shape[1] + places, 0)
    best, which = jax.lax.top_k(key, most)
    places = jnp.take_along_axis(places, which, axis=1)
    return places, best // tokens.shape[1]


def rank(index: ContextIndex, tokens, wanted: jax.Array) -> jax.Array:
    """int32 ``[B, P]``: how many indexed contexts do not come after ``wanted`` ``[B, P, depth]``.

    A token at a time, nearest first, decides; -1 (no token) comes before all tokens.
    """
    depth, size = wanted.shape[2], index.order.shape[1]
    low = jnp.zeros(wanted.shape[:2], jnp.int32)
    high = jnp.broadcast_to(index.count[:, None], low.shape)

    def halve(bounds):
        low, high = bounds
        middle = (low + high) // 2
        place = look(index.order, jnp.minimum(middle, size - 1))
        after = _before(wanted, contexts(tokens, place, depth))
        open_ = low < high
        return jnp.where(open_ & ~after, middle + 1, low), jnp.where(open_ & after, middle, high)

    return jax.lax.while_loop(lambda b: jnp.any(b[0] < b[1]), halve, (low, high))[0]


def _before(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether ``a`` comes before ``b`` by the first entry of the last axis in which they differ."""
    first = jnp.argmax(a != b, axis=-1)[..., None]
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    a, b = jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape)
    pick = lambda x: jnp.take_along_axis(x, first, axis=-1)[..., 0]  # noqa: E731
    return pick(a) < pick(b)


def _merged(index: ContextIndex, tokens, places, depth) -> jax.Array:
    """``order`` with ``places`` ``[B, block]`` in it, each after its equals."""
    new = contexts(tokens, places, depth)
    old_rank = rank(index, tokens, new)
    before = _before(new[:, None, :, :], new[:, :, None, :])  # [B, u, v]: v before u
    after = _before(new[:, :, None, :], new[:, None, :, :])
    earlier = jnp.arange(index.block)[:, None] > jnp.arange(index.block)
    own_rank = jnp.sum(before | (~after & earlier), axis=2, dtype=jnp.int32)
    rows = jnp.arange(places.shape[0])[:, None]
    slots = jnp.zeros_like(places).at[rows, own_rank].set(old_rank + own_rank)
    slot = jnp.arange(index.order.shape[1], dtype=jnp.int32)
    added = jax.vmap(lambda s: jnp.searchsorted(s, slot, side="right", method="scan_unrolled"))(
        slots
    )
    order = jnp.take_along_axis(index.order, jnp.maximum(slot - added, 0), axis=1)
    return order.at[rows, old_rank + own_rank].set(places, mode="drop")


def look(table: jax.Array, where: jax.Array) -> jax.Array:
    """``table`` ``[R, L]`` at ``where`` ``[B, ...]``; R is B, or 1: one for all rows."""
    if table.shape[0] == 1:
        return table[0][where]
    flat = where.reshape(where.shape[0], -1)
    return jnp.take_along_axis(table, flat, axis=1, mode="clip").reshape(where.shape)
