"""The order of reads and writes of one buffer, which XLA derives from the data flow alone."""

import jax
import jax.numpy as jnp


def after(count: jax.Array, x: jax.Array) -> jax.Array:
    """Makes a write that depends on ``count`` wait for the reads that produced ``x``.

    Args:
      count: int32 ``[B]``.
      x: ``[B, ...]``.

    Returns:
      ``count``, unchanged: the condition below is never true, and XLA cannot know that.
    """
    last = x.reshape(x.shape[0], -1)[:, -1]
    return jnp.where((last != last) & (last == last), -1, count)
