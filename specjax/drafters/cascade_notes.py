"""What a ``Cascade`` writes down while the outer model generates its text, and where this ends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..decoding.state import State
from ..types import Context


def thresholds(own: jax.Array | None, context: Context) -> list[tuple[Any, str, bool]]:
    """For each threshold its value, what is compared with it, and whether the token that falls
    below it is still proposed."""
    found: list[tuple[Any, str, bool]] = []
    if own is not None:
        found.append((own[:, None], "path", True))
    if context.confidence is not None:
        sure = context.confidence
        found.append((sure.least, sure.along, sure.keeps_last))
    return found


def noted(notes, context: Context, before: State, after: State, judged, value):
    """Writes ``value(node)`` of the nodes below which an inner round drew tokens to the places of
    these tokens among ``notes`` ``[B, K, ...]``."""
    num, most = after.length - before.length, notes.shape[1]
    rows = jnp.arange(len(num))

    def visit(step, notes):
        said = value(judged.verdict.path[:, step])
        place = before.length - context.length + step
        return notes.at[rows, jnp.where(step < num, place, most)].set(said, mode="drop")

    return jax.lax.fori_loop(0, jnp.max(num), visit, notes)
