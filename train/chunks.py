"""Losses over a vocabulary, a few positions at a time: logits of all of them never exist.

Logits of M positions over V tokens are M * V numbers, in float32 4 GB for 8 rows of 1024 tokens
over 128k: far more than the states they are made of. Here a head's product, its loss and the
gradient of both are taken over one chunk of positions before the next one's are. The gradient
is computed along with the value, so nothing is computed twice (as by rematerialisation).

A chunk is a slice of *positions* of all rows, so rows may be spread over devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models.layers import product, softcap

CHUNK = 512  # positions, over all rows


def logits_of(table: jax.Array, states: jax.Array, cap: float | None = None) -> jax.Array:
    """float32 ``[B, C, V]``: a head ``table [V, F]`` on ``states [B, C, F]``, softly capped."""
    batch, steps, size = states.shape
    out = product(table, states.reshape(-1, size).T, turned=True)
    return softcap(out, cap).astype(jnp.float32).reshape(batch, steps, -1)


def _split(x: jax.Array, steps: int) -> jax.Array:
    """``[B, T, ...] -> [T / steps, B, steps, ...]``, filled up with zeros."""
    batch, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % steps), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(batch, -1, steps, *x.shape[2:]), 1, 0)


def _join(x: jax.Array, length: int) -> jax.Array:
    """Undoes ``_split``: ``[B, length, ...]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _steps(states: jax.Array, chunk: int) -> int:
    return max(1, min(states.shape[1], chunk // states.shape[0]))


def each(terms, table, states, fixed, pieces, *, chunk: int = CHUNK) -> dict:
    """``{name: [B, T]}``: what ``terms`` says of each position. Not to be differentiated, which
    would keep the logits: see ``total``. Arguments as there."""
    steps, length = _steps(states, chunk), states.shape[1]
    split = jax.tree.map(lambda x: _split(x, steps), (states, pieces))
    found = jax.lax.map(lambda piece: terms(table, piece[0], fixed, piece[1]), split)
    return jax.tree.map(lambda x: _join(x, length), found)


def total(terms, table, states, fixed, pieces, weight, *, chunk: int = CHUNK):
    """``(sum of weight * loss, {name: sum of weight * other term})``, float32 scalars.

    Args:
      terms: ``terms(table, states [B, C, F], fixed, pieces) -> {"loss": [B, C], name: [B, C]}``,
        pure; positions do not depend on each other.
      table, states: ``[V, F]`` and ``[B, T, F]``; the loss is differentiable in these two alone.
      fixed: a pytree that each chunk sees whole, such as the target's head.
      pieces: a pytree of ``[B, T, ...]``, cut as the states are; whoever fills up a last chunk
        fills in zeros.
      weight: ``[B, T]``.
      chunk: positions over all rows whose logits exist at a time.
    """
    loss, others = _total(terms, chunk, table, states, fixed, (pieces, weight))
    return loss, jax.lax.stop_gradient(others)


def _summed(terms, table, states, fixed, pieces):
    pieces, weight = pieces
    values = terms(table, states, fixed, pieces)
    sums = {name: jnp.sum(value * weight) for name, value in values.items()}
    return sums.pop("loss"), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(terms, chunk, table, states, fixed, pieces):
    steps = _steps(states, chunk)
    split = jax.tree.map(lambda x: _split(x, steps), (states, pieces))
    sums = jax.lax.map(lambda piece: _summed(terms, table, piece[0], fixed, piece[1]), split)
    return jax.tree.map(jnp.sum, sums)


def _forward(terms, chunk, table, states, fixed, pieces):
    steps, length = _steps(states, chunk), states.shape[1]
    split = jax.tree.map(lambda x: _split(x, steps), (states, pieces))
    slope = jax.value_and_grad(functools.partial(_summed, terms), argnums=(0, 1), has_aux=True)

    def step(table_slope, piece):
        sums, (own, state_slope) = slope(table, piece[0], fixed, piece[1])
        return table_slope + own.astype(jnp.float32), (sums, state_slope)

    zero = jnp.zeros(table.shape, jnp.float32)
    table_slope, (sums, state_slope) = jax.lax.scan(step, zero, split)
    slopes = table_slope.astype(table.dtype), _join(state_slope, length)
    return jax.tree.map(jnp.sum, sums), slopes


def _backward(_terms, _chunk, slopes, cotangents):
    scale = cotangents[0]
    table, states = ((scale * slope).astype(slope.dtype) for slope in slopes)
    return table, states, None, None


_total.defvjp(_forward, _backward)
