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
    own_bias = jnp.where(own_mask, 0.0, hidden).swapaxes(1, 2)[:, None, None]  # [B, 1, 1, N, M]

    def scores(keys, bias):
        """``[B * K, G * N, slots]``, the axis of the softmax last.

        The product has the keys first, the order in which the CPU backend streams a cache once;
        the barrier keeps the transposition from being folded into it.
        """
        s = jnp.einsum("bsd,bdm->bsm", keys, q, preferred_element_type=jnp.float32)
        s = _settled(s).swapaxes(1, 2).reshape(batch, heads, groups, nodes, -1) + bias
        return s.reshape(batch * heads, groups * nodes, -1)

    def weigh(weights, values):
        return jnp.einsum("bms,bsd->bmd", weights.astype(values.dtype), values)

    own = scores(own_keys, own_bias)

    def over(slots):
        if not slots:
            now = jnp.exp(own - jnp.max(own, axis=-1, keepdims=True))
            return weigh(now, own_values) / jnp.sum(now, axis=-1, keepdims=True)
        keys, values = (x[:, :, :slots].reshape(batch * heads, slots, size) for x in prefix)
        seen = jnp.arange(slots)[None, :] < length[:, None]
        past = scores(keys, jnp.where(seen, 0.0, hidden)[:, None, None, None])
        top = jnp.maximum(jnp.max(past, axis=-1), jnp.max(own, axis=-1))[..., None]
        past, now = jnp.exp(past - top), jnp.exp(own - top)
        total = jnp.sum(past, axis=-1, keepdims=True) + jnp.sum(now, axis=-1, keepdims=True)
        return (weigh(past, values) + weigh(now, own_values)) / total

    if prefix is None:
        out = over(0)
    else:
        sizes = prefix_sizes(prefix[0].shape[2])
        branches = [lambda s=s: over(s) for s in sizes]
        out = branches[0]() if len(sizes) == 1 else jax.lax.switch(choice, branches)
    out = out.astype(query.dtype).reshape(batch, heads, groups, nodes, size)
    return out.transpose(0, 1, 4, 2, 3)


def _settled(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x
