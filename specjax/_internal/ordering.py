"""The order of reads and writes of one buffer, which XLA derives from the data flow alone."""

from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def after(count: jax.Array, x: jax.Array) -> jax.Array:
    """Makes a write that depends on ``count`` wait for the reads that produced ``x``.

    Args:
      count: int32 ``[B]``.
      x: ``[B, ...]``, of integers or floats.

    Returns:
      ``count``, unchanged: the conditions below are never true, and XLA cannot know that.
    """
    last = x.reshape(x.shape[0], -1)[:, -1]
    if jnp.issubdtype(x.dtype, jnp.integer):
        last = last.astype(jnp.int32)
        return jnp.where((last * last) % 4 == 2, -1, count)  # no square is
    return jnp.where((last != last) & (last == last), -1, count)


def after_changes(count: jax.Array, new: PyTree, old: PyTree) -> jax.Array:
    """``after`` of the smallest leaf ``[B, ...]`` of numbers in ``new`` that is none of ``old``.

    Leaves that come from one loop come from it together; a small one costs nothing on a mesh.
    """
    known = {id(leaf) for leaf in jax.tree.leaves(old)}
    changed = [
        leaf
        for leaf in jax.tree.leaves(new)
        if id(leaf) not in known
        and leaf.size
        and leaf.shape[:1] == count.shape
        and jnp.issubdtype(leaf.dtype, jnp.number)
    ]
    return after(count, min(changed, key=lambda leaf: leaf.size)) if changed else count
