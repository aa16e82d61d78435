"""Noise that drafters and an acceptance rule share: the noise and the law determine a token.

With independent exponential variables ``E_x``, the token ``x`` with the least ``E_x / p(x)`` has
the law p (the Gumbel-max trick). A drafter that takes the token with the least ``E_x / q(x)`` for
the same ``E`` takes the same token with a probability that, in the worst case over p and q, no
other shared randomness exceeds.

References: Daliri, Musco and Suresh, arXiv 2408.07978.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass, static
from . import drawing

LARGEST = 1 - 2.0**-24  # the greatest uniform below 1 in float32


@pytree_dataclass
class Noise:
    """Exponential variables that depend on row, absolute position, path and token alone.

    Attributes:
      keys: random keys ``[B]``, one for each row, the same in all of its rounds.
      by_path: whether each path from the root to a leaf of a draft has variables of its own.
    """

    keys: jax.Array
    by_path: bool = static(default=False)

    def at(self, position: jax.Array, vocab: int, path: jax.typing.ArrayLike = 0) -> jax.Array:
        """Returns the exponential variables of all tokens at one position.

        The underlying uniforms have 32 bits and are never 0, so that small values, which decide
        the least of many, keep their relative precision.

        Args:
          position: int32 ``[B]``, the absolute position of the token.
          vocab: V, the size of the vocabulary.
          path: the number of the path from the root to a leaf, counted from 0.

        Returns:
          float32 ``[B, V]``, above 0.
        """

        def row(key, position):
            key = jax.random.fold_in(jax.random.fold_in(key, position), path)
            return jax.random.bits(key, (vocab,), jnp.uint32)

        bits = jax.vmap(row)(self.keys, position).astype(jnp.float32)
        return -jnp.log1p(-jnp.minimum((bits + 0.5) * 2.0**-32, LARGEST))

    def least_of(self, position: jax.Array, vocab: int, paths: jax.Array) -> jax.Array:
        """Returns the least variable of each token over several paths.

        Args:
          position: int32 ``[B]``, the absolute position of the token.
          vocab: V, the size of the vocabulary.
          paths: bool ``[B, K]``, the paths; at least one is True.

        Returns:
          float32 ``[B, V]``, above 0.
        """

        def step(path, found):
            here = self.at(position, vocab, path)
            return jnp.where(paths[:, path, None], jnp.minimum(found, here), found)

        nothing = jnp.full((len(position), vocab), jnp.inf)
        return jax.lax.fori_loop(0, paths.shape[1], step, nothing)


def least(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """Returns the token with the least ``noise / weights``; its law is the normalized weights.

    Args:
      weights: float32 ``[..., V]``, at least 0.
      noise: float32 ``[..., V]``, exponential variables, see ``Noise.at``.

    Returns:
      int32 ``[...]``; -1 where no weight is above 0.
    """
    return drawing.argmax(jnp.where(weights > 0, weights / noise, -jnp.inf))
