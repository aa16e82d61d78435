"""The bias that relative distances add to the scores of T5's attention."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ... import kernels, sharding
from ...sharding import DATA
from .config import EncoderDecoderConfig


@functools.cache
def buckets(num: int, farthest: int, both_ways: bool) -> np.ndarray:
    """Returns the bucket of each distance ``0 ... farthest``, int32; greater ones share the last.

    Half of the buckets hold single distances, the others ranges that grow exponentially. Edges of
    ranges are rounded as in PyTorch, because distances that are powers of two lie on them.

    Args:
      num: the number of buckets.
      farthest: the greatest distance with a bucket of its own.
      both_ways: whether half of ``num`` is for earlier positions and the other half (added by
        ``bias_of``) for later ones; False: all buckets are for earlier positions.
    """
    num = num // 2 if both_ways else num
    near = num // 2
    distance = np.arange(farthest + 1)
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(near))
    steps = ratio / np.float32(math.log(farthest / near)) * np.float32(num - near)
    far = np.minimum(near + steps.astype(np.int32), num - 1)
    return np.where(distance < near, distance, far).astype(np.int32)


def bias_of(table, config: EncoderDecoderConfig, distance, both_ways: bool) -> jax.Array:
    """Returns the bias on the score of a distance, float32 ``[heads, *distance.shape]``.

    Args:
      table: ``[num_buckets, heads]``.
      config: the shape of the model.
      distance: int32, the position of the query less that of the key.
      both_ways: True in the encoder, whose positions see later ones, too.
    """
    known = buckets(config.num_buckets, config.max_distance, both_ways)
    by_distance = table.astype(jnp.float32).T[:, known]
    if both_ways:
        ahead = table.astype(jnp.float32).T[:, known + config.num_buckets // 2]
        by_distance = jnp.concatenate([ahead[:, :0:-1], by_distance], axis=1)
    low = -config.max_distance if both_ways else 0
    return jnp.take(by_distance, jnp.clip(distance, low, config.max_distance) - low, axis=1)


def spread_bias(table, config: EncoderDecoderConfig, positions, keys, axis, both_ways: bool):
    """Returns the bias that ``attend`` adds to scores, sharded over the mesh in use.

    Args:
      table: ``[num_buckets, heads]``.
      config: the shape of the model.
      positions, keys: int32 ``[B or 1, N]`` and ``[B or 1, M]``.
      axis: the axis of the mesh over which heads are spread, or None.
      both_ways: True in the encoder. Each layer of the encoder computes this bias again, because
        it is large (``[S, S]`` for each head); the layers of the decoder share it.

    Returns:
      float32 ``[B or 1, K, 1, N, M]``.
    """

    def own(table, positions, keys):
        distance = positions[:, :, None] - keys[:, None]
        bias = bias_of(table, config, distance, both_ways)
        if not both_ways:
            bias = kernels.current().materialize(bias)
        return bias.swapaxes(0, 1)[:, :, None]

    batch = max(len(positions), len(keys))
    specs = [(DATA,) if len(x) == batch > 1 else () for x in (positions, keys)]
    rows = DATA if batch > 1 else None
    return sharding.locally(own, [(None, axis), *specs], (rows, axis))(table, positions, keys)
