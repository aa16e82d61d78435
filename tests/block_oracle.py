"""A block drafter by slow passes that know no cache, and a state to compare it in."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from toys import own_params, whole

from specjax import Sampling
from specjax.models import DecoderConfig
from specjax.types import Context, Segment

TARGET = Path(__file__).parent / "golden" / "heads" / "target"  # a Llama of two layers
BATCH, SLOTS, MASK, MASKS = 2, 24, 7, 3
LAYERS = DecoderConfig(
    vocab_size=72,
    hidden_size=24,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=64,
    qk_norm=True,
)


def weights_of(drafter):
    """Random ones, none of them zero."""
    leaves, structure = jax.tree.flatten(nnx.to_pure_dict(drafter.shapes))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        0.4 * jax.random.normal(k, x.shape) + (x.ndim == 1)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


@functools.partial(jax.jit, static_argnums=(0, 1))
def seen(model, layers, params, tokens):
    """Hidden states ``[B, T, F]`` of the target."""
    cache = model.init(params, *tokens.shape)
    return model.verify(params, cache, whole(tokens), features=layers, logits=False).features


def begun(lm, drafter, params, tokens):
    """The drafter's state after a prompt of 6 and 4 tokens, and then an accepted path of 2 and 3
    beside columns that are not valid; the context; and the target's hidden states."""
    features = seen(lm.target, drafter.features, lm.params, tokens)
    return *_read(drafter, params, tokens, features), features


@functools.partial(jax.jit, static_argnums=0)
def _read(drafter, params, tokens, features):
    """The state and the context of ``begun``, by one program."""
    state, start = drafter.init(*own_params(params), BATCH, SLOTS), jnp.zeros((BATCH,), jnp.int32)
    for width, num in ((6, (6, 4)), (4, (2, 3))):
        where = start[:, None] + jnp.arange(width)
        segment = Segment(
            tokens=jnp.take_along_axis(tokens, where, axis=1),
            next=jnp.take_along_axis(tokens, where + 1, axis=1),
            features=jnp.take_along_axis(features, where[..., None], axis=1),
            start=start,
            num=jnp.asarray(num),
        )
        state = drafter.observe(*own_params(params), state, segment)
        start = start + segment.num
    context = Context(
        tokens=tokens,
        length=start + 1,
        budget=jnp.full((BATCH,), 9),
        key=jax.random.split(jax.random.key(0), BATCH),
        sampling=Sampling().rows(BATCH),
    )
    return state, context


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + LAYERS.norm_eps) * weight


def turned(x, positions):
    """Rotary embedding of ``x [T, heads, E]``."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / LAYERS.rope_theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def linear(layer, x):
    return x @ layer["weight"].T


def convolved(block, name, read, fault=None):
    """The input of a sublayer for its normed input ``read [T, H]``, and a function that convolves
    its output; both as they are where the layer has no such convolutions."""
    if name not in block:
        return read, lambda out: out
    base, projection = block[name]["base_kernel"], block[name]["kernel_projection"]
    (_, taps, size), places = base.shape, len(read)

    def run(side, x, by):
        dynamic = linear(projection, by).reshape(places, 2, taps, -1)[:, side]
        dynamic = np.repeat(dynamic, size // dynamic.shape[-1], axis=-1)
        kernel, total = base[side] + dynamic, np.zeros_like(x)
        for tap in range(taps):
            moved = np.roll(x, tap, axis=0)
            moved[:tap] *= fault == "taps go around"
            total += kernel[:, tap] * moved
        return total

    return run(0, read, read), lambda out: run(1, out, out if fault == "by the output" else read)


def layer_of(block, queries, keys, at, of, sees, fault=None):
    """A layer's output for ``queries [T, H]`` at positions ``at``, which attend to what is made of
    ``keys [S, H]`` at ``of``; ``sees [T, S]``."""
    own, E = block["attention"], LAYERS.head_dim

    def heads(name, x):
        return linear(own[name], x).reshape(len(x), -1, E)

    x = rms(queries, block["attention_norm"]["weight"])
    x, leave = convolved(block, "attention_conv", x, fault)
    q = turned(rms(heads("q", x), own["q_norm"]["weight"]), at)
    k = turned(rms(heads("k", keys), own["k_norm"]["weight"]), of)
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, heads("v", keys)))
    scores = np.einsum("tae,sae->ats", q, k) / np.sqrt(E)
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("ats,sae->tae", weights / weights.sum(-1, keepdims=True), v)
    x = queries + leave(linear(own["o"], out.reshape(len(x), -1)))
    y, mlp = rms(x, block["mlp_norm"]["weight"]), block["mlp"]
    y, leave = convolved(block, "mlp_conv", y, fault)
    gate = linear(mlp["gate"], y)
    return x + leave(linear(mlp["down"], gate / (1 + np.exp(-gate)) * linear(mlp["up"], y)))


def slow_block(config, w, features, root, table, fault=None, shown=(MASK,) * MASKS):
    """States ``[masks + 1, H]`` of all places of a block, the root's first, for one row, whose
    ``features [S, F]`` are all that there are before the root; ``shown`` are the tokens that the
    block holds after the root."""
    if fault == "features shifted":
        features = np.roll(features, 1, axis=0)
    behind = len(features)
    context = rms(linear(w["fc"], features), w["hidden_norm"]["weight"])
    x = table[np.asarray([root, *shown])]
    of = np.arange(behind + MASKS + 1)
    at = of[behind:] + (fault == "positions off by one")
    of = np.concatenate([of[:behind], at])
    for i in range(config.layers.num_layers):
        sees, block = np.ones((len(x), len(of)), bool), w["layers"]["blocks"][i]
        window = config.layers.window_of(i)
        causal = window is not None if config.causal is None else config.causal
        if (causal or fault == "causal") and fault != "both ways":
            sees &= of <= at[:, None]
        if window is not None:
            sees &= of > at[:, None] - window
        own = rms(x, block["attention_norm"]["weight"])
        own, _ = convolved(block, "attention_conv", own, fault)
        x = layer_of(block, x, np.concatenate([context, own]), at, of, sees, fault)
    return rms(x, w["layers"]["norm"]["weight"])


def whole_law(scores, base):
    """Float ``[D, V]``: the law of the block, in which candidates share by their scores ``[D, V]``
    (-inf elsewhere) what the logits ``base`` give them all."""
    law, among = (np.exp(x - x.max(axis=-1, keepdims=True)) for x in (base, scores))
    law, among = (x / x.sum(axis=-1, keepdims=True) for x in (law, among))
    own = np.isfinite(scores)
    return np.where(own, among * (law * own).sum(axis=-1, keepdims=True), law)
