"""Losses over a vocabulary, computed for a few positions at a time to save memory.

The logits of M positions are M * V numbers: 4 GB in float32 for 8 rows of 1024 tokens and a
vocabulary of 128k, far more than the states from which they are computed. Here a head's product,
its loss and the gradient of both are computed for one chunk of positions before the next. The
gradient is computed together with the value, so nothing is computed twice, as it would be with
rematerialisation.

A chunk is a slice of *positions* of all rows, so rows may be spread over devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from specjax import kernels
from specjax.models.layers import softcap
from specjax.types import PyTree

CHUNK = 512  # positions of a chunk, over all rows
SEVERAL = 1024  # positions of a chunk, over all rows and heads


def _wide(indices: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """``einsum`` of arrays of any floating dtype, computed in float32."""
    return kernels.current().einsum_float32(indices, x, y)


@jax.custom_vjp
def _product(table: jax.Array, states: jax.Array) -> jax.Array:
    """The product of ``table [V, F]`` and ``states [B, C, F]``, float32 ``[B, C, V]``."""
    return _wide("bcf,vf->bcv", states, table)


def _product_forward(table, states):
    return _product(table, states), (table, states)


def _product_backward(kept, slope):
    """The backward pass, which on CPU does not transpose the slope, the largest of the arrays.

    The gradient of the table is computed transposed, and a barrier keeps XLA from folding the
    transposition of the result into the product.
    """
    table, states = kept
    slope = slope.astype(table.dtype)
    turned = kernels.current().fence(_wide("bcf,bcv->fv", states, slope))
    state_slope = _wide("bcv,vf->bcf", slope, table)
    return turned.T.astype(table.dtype), state_slope.astype(states.dtype)


_product.defvjp(_product_forward, _product_backward)


def logits_of(table, states: jax.Array, cap: float | None = None, bias=None) -> jax.Array:
    """Returns the logits of a head, float32 ``[B, C, V]``.

    Args:
      table: ``[V, F]``.
      states: ``[B, C, F]``.
      cap: the logits become ``cap * tanh(logits / cap)``; None: they are not capped.
      bias: ``[V]``, added before the cap; None: no bias.
    """
    out = _product(table, states)
    return softcap(out if bias is None else out + bias, cap)


def _split(x: jax.Array, steps: int) -> jax.Array:
    """Splits ``[B, T, ...]`` to ``[T / steps, B, steps, ...]``, padded with zeros."""
    batch, length = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -length % steps), *[(0, 0)] * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(batch, -1, steps, *x.shape[2:]), 1, 0)


def _join(x: jax.Array, length: int) -> jax.Array:
    """Undoes ``_split``, to ``[B, length, ...]``."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _steps(states, chunk: int) -> int:
    """The number of positions of each row in a chunk, such that chunks are as even as possible.

    Several heads have fewer, since a compiler may begin one head before it finishes another.
    """
    every = jax.tree.leaves(states)
    batch, length = every[0].shape[:2]
    parts = -(-length // max(1, chunk // (batch * len(every))))
    return -(-length // parts)


def each(terms, table, states, fixed, pieces, *, chunk: int = CHUNK) -> dict:
    """Returns ``{name: [B, T]}``, the values of ``terms`` at each position.

    The arguments are those of ``total``; tables and states may be those of several heads. Do not
    differentiate this function, which would keep all logits in memory: use ``total``.
    """
    steps, length = _steps(states, chunk), jax.tree.leaves(states)[0].shape[1]
    split = jax.tree.map(lambda x: _split(x, steps), (states, pieces))
    found = jax.lax.map(lambda piece: terms(table, piece[0], fixed, piece[1]), split)
    return jax.tree.map(lambda x: _join(x, length), found)


class Head(NamedTuple):
    """One of several heads over the same positions.

    Attributes:
      table: a pytree that each chunk reads whole, such as ``[V, F]``. Its gradient is computed
        only if it is requested.
      states: ``[B, T, F]``.
      pieces: a pytree of ``[B, T, ...]``, cut as the states are; a last chunk is padded with
        zeros.
      weight: ``[B, T]``, the weight of each position.
    """

    table: PyTree
    states: jax.Array
    pieces: PyTree
    weight: jax.Array


def total(terms, table, states, fixed, pieces, weight, *, chunk: int = CHUNK):
    """Returns ``(sum of weight * loss, {name: sum of weight * other term})``, float32 scalars.

    Args:
      terms: a pure function ``terms(table, states [B, C, F], fixed, pieces) -> {"loss": [B, C],
        name: [B, C]}``, in which positions do not depend on each other.
      table, states, pieces, weight: see ``Head``; the loss is differentiable in table and states.
      fixed: a pytree that each chunk reads whole, such as the target's LM head.
      chunk: the number of positions, over all rows and heads, whose logits exist at a time.
    """
    heads = [Head(table, states, pieces, weight)]
    return totals(terms, heads, fixed, chunk=chunk)[0]


def _alone(fixed, pieces):
    del pieces
    return fixed


def totals(terms, heads: Sequence[Head], fixed, pieces=(), *, common=_alone, chunk: int = SEVERAL):
    """Returns a list with ``total`` of each head; the heads of a chunk are computed in turn.

    The gradient of each head's table is kept until the backward pass, which knows the factors of
    the heads, even where heads share one table.

    Args:
      terms: as of ``total``, with the result of ``common`` instead of ``fixed``.
      heads: the heads.
      fixed: as of ``total``.
      pieces: a pytree of ``[B, T, ...]``, cut as the states are, for ``common``.
      common: ``common(fixed, pieces)`` computes once what all heads read of a chunk; no gradient
        flows into it.
      chunk: as of ``total``.
    """
    tables, states = [head.table for head in heads], [head.states for head in heads]
    own = [(head.pieces, head.weight) for head in heads]
    found = _totals(terms, common, chunk, tables, states, (fixed, pieces, own))
    return [(loss, jax.lax.stop_gradient(others)) for loss, others in found]


def _summed(terms, table, states, seen, own):
    pieces, weight = own
    values = terms(table, states, seen, pieces)
    sums = {name: jnp.sum(value * weight) for name, value in values.items()}
    return sums.pop("loss"), sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _totals(terms, common, chunk, tables, states, rest):
    fixed, pieces, own = rest
    steps = _steps(states, chunk)
    split = jax.tree.map(lambda x: _split(x, steps), (pieces, states, own))

    def step(piece):
        pieces, states, own = piece
        seen = common(fixed, pieces)
        return [
            _summed(terms, *head, seen, rest)
            for *head, rest in zip(tables, states, own, strict=True)
        ]

    return jax.tree.map(jnp.sum, jax.lax.map(step, split))


def _forward(terms, common, chunk, tables, states, rest):
    """Computes values and gradients, without those of tables that are not differentiated."""
    asked = [any(x.perturbed for x in jax.tree.leaves(table)) for table in tables]
    tables, states, rest = jax.tree.map(lambda x: x.value, (tables, states, rest))
    fixed, pieces, own = rest
    steps, length = _steps(states, chunk), states[0].shape[1]
    split = jax.tree.map(lambda x: _split(x, steps), (pieces, states, own))

    def slopes_of(table, states, seen, own, asked):
        summed = functools.partial(_summed, terms)
        slope = jax.value_and_grad(summed, argnums=(0, 1) if asked else (1,), has_aux=True)
        return slope(table, states, seen, own)

    def step(table_slopes, piece):
        pieces, states, own = piece
        seen, sums, slopes = common(fixed, pieces), [], []
        for i, head in enumerate(zip(tables, states, own, strict=True)):
            table, state, rest = head
            found, (*first, slope) = slopes_of(table, state, seen, rest, asked[i])
            add = lambda x, y: x + y.astype(jnp.float32)  # noqa: E731
            table_slopes[i] = jax.tree.map(add, table_slopes[i], first[0]) if first else None
            sums.append(found)
            slopes.append(slope)
        return table_slopes, (sums, slopes)

    zeros = [
        jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), table) if own else None
        for table, own in zip(tables, asked, strict=True)
    ]  # None: no leaves
    table_slopes, (sums, slopes) = jax.lax.scan(step, zeros, split)
    table_slopes = [
        jax.tree.map(lambda slope, x: slope.astype(x.dtype), *pair) if pair[0] is not None else None
        for pair in zip(table_slopes, tables, strict=True)
    ]
    slopes = [_join(slope, length) for slope in slopes]
    return jax.tree.map(jnp.sum, sums), (table_slopes, slopes)


def _backward(_terms, _common, _chunk, slopes, cotangents):
    def scaled(slope, scale):
        if isinstance(scale, SymbolicZero):  # the loss of this head is not used
            return jax.tree.map(jnp.zeros_like, slope)
        return jax.tree.map(lambda x: (scale * x).astype(x.dtype), slope)

    scales = [scale for scale, _ in cotangents]
    return *([scaled(*pair) for pair in zip(own, scales, strict=True)] for own in slopes), None


_totals.defvjp(_forward, _backward, symbolic_zeros=True)
