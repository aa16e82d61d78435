"""DFlash's block and Meta's heads against slow ones that know no cache; their broken twins."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import own_params, whole

import specjax
from specjax import Sampling
from specjax.drafters.block import BlockConfig, BlockDrafter
from specjax.drafters.mtp_heads import MTPHeadsConfig, ParallelHeads
from specjax.models import DecoderConfig
from specjax.types import Context, Draft, Segment

pytestmark = pytest.mark.usefixtures("quick_compilation")
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
WINDOWED = dataclasses.replace(LAYERS, window=3, local_layers=(True, False))
BLOCKS = {
    "bidirectional": BlockConfig(
        layers=LAYERS, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 1, 2)
    ),
    "a causal layer with a window": BlockConfig(
        layers=WINDOWED, block_size=MASKS + 1, mask_token=MASK, target_layers=(2,)
    ),
}


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


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


def read(lm, drafter, params, tokens):
    """What the drafter's logits ``[B, K, V]`` are after a prompt of 6 and 4 tokens, and then an
    accepted path of 2 and 3 beside columns that are not valid; and the lengths, root counted."""
    features = seen(lm.target, drafter.features, lm.params, tokens)
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
    level, carry = drafter.make_level(*own_params(params), state, context)
    _, logits = level(carry, Draft(start=start, tokens=context.root[:, None]), 0)
    return np.asarray(logits), np.asarray(context.length), np.asarray(features)


# ------------------------------------------------------------------ the slow implementations


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


def layer_of(block, queries, keys, at, of, sees):
    """A layer's output for ``queries [T, H]`` at positions ``at``, which attend to what is made of
    ``keys [S, H]`` at ``of``; ``sees [T, S]``."""
    own, E = block["attention"], LAYERS.head_dim

    def heads(name, x):
        return linear(own[name], x).reshape(len(x), -1, E)

    x = rms(queries, block["attention_norm"]["weight"])
    q = turned(rms(heads("q", x), own["q_norm"]["weight"]), at)
    k = turned(rms(heads("k", keys), own["k_norm"]["weight"]), of)
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, heads("v", keys)))
    scores = np.einsum("tae,sae->ats", q, k) / np.sqrt(E)
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("ats,sae->tae", weights / weights.sum(-1, keepdims=True), v)
    x = queries + linear(own["o"], out.reshape(len(x), -1))
    y, mlp = rms(x, block["mlp_norm"]["weight"]), block["mlp"]
    gate = linear(mlp["gate"], y)
    return x + linear(mlp["down"], gate / (1 + np.exp(-gate)) * linear(mlp["up"], y))


def slow_block(config, w, features, root, table, fault=None):
    """Logits' states ``[masks, H]`` for one row, whose ``features [S, F]`` are all that there are
    before the root."""
    if fault == "features shifted":
        features = np.roll(features, 1, axis=0)
    behind = len(features)
    context = rms(linear(w["fc"], features), w["hidden_norm"]["weight"])
    x = table[np.asarray([root] + [MASK] * MASKS)]
    of = np.arange(behind + MASKS + 1)
    at = of[behind:] + (fault == "positions off by one")
    of = np.concatenate([of[:behind], at])
    for i in range(config.layers.num_layers):
        sees, block = np.ones((len(x), len(of)), bool), w["layers"]["blocks"][i]
        window = config.layers.window_of(i)
        if window is not None or fault == "causal":
            sees &= of <= at[:, None]
        if window is not None:
            sees &= of > at[:, None] - window
        own = rms(x, block["attention_norm"]["weight"])
        x = layer_of(block, x, np.concatenate([context, own]), at, of, sees)
    return rms(x, w["layers"]["norm"]["weight"])[1:]


def slow_heads(config, w, features, fault=None):
    """The same for parallel heads ``[K, H]`` at the last of ``features``."""
    if fault == "features shifted":
        features = np.roll(features, 1, axis=0)
    of, states = np.arange(len(features)) + (fault == "positions off by one"), []
    for i in range(config.num_heads):
        block = w["layers"]["blocks"][i]
        keys = rms(features, block["attention_norm"]["weight"])
        sees = np.tri(len(of), dtype=bool)[-1:]
        at = np.arange(len(features))[-1:]
        states.append(layer_of(block, features[-1:], keys, at, of, sees)[0])
    return rms(np.stack(states), w["layers"]["norm"]["weight"])


FAULTS = ("causal", "features shifted", "positions off by one")


@pytest.mark.parametrize("name", [*BLOCKS, "parallel heads"])
def test_logits_are_those_of_a_slow_drafter_without_a_cache_and_its_broken_twins_differ(lm, name):
    if name in BLOCKS:
        drafter = BlockDrafter(config=BLOCKS[name], target=lm.target)
    else:
        drafter = ParallelHeads(config=MTPHeadsConfig(layers=LAYERS), target=lm.target)
    tokens = np.random.default_rng(3).integers(0, 72, (BATCH, SLOTS)).astype(np.int32)
    params = {"target": lm.params, "drafter": weights_of(drafter)}
    found, lengths, features = read(lm, drafter, params, tokens)
    table, head = (
        np.asarray(x) for x in (lm.params["embedding"][...], lm.params["lm_head"]["weight"][...])
    )
    w = jax.tree.map(np.asarray, params["drafter"])

    def slow(row, fault=None):
        behind = features[row, : lengths[row] - 1]
        if name in BLOCKS:
            root = tokens[row, lengths[row] - 1]
            states = slow_block(drafter.config, w, behind, root, table, fault)
        else:
            states = slow_heads(drafter.config, w, behind, fault)
        return states @ head.T

    for row in range(BATCH):
        np.testing.assert_allclose(found[row], slow(row), atol=2e-4)
        for fault in FAULTS if name == "bidirectional" else FAULTS[1:]:
            assert np.abs(found[row] - slow(row, fault)).max() > 0.01, fault


def test_heads_over_whole_rows_are_those_of_the_drafter(lm):
    drafter = ParallelHeads(config=MTPHeadsConfig(layers=LAYERS), target=lm.target)
    tokens = np.random.default_rng(4).integers(0, 72, (BATCH, SLOTS)).astype(np.int32)
    params = {"target": lm.params, "drafter": weights_of(drafter)}
    found, lengths, features = read(lm, drafter, params, tokens)
    heads = drafter.heads(params["drafter"])
    whole = heads.logits(jnp.asarray(features), lm.target, lm.params)
    last = whole[jnp.arange(BATCH), lengths - 2]
    np.testing.assert_allclose(found, last, atol=1e-4)


def test_bad_shapes_are_named(lm):
    good = dict(layers=LAYERS, block_size=4, mask_token=7, target_layers=(1,))
    for wrong, words in (
        (dict(block_size=1), "block_size=1: .* at least one mask"),
        (dict(mask_token=72), "mask_token=72: .* 72 rows"),
        (dict(target_layers=()), "give at least one"),
    ):
        with pytest.raises(ValueError, match=words):
            BlockConfig(**good | wrong)
    with pytest.raises(ValueError, match="target_layers=.3,.: the target has 2 layers"):
        BlockDrafter(config=BlockConfig(**good | dict(target_layers=(3,))), target=lm.target)
    with pytest.raises(ValueError, match="the tree is 5 deep, and the drafter has 3 heads"):
        BlockDrafter(config=BlockConfig(**good), target=lm.target, topology=specjax.trees.chain(5))
    experts = dataclasses.replace(LAYERS, num_experts=4, experts_per_token=2, expert_size=4)
    with pytest.raises(ValueError, match="no experts"):
        MTPHeadsConfig(layers=experts)
