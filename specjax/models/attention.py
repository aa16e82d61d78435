"""Attention of a few fresh nodes over (a committed prefix, their own ancestors).

Shapes, besides the letters of ``types.py``: ``K`` key/value heads, ``G`` query heads that share
one, ``E`` the size of a head, ``M`` nodes of the draft that have entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SMALLEST_PREFIX = 256  # cache slots; below it a switch costs more than it saves


def prefix_sizes(capacity: int) -> tuple[int, ...]:
    """The lengths of cache that a compiled pass can choose from: powers of two, then the whole."""
    sizes, size = [], SMALLEST_PREFIX
    while size < capacity:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def attend(query, key, value, own_mask, prefix=None, length=None, choice=None):
    """Softmax attention whose cost follows the tokens in use, not the capacity.

    Args:
      query: ``[B, K, E, G, N]``, already rotated, not scaled.
      key, value: ``[B, K, M, E]``, entries of this draft: earlier nodes, if any, then these N.
      own_mask: bool ``[B or 1, M, N]``; ``own_mask[b, m, n]``: node ``n`` sees entry ``m``.
      prefix: ``(keys, values)``, each ``[B, K, S, E]``, or None where nothing is committed.
      length: int32 ``[B]``, how many slots of the prefix a row sees.
      choice: int32 scalar, index into ``prefix_sizes(S)`` of a size that holds every row.

    Returns:
      ``[B, K, E, G, N]``.
    """
    batch, heads, size, groups, nodes = query.shape
    q = (query * size**-0.5).reshape(batch * heads, size, groups * nodes)
    own_keys, own_values = (x.reshape(batch * heads, -1, size) for x in (key, value))
    hidden = jnp.float32(-1e30)
    own_bias = jnp.where(own_mask, 0.0, hidden)[:, None, :, None, :]

    def scores(keys, bias):
        # K . q, keys outermost: the order in which the CPU backend streams a cache once
        s = jnp.einsum("bsd,bdm->bsm", keys, q, preferred_element_type=jnp.float32)
        s = s.reshape(batch, heads, keys.shape[1], groups, nodes) + bias
        return s.reshape(batch * heads, keys.shape[1], groups * nodes)

    def weigh(values, weights):
        return jnp.einsum("bsd,bsm->bdm", values, weights.astype(values.dtype))

    own = scores(own_keys, own_bias)

    def over(slots):
        if not slots:
            top = jnp.max(own, axis=1, keepdims=True)
            weights = jnp.exp(own - top)
            return weigh(own_values, weights / jnp.sum(weights, axis=1, keepdims=True))
        keys, values = (x[:, :, :slots].reshape(batch * heads, slots, size) for x in prefix)
        seen = jnp.arange(slots)[None, :] < length[:, None]
        past = scores(keys, jnp.where(seen, 0.0, hidden)[:, None, :, None, None])
        top = jnp.maximum(jnp.max(past, axis=1, keepdims=True), jnp.max(own, 1, keepdims=True))
        past, now = jnp.exp(past - top), jnp.exp(own - top)
        total = jnp.sum(past, axis=1, keepdims=True) + jnp.sum(now, axis=1, keepdims=True)
        return weigh(values, past / total) + weigh(own_values, now / total)

    if prefix is None:
        out = over(0)
    else:
        sizes = prefix_sizes(prefix[0].shape[2])
        branches = [lambda s=s: over(s) for s in sizes]
        out = branches[0]() if len(sizes) == 1 else jax.lax.switch(choice, branches)
    return out.astype(query.dtype).reshape(batch, heads, size, groups, nodes)
