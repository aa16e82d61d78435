"""The logits of models in NumPy, from their papers: float64, one text at a time, without a cache.

Nothing of the package is imported. Each function returns the logits float64 ``[T, V]`` after each
of T tokens, and bool ``[T]``, whether they are sure: not where rounding might choose other experts.
"""

from __future__ import annotations

import math

import numpy as np

ROUTING_TIE = 1e-4  # experts whose scores are this close may be swapped in float32
ERF = np.vectorize(math.erf, otypes=[np.float64])


def bag_logits(params, tokens):
    """The toy of ``tests/stranger.py``: a sum of token vectors, each waved by its position."""
    embed, out = (np.asarray(params[name], np.float64) for name in ("embed", "out"))
    wave = 1.0 + 0.5 * np.cos(np.arange(len(tokens)))
    state = np.cumsum(embed[tokens] * wave[:, None], axis=0)
    return np.tanh(state) @ out, np.ones(len(tokens), bool)


def decoder_logits(config, params, tokens):
    """A decoder of any family, by its configuration; ``params``: nested dictionaries of arrays."""
    c, count = config, len(tokens)
    x, sure = params["embedding"][tokens], np.ones(count, bool)
    if c.scale_embeddings:
        x = x * c.hidden_size**0.5
    if c.positions == "learned":
        x = x + params["position_embedding"][np.arange(count) + c.position_offset]
    for i in range(c.num_layers):
        block, mix = params["blocks"][i], latent_attention if c.kv_rank else attention
        out = mix(c, block["attention"], normed(c, block["attention_norm"], x), i)
        if c.sandwich_norms:
            out = normed(c, block["attention_post_norm"], out)
        after = x + out
        read = normed(c, block["mlp_norm"], x if c.parallel_residual else after)
        if c.has_experts(i):
            out, certain = experts(c, block["mlp"], read)
            sure &= np.logical_and.accumulate(certain)  # later tokens read earlier ones
        else:
            out = feed_forward(c, block["mlp"], read)
        if c.sandwich_norms:
            out = normed(c, block["mlp_post_norm"], out)
        x = after + out
    table = params["embedding"] if c.tie_embeddings else params["lm_head"]["weight"]
    return capped(normed(c, params["norm"], x) @ table.T, c.logit_softcap), sure


def normed(c, params, x, kind=None, eps=None):
    """RMS norm or layer norm over the last axis."""
    weight = params["weight"] + (1.0 if c.norm_plus_one else 0.0)
    if (kind or c.norm) == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + (eps or c.norm_eps)) * weight
    return x + params["bias"] if params.get("bias") is not None else x


def linear(params, x):
    y = x @ params["weight"].T
    return y + params["bias"] if params.get("bias") is not None else y


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def turned(x, dim, theta, stretch=1.0, paired=False):
    """Rotary embedding of the first ``dim`` features of ``x`` ``[T, A, E]``; token t is at t.

    ``stretch``: positions are divided by it. ``paired``: the two features of a pair are neighbours,
    else half of ``dim`` apart.
    """
    angle = np.arange(len(x))[:, None] / stretch * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x = x.copy()
    places = (slice(0, dim, 2), slice(1, dim, 2))
    first, second = places if paired else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin
    return x


def rotation(c, layer):
    """The base of a layer's rotary embedding, and the stretch of linear scaling."""
    scaling = dict(c.rope_scaling or ())
    if c.window_of(layer) is not None and c.local_rope_theta is not None:
        return dict(theta=c.local_rope_theta)
    if scaling.get("rope_type", "default") == "default":
        return dict(theta=c.rope_theta)
    if scaling["rope_type"] != "linear":
        raise NotImplementedError(scaling["rope_type"])
    return dict(theta=c.rope_theta, stretch=scaling["factor"])


def seen(c, layer, count):
    """bool ``[T, T]``: whether the token of the row sees that of the column."""
    apart = np.arange(count)[:, None] - np.arange(count)
    window = c.window_of(layer)
    return (apart >= 0) & (apart < (count if window is None else window))


