"""Noise that drafters and an acceptance rule share: a token is a function of its law and of it.

With independent exponential variables ``E_x``, the token ``x`` with the least ``E_x / p(x)`` has
the law p (the Gumbel-max trick). A drafter that takes the least ``E_x / q(x)`` with the same ``E``
takes the same token as often as no shared randomness beats in the worst case.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass, static
from . import drawing

LARGEST = 1 - 2.0**-24  # the greatest uniform below 1 in float32


@pytree_dataclass
class Noise:
    """Exponential variables by row, absolute position, path and token; and by nothing else.

    Attributes:
      keys: random keys ``[B]``, one for a row and all of its rounds.
      by_path: whether each path from the root to a leaf of a draft has variables of its own.
    """

    keys: jax.Array
    by_path: bool = static(default=False)

    def at(self, position: jax.Array, vocab: int, path: jax.typing.ArrayLike = 0) -> jax.Array:
        """Returns float32 ``[B, V]``, above 0, for the tokens at ``position`` int32 ``[B]``.

        Small values keep their relative precision, since the least of many decides: the uniforms
        are of 32 bits, of which none is 0.
        """

        def row(key, position):
            key = jax.random.fold_in(jax.random.fold_in(key, position), path)
            return jax.random.bits(key, (vocab,), jnp.uint32)

        bits = jax.vmap(row)(self.keys, position).astype(jnp.float32)
        return -jnp.log1p(-jnp.minimum((bits + 0.5) * 2.0**-32, LARGEST))

    def least_of(self, position: jax.Array, vocab: int, paths: jax.Array) -> jax.Array:
        """The least variables over ``paths`` bool ``[B, K]``, of which at least one is True."""

        def step(path, found):
            here = self.at(position, vocab, path)
            return jnp.where(paths[:, path, None], jnp.minimum(found, here), found)

        nothing = jnp.full((len(position), vocab), jnp.inf)
        return jax.lax.fori_loop(0, paths.shape[1], step, nothing)


def least(weights: jax.Array, noise: jax.Array) -> jax.Array:
    """The token with the least ``noise / weights`` over the last axis, int32; -1 where no weight is
    above 0. Its law is that of the weights."""
    return drawing.argmax(jnp.where(weights > 0, weights / noise, -jnp.inf))
