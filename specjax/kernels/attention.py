"""Softmax attention over a cache and a draft's own entries, in XLA's operations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SMALLEST_PREFIX = 256  # cache slots; below it a switch costs more than it saves
BLOCK = 2048  # slots scored at once in a longer prefix: bounds the memory of a long prompt
CAUSAL_BLOCK = 128  # nodes of a causal sequence that are scored at once


def numbers(arrays, dtype) -> tuple[jax.Array, ...]:
    """Codes in eight bits as numbers of ``dtype``: int8, or the bytes of float8 e4m3 as uint8.
    Other arrays stay as they are."""

    def read(x):
        if x.dtype == jnp.uint8:
            return jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(dtype)
        return x.astype(dtype) if x.dtype == jnp.int8 else x

    return tuple(map(read, arrays))


def prefix_sizes(capacity: int) -> tuple[int, ...]:
    """The lengths of cache that a compiled pass can choose from: powers of two up to ``BLOCK``,
    then the whole, which is read block by block as far as it is used."""
    sizes, size = [], SMALLEST_PREFIX
    while size < capacity and size <= BLOCK:
        sizes.append(size)
        size *= 2
    return (*sizes, capacity)


def choice_of(capacity: int, length: jax.Array) -> jax.Array:
    """int32 scalar, the index into ``prefix_sizes(capacity)`` of a size that holds every row."""
    sizes = jnp.asarray(prefix_sizes(capacity))
    return jnp.sum(sizes < jnp.minimum(jnp.max(length), capacity)).astype(jnp.int32)


def attend(
    query,
    key,
    value,
    own_mask,
    prefix: Any = None,
    length: Any = None,
    choice=None,
    *,
    backend,
    window=None,
    sinks=0,
    positions=None,
    softcap=None,
    bias=None,
    causal=False,
):
    """``Backend.attend`` by XLA's operations; ``backend`` has the products and the barrier."""
    if causal and prefix is None and bias is None:
        return _attend_causal(query, key, value, own_mask, softcap, backend.einsum_float32)
    batch, heads, size, groups, nodes = query.shape
    q = (query * size**-0.5).reshape(batch * heads, size, groups * nodes)
    own_keys, own_values = (x.reshape(batch * heads, -1, size) for x in (key, value))
    hidden = jnp.float32(-1e30)
    own_bias = jnp.where(own_mask, 0.0, hidden).swapaxes(1, 2)[:, None, None]  # [B, 1, 1, N, M]
    if bias is not None:
        own_bias = own_bias + bias[0]

    def scores(keys, shift, scale=None):
        """``[B * K, G * N, slots]``, the axis of the softmax last; ``scale``: of each slot.

        The product has the keys first, the order in which the CPU backend streams a cache once;
        the barrier keeps the transposition from being folded into it.
        """
        s = jnp.einsum("bsd,bdm->bsm", keys, q, preferred_element_type=jnp.float32)
        s = backend.fence(s).swapaxes(1, 2).reshape(batch, heads, groups, nodes, -1)
        s = s if scale is None else s * scale.swapaxes(2, 3)[:, :, None]
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        s = s + shift
        return s.reshape(batch * heads, groups * nodes, -1)

    def weigh(weights, values):
        return jnp.einsum(
            "bms,bsd->bmd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )

    def add(state, scored, values, scale):
        """A running softmax (2205.14135): unnormalised output, maximum, sum; and a further part."""
        out, top, total = state
        higher = jnp.maximum(top, jnp.max(scored, axis=-1, keepdims=True))
        fade, weights = jnp.exp(top - higher), jnp.exp(scored - higher)
        total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
        if scale is not None:
            weights = weights.reshape(batch, heads, groups * nodes, -1) * scale.swapaxes(2, 3)
            weights = weights.reshape(batch * heads, groups * nodes, -1)
        return out * fade + weigh(weights, values), higher, total

    def past(state, size, begin=0):
        """Adds the slots ``begin ...`` of the prefix, at most ``size``."""
        slots = prefix[0].shape[2]
        start = jnp.minimum(begin, slots - size)
        parts = [jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in prefix]
        of_keys, of_values = parts[2:] or (None, None)  # scales
        keys, values = (x.reshape(batch * heads, size, -1) for x in numbers(parts[:2], q.dtype))
        slot = start + jnp.arange(size)
        seen = (slot >= begin) & (slot < length[:, None])
        if window is None:
            seen = seen[:, None]  # [B, N or 1, slots]
        else:
            newest = length[:, None] - 1
            held = newest - (newest - slot) % (slots - sinks)  # the position in each slot
            near = held[:, None] > positions[:, :, None] - window
            seen = seen[:, None] & (near | (slot < sinks) if sinks else near)
        shift = jnp.where(seen, 0.0, hidden)[:, None, None]
        if bias is not None:
            shift = shift + jax.lax.dynamic_slice_in_dim(bias[1], start, size, axis=-1)
        return add(state, scores(keys, shift, of_keys), values, of_values)

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


def _attend_causal(query, key, value, own_mask, softcap, einsum):
    """``attend`` of whole sequences without a cache, as training has them.

    Blocks of nodes are scored against the entries up to their own end, so that half of the scores
    are never computed. The queries come first in the product: with the keys first, as ``attend``
    has them for a cache, the derivative of the softmax would be transposed in memory.
    """
    batch, heads, size, groups, nodes = query.shape
    q = (query * size**-0.5).transpose(0, 1, 3, 4, 2)  # [B, K, G, N, E]
    q = q.reshape(batch * heads, groups, nodes, size)
    keys, values = (x.reshape(batch * heads, nodes, size) for x in (key, value))
    shift = jnp.where(own_mask, 0.0, jnp.float32(-1e30)).swapaxes(1, 2)[:, None, None]
    outs = []
    for begin in range(0, nodes, CAUSAL_BLOCK):
        end = min(begin + CAUSAL_BLOCK, nodes)
        own = q[:, :, begin:end].reshape(batch * heads, -1, size)
        s = einsum("bmd,bsd->bms", own, keys[:, :end])
        s = s if softcap is None else softcap * jnp.tanh(s / softcap)
        s = s.reshape(batch, heads, groups, end - begin, end) + shift[..., begin:end, :end]
        s = s.reshape(batch * heads, -1, end)
        weights = jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True)))
        out = einsum("bms,bsd->bmd", weights.astype(values.dtype), values[:, :end])
        out = out / jnp.sum(weights, axis=-1, keepdims=True)
        outs.append(out.reshape(batch, heads, groups, end - begin, size))
    out = jnp.concatenate(outs, axis=3) if len(outs) > 1 else outs[0]
    return out.astype(query.dtype).transpose(0, 1, 4, 2, 3)
