"""The choice of tokens: the greatest numbers of a vocabulary, and draws from weights over it.

Each function makes one pass over the vocabulary in blocks, without a sort or a cumulative sum over
the whole vocabulary. If the vocabulary is split over devices, each device processes its own part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import kernels, sharding
from ..kernels.xla import best_by_blocks, first_true, only_real
from ..sharding import DATA, MODEL


def argmax(x: jax.Array) -> jax.Array:
    """Returns the index of the first maximum of each row.

    The function makes one pass over ``x`` and no copy of it (see ``kernels``). A NaN is either
    ignored or makes the result -1, depending on the backend's own maximum, because replacing NaN
    first would need a copy.

    Args:
      x: float ``[..., V]``.

    Returns:
      int32 ``[...]``; -1 where the maximum is not finite.
    """
    size = x.shape[-1]
    if not sharding.divides(MODEL, size):
        return kernels.current().argmax(x)

    def own(x):
        found = kernels.current().argmax(x)
        tops, found = jax.lax.all_gather((jnp.max(x, axis=-1), found), MODEL, axis=-1)
        best = jnp.max(tops, axis=-1, keepdims=True)
        part = first_true(tops == best)[..., None]
        index = part * x.shape[-1] + jnp.take_along_axis(found, part, axis=-1)
        return jnp.where(jnp.isfinite(best), index, -1)[..., 0]

    rows = _rows_of(x)
    return sharding.locally(own, [(*rows, MODEL)], rows)(x)


def best(x: jax.Array, count: int) -> jax.Array:
    """Returns the indices of the ``count`` greatest numbers of each row, in descending order.

    The ``count`` blocks with the greatest maxima hold all of these numbers, so only these blocks
    are sorted, after one pass over ``x``.

    Args:
      x: float ``[..., V]``.
      count: at least 1.

    Returns:
      int32 ``[..., count]``; among equal numbers the one with the smaller index comes first; -1
      where a number is not finite.

    Raises:
      ValueError: ``count`` is greater than V.
    """
    if count == 1:
        return argmax(x)[..., None]
    _check_count(x, count)
    if not sharding.divides(MODEL, x.shape[-1]) or count > x.shape[-1] // sharding.size(MODEL):
        return best_by_blocks(x, count)[1]

    def own(x):
        values, index = best_by_blocks(x, count)
        index = jnp.where(index < 0, -1, index + jax.lax.axis_index(MODEL) * x.shape[-1])
        values, index = jax.lax.all_gather((values, index), MODEL, axis=-2)
        values, index = (y.reshape(*x.shape[:-1], -1) for y in (values, index))
        return jnp.take_along_axis(index, jax.lax.top_k(values, count)[1], axis=-1)

    rows = _rows_of(x)
    return sharding.locally(own, [(*rows, MODEL)], (*rows, None))(x)


def likeliest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns what ``best`` does, and the logarithms of the probabilities there.

    Args:
      x: logits float ``[..., V]``.
      count: at least 1.

    Returns:
      int32 ``[..., count]`` and ``log_softmax(x)`` there, in nats, float32 ``[..., count]``; -1 and
      -inf where a logit is not finite, and in the whole row where one is NaN or +inf.

    Raises:
      ValueError: ``count`` is greater than V.
    """
    _check_count(x, count)
    if not sharding.divides(MODEL, x.shape[-1]):
        return kernels.current().likeliest(x, count)

    def own(x, index):
        x = x.astype(jnp.float32)
        here = index - jax.lax.axis_index(MODEL) * x.shape[-1]
        mine = (here >= 0) & (here < x.shape[-1])
        at = jnp.take_along_axis(x, jnp.clip(here, 0, x.shape[-1] - 1), axis=-1)
        top = jax.lax.pmax(jnp.max(x, axis=-1, keepdims=True), MODEL)
        total = jax.lax.psum(jnp.sum(jnp.exp(x - top), axis=-1, keepdims=True), MODEL)
        return jax.lax.psum(jnp.where(mine, at - top, 0), MODEL) - jnp.log(total)

    rows, index = _rows_of(x), best(x, count)
    specs = [(*rows, MODEL), (*rows, None)]
    return only_real(index, sharding.locally(own, specs, (*rows, None))(x, index))


def _check_count(x: jax.Array, count: int) -> None:
    """Raises ``ValueError`` if there are fewer than ``count`` numbers in a row."""
    if count > x.shape[-1]:
        raise ValueError(
            f"a tree node with {count} children needs the {count} most probable tokens, and the "
            f"vocabulary has {x.shape[-1]}: take a narrower tree"
        )


