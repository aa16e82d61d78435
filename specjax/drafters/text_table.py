"""A bounded table of texts on the device, which requests fill and later requests read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from . import context_index
from .indexed import TextTable

KEPT = 0.75  # of the capacity, when the oldest texts are forgotten
END = -1  # stands after each text, so that no copy runs into the next one


def empty(capacity: int, block: int = 64) -> TextTable:
    """A table for ``capacity`` tokens, without texts."""
    return TextTable(
        tokens=jnp.full((1, capacity), END, jnp.int32),
        length=jnp.zeros((1,), jnp.int32),
        index=context_index.empty(1, capacity, block),
    )


def add(table: TextTable, text: npt.ArrayLike, depth: int) -> TextTable:
    """The table with one more text; where it does not fit, the oldest are forgotten first.

    Of a text that is larger than what a table keeps then, only the end is taken.

    Args:
      text: token ids.
      depth: how many tokens of a context are compared (``IndexedDrafter.longest``).
    """
    capacity = table.tokens.shape[1]
    kept = int(capacity * KEPT)
    ids = np.asarray(text, np.int32)[-max(kept - 1, 0) :]
    if not ids.size:
        return table
    ids = np.append(ids, np.int32(END))
    if int(table.length[0]) + len(ids) > capacity:
        table = _forget(table, kept - len(ids), depth)
    width = 1 << (len(ids) - 1).bit_length()  # programs for a few sizes
    padded = np.full((1, width), END, np.int32)
    padded[0, : len(ids)] = ids
    return _append(table, padded, len(ids), depth)


def texts(table: TextTable) -> list[list[int]]:
    """The texts of a table, the oldest first."""
    tokens = np.asarray(table.tokens[0, : int(table.length[0])])
    parts = np.split(tokens, np.flatnonzero(tokens == END) + 1)
    return [part[:-1].tolist() for part in parts if len(part)]


def _forget(table: TextTable, most: int, depth: int) -> TextTable:
    """The latest texts, of ``most`` tokens at most. The index is made anew: what leads up to a
    place is not what it was."""
    used, capacity = int(table.length[0]), table.tokens.shape[1]
    tokens = np.asarray(table.tokens[0, :used])
    begins = np.flatnonzero(tokens == END) + 1
    cut = int(begins[used - begins <= most][0])
    fresh = empty(capacity, table.index.block)
    if cut == used:
        return fresh
    padded = np.full((1, capacity), END, np.int32)
    padded[0, : used - cut] = tokens[cut:]
    return _append(fresh, padded, used - cut, depth)


@functools.partial(jax.jit, static_argnums=3)
def _append(table: TextTable, tokens, num, depth: int) -> TextTable:
    steps = jnp.arange(tokens.shape[1])
    where = jnp.where(steps < num, table.length[0] + steps, table.tokens.shape[1])
    whole = table.tokens.at[0, where].set(tokens[0], mode="drop")
    length = table.length + num
    live = jnp.ones((1,), bool)
    index = context_index.extend(table.index, whole, length, live, depth)
    return TextTable(tokens=whole, length=length, index=index)
