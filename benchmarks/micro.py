"""Times single operations against the alternatives that were not chosen.

Products with a few activations in every operand order justify ``layers.product``. Attention over a
cache in several layouts justifies ``models.attention``.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from specjax import kernels
from specjax.analysis import timing
from specjax.kernels.attention import prefix_sizes
from specjax.models.layers import product

from .figures import spread

TIMES = 4  # repetitions of the operation within one timed program


def product_orders(
    bench,
    *,
    columns: list[int],
    outputs: int = 8192,
    inputs: int = 2048,
    repetitions: int = 15,
) -> dict:
    """Measures the milliseconds of ``W x`` with M activations, in each operand order.

    ``row-major``: activations ``[M, in]`` times ``W [in, out]``; ``transposed``: the same with
    ``W [out, in]``; ``feature-major``: ``W [out, in] @ x [in, M]``; ``product``: the function that
    the models use. All have the same weights, which are read from memory anew for each M.
    """
    dtype = jnp.dtype(bench.dtype)
    weight = jax.random.normal(jax.random.key(0), (outputs, inputs)) / math.sqrt(inputs)
    weight = jax.block_until_ready(weight.astype(dtype))
    flipped = jax.block_until_ready(jnp.copy(weight.T))
    orders = {
        "row-major": (lambda w, x: x @ w, flipped, False),
        "transposed": (lambda w, x: jnp.einsum("mi,oi->mo", x, w), weight, False),
        "feature-major": (lambda w, x: w @ x, weight, True),
        "product": (product, weight, True),
    }
    found = {}
    for m in columns:
        calls = {}
        for name, (compute, w, featured) in orders.items():
            x = jnp.ones((inputs, m) if featured else (m, inputs), dtype)
            calls[name] = _repeated(compute, w, x)
        seconds = timing.alternate(calls, repetitions=repetitions)
        found[m] = {name: spread(1e3 * s) for name, s in seconds.items()}
    return {"milliseconds": found, "megabytes": weight.nbytes / 1e6}


def attention_layouts(
    bench,
    *,
    lengths: list[int],
    nodes: list[int],
    heads: int = 12,
    kv_heads: int = 4,
    size: int = 64,
    repetitions: int = 9,
) -> dict:
    """Measures the milliseconds of one layer's attention of N nodes to S slots, by layout.

    ``BSKE`` and ``BKSE``: plain einsums over caches ``[B, S, K, E]`` and ``[B, K, S, E]``;
    ``jax``: ``jax.nn.dot_product_attention``; ``attend``: the function that the models use.
    """
    dtype, found = jnp.dtype(bench.dtype), {}
    groups = heads // kv_heads
    for s in lengths:
        for n in nodes:
            keys = jax.random.split(jax.random.key(0), 3)
            q = jax.random.normal(keys[0], (1, kv_heads, size, groups, n), dtype)
            k, v = (jax.random.normal(x, (1, kv_heads, s, size), dtype) for x in keys[1:])
            seconds = timing.alternate(_layouts(q, k, v), repetitions=repetitions)
            found[f"{s}, {n}"] = {name: spread(1e3 * t) for name, t in seconds.items()}
    return {"milliseconds": found}


def _layouts(q, k, v) -> dict[str, timing.Call]:
    """Returns calls that attend with ``q [B, K, E, G, N]`` to ``k, v [B, K, S, E]``."""
    batch, kv_heads, size, groups, nodes = q.shape
    slots = k.shape[2]
    by_slot = tuple(jax.block_until_ready(x.transpose(0, 2, 1, 3)) for x in (k, v))
    rows = q.transpose(0, 4, 1, 3, 2)  # [B, N, K, G, E]

    def slot_major(kv, x):
        weights = jax.nn.softmax(jnp.einsum("bnkge,bske->bkgns", x, kv[0]) * size**-0.5)
        return jnp.einsum("bkgns,bske->bnkge", weights, kv[1])

    def head_major(kv, x):
        weights = jax.nn.softmax(jnp.einsum("bnkge,bkse->bkgns", x, kv[0]) * size**-0.5)
        return jnp.einsum("bkgns,bkse->bnkge", weights, kv[1])

    def of_jax(kv, x):
        flat = x.reshape(batch, nodes, kv_heads * groups, size)
        return jax.nn.dot_product_attention(flat, *kv).reshape(x.shape)

    def ours(kv, x):
        own = jnp.zeros((batch, kv_heads, nodes, size), x.dtype)
        sees = jnp.tril(jnp.ones((nodes, nodes), bool)).T[None]
        length = jnp.full((batch,), slots, jnp.int32)
        choice = jnp.int32(len(prefix_sizes(slots)) - 1)
        query = x.transpose(3, 0, 2, 1, 4)  # of the layout of a projection, as models have it
        out = kernels.current().attend(query, own, own, sees, kv, length, choice)
        return out.transpose(1, 3, 2, 0, 4)

    return {
        "BSKE": _repeated(slot_major, by_slot, rows),
        "BKSE": _repeated(head_major, (k, v), rows),
        "jax": _repeated(of_jax, by_slot, rows),
        "attend": _repeated(ours, (k, v), q.transpose(1, 3, 2, 0, 4)),
    }


def _repeated(compute, constant, x) -> timing.Call:
    """Runs ``compute(constant, x)`` ``TIMES`` times in one program, with a changed ``x``."""

    @jax.jit
    def run(constant, x):
        def step(_, x):
            y = compute(constant, x)
            # depends on all of y, so that XLA leaves no part of it out, and hardly changes x
            return x + (jnp.sum(y) * 1e-30).astype(x.dtype)

        return jax.lax.fori_loop(0, TIMES, step, x)

    return timing.Call(functools.partial(run, constant, x), times=TIMES)