def greatest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns what ``jax.lax.top_k`` does, kept apart from what reads it.

    Where XLA merges its results with slices of them, it sorts all numbers on a CPU: 1.4 ms instead
    of 0.05 ms for 3 x 4,096.

    Args:
      x: float ``[..., V]``.
      count: from 1 to V.

    Returns:
      The numbers ``[..., count]``, the greatest first, and their indices, int32 ``[..., count]``.
    """
    return jax.lax.optimization_barrier(tuple(jax.lax.top_k(x, count)))


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """Returns uniform random numbers for the nodes of a draft.

    Args:
      keys: random keys ``[B]``.
      count: the number of columns, usually N. Column n does not depend on ``count``.

    Returns:
      float32 ``[B, count]`` in [0, 1); column n belongs to node n.
    """
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws one token for each row.

    The function inverts the cumulative distribution in two levels (blocks of the vocabulary, then
    the tokens of one block), so that no cumulative sum runs over the whole vocabulary. If the
    vocabulary is split over devices, the devices are a third level.

    Args:
      weights: float32 ``[B, V]``, at least 0; they need not sum to 1.
      uniform: float32 ``[B]`` in [0, 1).

    Returns:
      int32 ``[B]``; a token of weight 0 is never drawn; -1 where the sum of the weights is 0 or not
      finite.
    """
    if not sharding.divides(MODEL, weights.shape[-1]):
        return _draw(weights, lambda total: uniform * total)

    def own(weights, uniform):
        masses = jax.lax.all_gather(jnp.sum(weights, axis=-1), MODEL, axis=-1)
        level = uniform * jnp.sum(masses, axis=-1)
        part, before = _pick(masses, level)
        token = _draw(weights, lambda total: level - before) + part * weights.shape[-1]
        token = jax.lax.psum(jnp.where(part == jax.lax.axis_index(MODEL), token, 0), MODEL)
        mass = jnp.sum(masses, axis=-1)
        return jnp.where((mass > 0) & (mass < jnp.inf), token, -1)

    rows = _rows_of(weights)
    return sharding.locally(own, [(*rows, MODEL), rows], rows)(weights, uniform)


def draw_hub(q: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws two siblings for each row in SpecHub's way (``Draft.draws = "hub"``).

    The first sibling is drawn from ``q``. If it is the hub, ``argmax q``, the second sibling is
    drawn from ``q`` without the hub; otherwise the second sibling is the hub.

    Args:
      q: probabilities float32 ``[B, V]``.
      uniform: float32 ``[B, 2]`` in [0, 1); the second column is used only if the first sibling is
        the hub.

    Returns:
      int32 ``[B, 2]``. Both tokens are -1 if the sum of ``q`` is 0; the second is -1 if all of
      ``q`` lies on the hub.

    References: SpecHub, arXiv 2411.05289, algorithm 1.
    """
    hub, first = argmax(q), draw(q, uniform[:, 0])
    others = jnp.where(jnp.arange(q.shape[-1]) == hub[:, None], 0.0, q)
    second = jnp.where(first == hub, draw(others, uniform[:, 1]), hub)
    return jnp.stack([first, jnp.where(first < 0, -1, second)], axis=1)


def _draw(weights: jax.Array, level_of) -> jax.Array:
    """Returns the token at the cumulative weight ``level_of(sum of weights)``, on one device."""
    batch, vocab = weights.shape
    width = 1 << max(3, (vocab - 1).bit_length() // 2)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)

    sums = jnp.sum(blocks, axis=-1)
    total = jnp.sum(sums, axis=-1)
    level = level_of(total)
    block, before = _pick(sums, level)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    offset, _ = _pick(inside, level - before)
    token = (block * width + offset).astype(jnp.int32)
    return jnp.where((total > 0) & (total < jnp.inf), token, -1)


def _pick(mass: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first index whose cumulative mass exceeds ``level``, and the mass before it."""
    total = jnp.cumsum(mass, axis=-1)
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1)
    # a parallel cumulative sum may decrease by a rounding error: the mass itself is tested as well
    above = (total > level[:, None]) & (mass > 0)
    index = jnp.minimum(jnp.min(jnp.where(above, index, len(index)), axis=-1), last)
    before = jnp.where(index > 0, _take(total, jnp.maximum(index - 1, 0)), 0.0)
    return index, before


def _rows_of(x: jax.Array) -> tuple[str | None, ...]:
    """Returns the placement of all but the last axis of ``x [B, ..., V]`` on the current mesh."""
    return (DATA if sharding.divides(DATA, x.shape[0]) else None, *(None,) * (x.ndim - 2))


def _take(x, index):
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
