"""Where the laws of a drafter are unsure, which ends a draft early; see ``types.Confidence``."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..types import Context


def most_probable(logits: jax.Array) -> jax.Array:
    """The greatest probability of a softmax, float32 ``[...]`` for logits ``[..., V]``."""
    top = jnp.max(logits, axis=-1)
    return jnp.exp(top - jax.nn.logsumexp(logits, axis=-1)).astype(jnp.float32)


class ConfidenceThreshold(NamedTuple):
    """A threshold for the greatest probabilities; see ``specjax.types.Confidence``.

    Attributes:
      least: a float, or float32 ``[B, 1]`` by row.
      along: ``"token"`` or ``"path"``.
      keeps_last: whether the children of the node that falls below it are still drafted.
    """

    least: float | jax.Array
    along: str
    keeps_last: bool


def thresholds(context: Context, least: jax.Array | None = None) -> tuple[ConfidenceThreshold, ...]:
    """The thresholds of a round.

    Args:
      context: whose ``confidence`` is one, where it is not None.
      least: float32 ``[B]``, another one, for the product along the path, which keeps the last
        children; None: there is none.
    """
    found = [] if least is None else [ConfidenceThreshold(least[:, None], "path", True)]
    if context.confidence is not None:
        sure = context.confidence
        found.append(ConfidenceThreshold(sure.least, sure.along, sure.keeps_last))
    return tuple(found)


def is_sure(
    ends: tuple[ConfidenceThreshold, ...], logits: jax.Array, path: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares the laws of some nodes with thresholds.

    Args:
      ends: at least one threshold.
      logits: float32 ``[B, W, V]``, or ``[B, 1, V]`` for all W nodes, about the children.
      path: float32 ``[B, W]``, the product of the greatest probabilities above each node.

    Returns:
      bool ``[B, W]``, nodes that fall below no threshold; bool ``[B, W]``, nodes whose children are
      drafted; and the product with that of the node itself.
    """
    top = jnp.broadcast_to(most_probable(logits), path.shape)
    path = path * top
    sure, kept = jnp.ones(path.shape, bool), jnp.ones(path.shape, bool)
    for end in ends:
        here = (path if end.along == "path" else top) >= end.least
        sure &= here
        kept &= here | end.keeps_last
    return sure, kept, path
