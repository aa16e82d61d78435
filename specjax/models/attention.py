"""Attention of a few fresh nodes over (a committed prefix, their own ancestors).

Shapes, besides the letters of ``types.py``: ``K`` key/value heads, ``G`` query heads that share
one, ``E`` the size of a head, ``M`` nodes of the draft that have entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import sharding
from ..kernels import cpu
from ..sharding import DATA
from .layers import softcap as capped

SMALLEST_PREFIX = 256  # cache slots; below it a switch costs more than it saves
BLOCK = 2048  # slots scored at once in a longer prefix: bounds the memory of a long prompt


def prefix_sizes(capacity: int) -> tuple[int, ...]:
    """The lengths of cache that a compiled pass can choose from: powers of two up to ``BLOCK``,
    then the whole, which is read block by block as far as it is used."""
    sizes, size = [], SMALLEST_PREFIX
    while size < capacity and size <= BLOCK:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def attend(
    query,
    key,
    value,
    own_mask,
    prefix=None,
    length=None,
    choice=None,
    *,
    window=None,
    positions=None,
    softcap=None,
    bias=None,
):
    """Softmax attention whose cost follows the tokens in use, not the capacity.

    Args:
      query: ``[B, K, E, G, N]``, already rotated, not scaled.
      key, value: ``[B, K, M, E]``, entries of this draft: earlier nodes, if any, then these N.
      own_mask: bool ``[B or 1, M, N]``; ``own_mask[b, m, n]``: node ``n`` sees entry ``m``.
      prefix: ``(keys, values)``, each ``[B, K, S, E]``, or None where nothing is committed.
      length: int32 ``[B]``, how many tokens of a row are committed: the slots of the prefix that
        it sees, unless there is a window.
      choice: int32 scalar, index into ``prefix_sizes(S)`` of a size that holds every row.
      window: the prefix is a ring, position ``p`` in slot ``p mod S``, ``S >= window``; a node sees
        the ``window`` positions up to its own. ``own_mask`` is the caller's business.
      positions: int32 ``[B, N]`` of the nodes; needed with a window.
      softcap: bound on the scores, or None.
      bias: None, or what is added to the scores: float32 ``[B or 1, K, G, N, M]`` for the own
        entries, and ``[B or 1, K, G, N, S]`` (or None, without a prefix) for the slots.

    Returns:
      ``[B, K, E, G, N]``.
    """
    plain = prefix is not None and window is None and softcap is None and bias is None
    if not plain or not _in_place(query, key, value, *prefix) or not cpu.chosen():
        special = window, positions, softcap, bias
        return _attend(query, key, value, own_mask, prefix, length, choice, *special)

    def otherwise(query, keys, values, key, value, own_mask, length):
        index = choice_of(keys.shape[2], length)
        return _attend(query, key, value, own_mask, (keys, values), length, index)

    return cpu.attention(query, *prefix, key, value, own_mask, length, otherwise)


def attend_spread(
    query,
    key,
    value,
    own_mask,
    *,
    axis=None,
    prefix=None,
    length=None,
    choice=None,
    positions=None,
    bias=None,
    **settings,
):
    """``attend`` in the mesh in use, if any: each device has its rows (over ``data``) and its
    heads (over ``axis``; None: all of them), and none of another's cache. Where a single key head
    serves all queries (latent attention) every device has it, and some of the queries."""

    def own(query, key, value, own_mask, prefix, length, choice, positions, bias):
        more = dict(length=length, choice=choice, positions=positions, bias=bias, **settings)
        return attend(query, key, value, own_mask, prefix, **more)

    row, heads = (DATA,), (DATA, axis)
    queries = heads
    if query.shape[1] == 1 and axis:
        heads, queries = row, (DATA, None, None, axis)
    mask_rows = row if len(own_mask) == len(query) else ()
    bias_heads = heads if bias is None or len(bias[0]) == len(query) else (None, axis)
    specs = [queries, heads, heads, mask_rows, heads, row, (), row, bias_heads]
    run = sharding.locally(own, specs, queries)
    return run(query, key, value, own_mask, prefix, length, choice, positions, bias)


def choice_of(capacity: int, length: jax.Array) -> jax.Array:
    """int32 scalar, the index into ``prefix_sizes(capacity)`` of a size that holds every row."""
    sizes = jnp.asarray(prefix_sizes(capacity))
    return jnp.sum(sizes < jnp.minimum(jnp.max(length), capacity)).astype(jnp.int32)


def _attend(
    query,
    key,
    value,
    own_mask,
    prefix,
    length,
    choice,
    window=None,
    positions=None,
    softcap=None,
    added=None,
):
    """``attend`` by XLA's operations."""
    batch, heads, size, groups, nodes = query.shape
    q = (query * size**-0.5).reshape(batch * heads, size, groups * nodes)
    own_keys, own_values = (x.reshape(batch * heads, -1, size) for x in (key, value))
    hidden = jnp.float32(-1e30)
    own_bias = jnp.where(own_mask, 0.0, hidden).swapaxes(1, 2)[:, None, None]  # [B, 1, 1, N, M]
    if added is not None:
        own_bias = own_bias + added[0]

    def scores(keys, bias):
        """``[B * K, G * N, slots]``, the axis of the softmax last.

        The product has the keys first, the order in which the CPU backend streams a cache once;
        the barrier keeps the transposition from being folded into it.
        """
        s = jnp.einsum("bsd,bdm->bsm", keys, q, preferred_element_type=jnp.float32)
        s = _settled(s).swapaxes(1, 2).reshape(batch, heads, groups, nodes, -1)
        s = capped(s, softcap) + bias
        return s.reshape(batch * heads, groups * nodes, -1)

    def weigh(weights, values):
        return jnp.einsum(
            "bms,bsd->bmd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )

    def add(state, scored, values):
        """A running softmax (2205.14135): unnormalised output, maximum, sum; and a further part."""
        out, top, total = state
        higher = jnp.maximum(top, jnp.max(scored, axis=-1, keepdims=True))
        fade, weights = jnp.exp(top - higher), jnp.exp(scored - higher)
        total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
        return out * fade + weigh(weights, values), higher, total

    def past(state, size, begin=0):
        """Adds the slots ``begin ...`` of the prefix, at most ``size``."""
        slots = prefix[0].shape[2]
        start = jnp.minimum(begin, slots - size)
        parts = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in prefix)
        keys, values = (x.reshape(batch * heads, size, -1) for x in parts)
        slot = start + jnp.arange(size)
        seen = (slot >= begin) & (slot < length[:, None])
        if window is None:
            seen = seen[:, None]  # [B, N or 1, slots]
        else:
            newest = length[:, None] - 1
            held = newest - (newest - slot) % slots  # the position in each slot
            seen = seen[:, None] & (held[:, None] > positions[:, :, None] - window)
        bias = jnp.where(seen, 0.0, hidden)[:, None, None]
        if added is not None:
            bias = bias + jax.lax.dynamic_slice_in_dim(added[1], start, size, axis=-1)
        return add(state, scores(keys, bias), values)

    def through(size):
        """The own entries and ``size`` slots, at once or in blocks."""
        own = scores(own_keys, own_bias)
        top = jnp.max(own, axis=-1, keepdims=True)
        now = jnp.exp(own - top)
        state = weigh(now, own_values), top, jnp.sum(now, axis=-1, keepdims=True)
        if 0 < size <= BLOCK:
            state = past(state, size)
        elif size:
            used = jnp.minimum(jnp.max(length), prefix[0].shape[2])
            count = (used + BLOCK - 1) // BLOCK
            body = lambda i, state: past(state, BLOCK, i * BLOCK)  # noqa: E731
            state = jax.lax.fori_loop(0, count, body, state)
        return state[0] / state[2]

    if prefix is None:
        out = through(0)
    else:
        sizes = prefix_sizes(prefix[0].shape[2])
        branches = [lambda s=s: through(s) for s in sizes]
        out = branches[0]() if len(sizes) == 1 else jax.lax.switch(choice, branches)
    out = out.astype(query.dtype).reshape(batch, heads, groups, nodes, size)
    return out.transpose(0, 1, 4, 2, 3)


def _in_place(*arrays) -> bool:
    """Whether the CPU kernel is made for such arrays."""
    return all(x.dtype == jnp.float32 for x in arrays)


def _settled(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x
