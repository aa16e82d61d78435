"""Where the laws of a drafter are unsure, which ends a draft early; see ``types.Confidence``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..types import Confidence


def most_probable(logits: jax.Array) -> jax.Array:
    """The greatest probability of a softmax, float32 ``[...]`` for logits ``[..., V]``."""
    top = jnp.max(logits, axis=-1)
    return jnp.exp(top - jax.nn.logsumexp(logits, axis=-1)).astype(jnp.float32)


def is_sure(
    confidence: Confidence, logits: jax.Array, path: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compares the laws of some nodes with a threshold; see ``specjax.types.Confidence``.

    Args:
      confidence: the threshold.
      logits: float32 ``[B, W, V]``, or ``[B, 1, V]`` for all W nodes, about the children.
      path: float32 ``[B, W]``, the product of the greatest probabilities above each node.

    Returns:
      bool ``[B, W]``, nodes that do not fall below the threshold; and the product with that of the
      node itself.
    """
    top = jnp.broadcast_to(most_probable(logits), path.shape)
    path = path * top
    return (path if confidence.along == "path" else top) >= confidence.least, path
