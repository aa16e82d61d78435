"""Rounds that draft nothing, for heads that read hidden states of the target.

A head with ``lag`` keeps what such a round commits as *pending*, written in place, and reads it
when it drafts again or when no room is left: a round without a draft then costs little more than a
plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._internal.ordering import after
from ..types import PyTree, Segment

LAG = 128  # tokens for which ``Adaptive`` asks; a longer rest is interrupted to read them
CHUNK = 16  # pending tokens that are read in one pass


def is_rest(segment: Segment) -> bool:
    """Whether a segment comes from a round without a draft, which commits one token at most."""
    return segment.round is not None and segment.round[0].num_nodes == 1


def append(pending: PyTree, new: PyTree, count: jax.Array, some: jax.Array) -> PyTree:
    """Writes one more pending token in place.

    Args:
      pending: arrays ``[B, P, ...]``.
      new: for each array ``[B, ...]``.
      count: int32 ``[B]``, the tokens that are pending already, fewer than P.
      some: bool ``[B]``, the rows that have a new one.
    """
    rows = jnp.arange(len(count))

    def put(old, one):
        where = jnp.where(some, count, old.shape[1])
        return old.at[rows, where].set(one.astype(old.dtype), mode="drop")

    return jax.tree.map(put, pending, new)


def columns(pending: PyTree, first: jax.Array, num: int) -> PyTree:
    """The columns ``first`` int32 ``[B]`` and on of arrays ``[B, P, ...]``, the last one beyond the
    end: ``[B, num, ...]``."""
    where = first[:, None] + jnp.arange(num)
    return jax.tree.map(lambda x: take(x, where), pending)


def take(x: jax.Array, where: jax.Array) -> jax.Array:
    """``x[b, where[b, i]]``, the last one beyond the end."""
    index = where.reshape(where.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def read_by_chunks(
    read: Callable[..., PyTree],
    state: PyTree,
    pending: PyTree,
    count: jax.Array,
    *,
    chunk: int,
    overlap: int = 0,
) -> tuple[PyTree, jax.Array]:
    """Reads pending tokens, several a pass; no pass where no row has any.

    Args:
      read: ``read(state, tokens, offset, num) -> state`` reads the first ``num`` int32 ``[B]`` of a
        chunk of ``pending``, the one that begins with column ``offset``.
      state: a pytree, such as the cache into which is read.
      pending: arrays ``[B, P, ...]``.
      count: int32 ``[B]``, how many are read of each row.
      chunk: the tokens of a pass.
      overlap: by how many tokens chunks overlap.

    Returns:
      the state, and ``count``, which is known after all is read: what is written into ``pending``
      by it is written in place.
    """
    size = min(chunk, jax.tree.leaves(pending)[0].shape[1])

    def step(carry):
        offset, state = carry
        rows = jnp.broadcast_to(offset, count.shape)
        num = jnp.clip(count - offset, 0, size)
        state = read(state, columns(pending, rows, size), offset, num)
        return offset + size - overlap, state

    def going(carry):
        read_again = jnp.where(carry[0] > 0, overlap, 0)
        return jnp.any(count > carry[0] + read_again)

    offset, state = jax.lax.while_loop(going, step, (jnp.int32(0), state))
    return state, after(count, jnp.broadcast_to(offset, count.shape))


def first_column(segment: Segment, fields: tuple[str, ...]) -> tuple[Any, ...]:
    """What some ``fields`` of a segment, ``[B, T, ...]``, hold for its first token, ``[B, ...]``:
    nothing else is in a segment of a round without a draft."""
    return tuple(getattr(segment, name)[:, 0] for name in fields)
