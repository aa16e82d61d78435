"""A decoder in NumPy without a cache: one pass over a text, and a mask of which token sees which.

It is the reference for small caches, of decoders with the shape of Llama.
"""

import math

import jax
import numpy as np


def masked(size, window, sinks, begin=0):
    """Which token (row) sees which (column); all earlier ones where it stands before ``begin``."""
    i, j = np.arange(size)[:, None], np.arange(size)
    return (j <= i) & ((j < sinks) | (j > i - window) | (i < begin))


def from_scratch(config, weights, tokens, sees, queries=None, stored=None):
    """Logits ``[T, V]``, and keys and values ``[T, K, E]`` of each layer, of ``tokens [T]``.

    ``sees``: bool ``[T, T]``, or for each layer bool ``[K, 1, T, T]``; ``queries``: a list to which
    those of each layer are added, ``[T, K, G, E]``; ``stored``: what becomes of keys and values.
    """
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)
    c, size, count = config, config.head_dim, len(tokens)
    turn = np.arange(count)[:, None] * c.rope_theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(turn)[:, None], np.sin(turn)[:, None]

    def normed(x, norm):
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + c.norm_eps) * norm["weight"][...]

    def rotated(x):
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)

    x, entries = weights["embedding"][...][tokens], []
    for i in range(c.num_layers):
        block = weights["blocks"][i]
        own = {name: block["attention"][name]["weight"][...] for name in "qkvo"}
        read = normed(x, block["attention_norm"])
        q, k, v = ((read @ own[name].T).reshape(count, -1, size) for name in "qkv")
        q, k = rotated(q).reshape(count, c.num_kv_heads, c.num_groups, size), rotated(k)
        if stored is not None:
            k, v = stored(k), stored(v)
        entries.append((k, v))
        queries = [] if queries is None else queries
        queries.append(q)
        scores = np.einsum("nkge,mke->kgnm", q, k) / math.sqrt(size)
        scores = np.where(sees[i] if isinstance(sees, list) else sees, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=3, keepdims=True))
        shares /= shares.sum(axis=3, keepdims=True)
        x = x + np.einsum("kgnm,mke->nkge", shares, v).reshape(count, -1) @ own["o"].T
        read = normed(x, block["mlp_norm"])
        gate, up, down = (block["mlp"][name]["weight"][...] for name in ("gate", "up", "down"))
        gate = read @ gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (read @ up.T)) @ down.T
    return normed(x, weights["norm"]) @ weights["lm_head"]["weight"][...].T, entries


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)
