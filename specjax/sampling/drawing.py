"""Choosing tokens: the greatest numbers of a vocabulary, and draws from weights over it.

Each is one pass over the vocabulary in blocks, without a sort or a cumulative sum over the whole of
it; where a vocabulary is spread over devices each device looks through its own part.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .. import kernels, sharding
from ..kernels.xla import first_true
from ..sharding import DATA, MODEL


def argmax(x: jax.Array) -> jax.Array:
    """int32 ``[...]``, the index of the first maximum of each row of ``x`` float ``[..., V]``; -1
    where that is not finite.

    One pass over ``x``, and nothing of its size beside it (see ``kernels``). NaN among the numbers
    is passed over or makes the result -1, as the backend's own maximum does: to replace NaN first
    would be a copy.

    Where a vocabulary is spread over devices each looks through its own part.
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
    """int32 ``[..., count]``, indices of the ``count`` greatest numbers of each row of ``x`` float
    ``[..., V]``, greatest first; of equal ones the first, -1 where a number is not finite.

    Those blocks that reach highest hold them all, so only they are sorted: one pass over ``x``.
    Where a vocabulary is spread over devices each looks through its own part.

    Raises:
      ValueError: there are fewer numbers.
    """
    if count == 1:
        return argmax(x)[..., None]
    if count > x.shape[-1]:
        raise ValueError(
            f"the {count} best of a vocabulary of {x.shape[-1]} are asked for (a tree as wide as "
            "that): take a narrower tree"
        )
    if not sharding.divides(MODEL, x.shape[-1]) or count > x.shape[-1] // sharding.size(MODEL):
        return _best(x, count)[1]

    def own(x):
        values, index = _best(x, count)
        index = jnp.where(index < 0, -1, index + jax.lax.axis_index(MODEL) * x.shape[-1])
        values, index = jax.lax.all_gather((values, index), MODEL, axis=-2)
        values, index = (y.reshape(*x.shape[:-1], -1) for y in (values, index))
        return jnp.take_along_axis(index, jax.lax.top_k(values, count)[1], axis=-1)

    rows = _rows_of(x)
    return sharding.locally(own, [(*rows, MODEL)], (*rows, None))(x)


def _best(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` greatest and where they are, on one device."""
    size = x.shape[-1]
    blocks = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    if blocks > count:
        width = size // blocks
        parts = x.reshape(*x.shape[:-1], blocks, width)
        high = jnp.sort(jax.lax.top_k(jnp.max(parts, axis=-1), count)[1], axis=-1)
        inside = jnp.take_along_axis(parts, high[..., None], axis=-2)
        values, where = jax.lax.top_k(inside.reshape(*x.shape[:-1], -1), count)
        index = jnp.take_along_axis(high, where // width, axis=-1) * width + where % width
    else:
        values, index = jax.lax.top_k(x, count)
    return values, jnp.where(jnp.isfinite(values), index, -1).astype(jnp.int32)


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """float32 ``[B, count]`` in [0, 1), of random ``keys`` ``[B]``; column ``n`` belongs to node
    ``n``, whatever ``count``."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)


def draw(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32 ``[B]``, one token a row from unnormalised ``weights`` float32 ``[B, V]`` by one
    ``uniform`` float32 ``[B]`` in [0, 1).

    Inverse CDF in two levels, so that no cumulative sum runs over the whole vocabulary. A token of
    weight zero is never drawn; -1 where the weights have no sum above zero.

    Where a vocabulary is spread over devices their masses are a third level above the two.
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
    """Two siblings a row as SpecHub draws them (``Draft.draws = "hub"``), int32 ``[B, 2]``.

    The first from ``q`` float32 ``[B, V]``; the second from ``q`` without it if it is the hub
    ``argmax q``, else the hub. ``uniform`` float32 ``[B, 2]`` in [0, 1), of which the second is
    used only in the former case. -1 where there is nothing to draw from: both if ``q`` has no mass,
    the second if all of it is the hub's.

    References: SpecHub, arXiv 2411.05289, algorithm 1.
    """
    hub, first = argmax(q), draw(q, uniform[:, 0])
    others = jnp.where(jnp.arange(q.shape[-1]) == hub[:, None], 0.0, q)
    second = jnp.where(first == hub, draw(others, uniform[:, 1]), hub)
    return jnp.stack([first, jnp.where(first < 0, -1, second)], axis=1)


def _draw(weights: jax.Array, level_of) -> jax.Array:
    """The token at ``level_of(mass of all weights) [B]``, on one device."""
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
    """First index whose cumulative mass exceeds ``level``, and the mass before it."""
    total = jnp.cumsum(mass, axis=-1)
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=-1)
    # a parallel cumulative sum may step down by a rounding: ask for the mass itself as well
    above = (total > level[:, None]) & (mass > 0)
    index = jnp.minimum(jnp.min(jnp.where(above, index, len(index)), axis=-1), last)
    before = jnp.where(index > 0, _take(total, jnp.maximum(index - 1, 0)), 0.0)
    return index, before


def _rows_of(x: jax.Array) -> tuple[str | None, ...]:
    """The placement of all but the last dimension of ``x [B, ..., V]`` on the mesh in use."""
    return (DATA if sharding.divides(DATA, x.shape[0]) else None, *(None,) * (x.ndim - 2))


def _take(x, index):
    return jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
