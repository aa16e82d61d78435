"""Losses of several heads on one input, each differentiated before the next is computed.

The heads of multi-token prediction read the same states. If their losses were differentiated as one
sum, the activations of all heads would be in memory at once. Here the gradient of a head's loss is
computed right after the loss, that for the common input is added to those of the heads before, and
the trunk below the input is differentiated once, from the sum.

References: Gloeckle et al., arXiv 2404.19737, section 2 (memory-efficient implementation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.types import PyTree


def in_turn(loss_of: Callable, own: PyTree, shared: PyTree, each: PyTree, fixed: PyTree):
    """Returns ``(the sum of the heads' losses, what else each head returned)``.

    Args:
      loss_of: a pure function ``loss_of(own, shared, each, fixed) -> (loss float32, others)`` of
        one head, which closes over no array.
      own: the parameters of the heads, in leaves ``[K, ...]``.
      shared: what all heads read and gradients flow into, such as the trunk's output.
      each: leaves ``[K, ...]`` that are no parameters.
      fixed: what all heads read besides. No gradient flows into ``each`` and ``fixed``.

    Returns:
      a float32 scalar, differentiable in ``own`` and ``shared``; and ``others`` in leaves
      ``[K, ...]``, of which no gradient is taken.
    """
    total, others = _in_turn(loss_of, own, shared, (each, fixed))
    return total, jax.lax.stop_gradient(others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_turn(loss_of, own, shared, rest):
    each, fixed = rest

    def step(total, head):
        value, others = loss_of(head[0], shared, head[1], fixed)
        return total + value, others

    return jax.lax.scan(step, jnp.float32(0), (own, each))


def _forward(loss_of, own, shared, rest):
    each, fixed = rest
    slope_of = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)

    def step(carry, head):
        total, slope = carry
        (value, others), (own_slope, more) = slope_of(head[0], shared, head[1], fixed)
        slope = jax.tree.map(lambda x, y: x + y.astype(jnp.float32), slope, more)
        return (total + value, slope), (own_slope, others)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shared)
    (total, slope), (own_slopes, others) = jax.lax.scan(step, (jnp.float32(0), zeros), (own, each))
    slope = jax.tree.map(lambda x, like: x.astype(like.dtype), slope, shared)
    return (total, others), (own_slopes, slope)


def _backward(loss_of, slopes, cotangents):
    scale, _ = cotangents
    return *jax.tree.map(lambda x: (scale * x).astype(x.dtype), slopes), None


_in_turn.defvjp(_forward, _backward)