def weighted(c, scores, sees):
    scores = np.where(sees, capped(scores, c.score_softcap), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(c, params, x, layer):
    """Grouped-query attention."""
    count, size = len(x), c.head_dim
    q, k, v = (linear(params[name], x).reshape(count, -1, size) for name in "qkv")
    if c.qk_norm:
        q, k = (normed(c, params[f"{name}_norm"], y, "rms") for name, y in (("q", q), ("k", k)))
    if c.positions == "rope":
        q, k = (turned(y, c.rotary_dim, **rotation(c, layer)) for y in (q, k))
    k, v = (np.repeat(y, c.num_groups, axis=1) for y in (k, v))
    scores = np.einsum("tae,sae->ats", q, k) / math.sqrt(c.query_scalar or size)
    out = np.einsum("ats,sae->tae", weighted(c, scores, seen(c, layer, count)), v)
    return linear(params["o"], out.reshape(count, -1))


def latent_attention(c, params, x, layer):
    """Multi-head latent attention with keys and values written out for each head."""
    count, heads = len(x), c.num_heads
    if c.q_rank is None:
        q = linear(params["q"], x)
    else:
        latent = normed(c, params["q_a_norm"], linear(params["q_a"], x), "rms", 1e-6)
        q = linear(params["q_b"], latent)
    q = q.reshape(count, heads, c.nope_dim + c.rope_dim)
    both = linear(params["kv_a"], x)
    latent = normed(c, params["kv_a_norm"], both[:, : c.kv_rank], "rms", 1e-6)
    rotate = dict(dim=c.rope_dim, paired=c.rope_interleaved, **rotation(c, layer))
    shared = turned(both[:, None, c.kv_rank :], **rotate)[:, 0]
    kv = linear(params["kv_b"], latent).reshape(count, heads, c.nope_dim + c.value_dim)
    plain = np.einsum("tau,sau->ats", q[..., : c.nope_dim], kv[..., : c.nope_dim])
    scores = plain + np.einsum("tap,sp->ats", turned(q[..., c.nope_dim :], **rotate), shared)
    scores = scores / math.sqrt(c.nope_dim + c.rope_dim)
    weights = weighted(c, scores, seen(c, layer, count))
    out = np.einsum("ats,saw->taw", weights, kv[..., c.nope_dim :])
    return linear(params["o"], out.reshape(count, -1))


def activation(name, x):
    if name == "relu":
        return np.maximum(x, 0.0)
    if name == "silu":
        return x / (1.0 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1.0 + ERF(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(c, params, x):
    up = linear(params["up"], x)
    if params.get("gate") is None:
        return linear(params["down"], activation(c.activation, up))
    return linear(params["down"], activation(c.activation, linear(params["gate"], x)) * up)


def experts(c, params, x):
    """A mixture of experts, token by token; and bool ``[T]``, whether their choice is sure."""
    logits, own = x @ params["router"]["weight"].T, params["experts"]
    if c.routing == "noaux_tc":
        scores = 1.0 / (1.0 + np.exp(-logits))
        wanted, best = scores + params["router"]["bias"], 2
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = wanted = scores / scores.sum(axis=1, keepdims=True)
        best = 1
    out, sure = np.zeros_like(x), np.ones(len(x), bool)
    for t, row in enumerate(wanted):
        if c.routing != "greedy":
            groups = row.reshape(c.expert_groups, -1)
            kept, sure[t] = greatest(np.sort(groups)[:, -best:].sum(axis=1), c.groups_per_token)
            groups = np.where(np.isin(np.arange(len(groups)), kept)[:, None], groups, -np.inf)
            row = groups.reshape(-1)
        chosen, certain = greatest(row, c.experts_per_token)
        sure[t] &= certain
        weights = scores[t, chosen]
        if c.norm_expert_weights:
            weights = weights / (weights.sum() + 1e-20)
        for expert, weight in zip(chosen, weights * c.expert_scale, strict=True):
            gate, up = own["gate"][expert] @ x[t], own["up"][expert] @ x[t]
            out[t] += weight * (own["down"][expert] @ (activation(c.activation, gate) * up))
    if params.get("shared") is not None:
        out = out + feed_forward(c, params["shared"], x)
    return out, sure


def greatest(values, count):
    """The indices of the ``count`` greatest values, and whether no other one comes close."""
    order = np.argsort(-values, kind="stable")
    sure = count >= len(values) or values[order[count - 1]] - values[order[count]] > ROUTING_TIE
    return order[:count], bool(sure)
