"""DFlash's block and Meta's heads against slow ones that know no cache; their broken twins."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_oracle import (
    BATCH,
    LAYERS,
    MASK,
    MASKS,
    SLOTS,
    TARGET,
    begun,
    layer_of,
    rms,
    slow_block,
    weights_of,
)
from toys import own_params

import specjax
from specjax.drafters.block import BlockConfig, BlockDrafter
from specjax.drafters.mtp_heads import MTPHeadsConfig, ParallelHeads
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")
WINDOWED = dataclasses.replace(LAYERS, window=3, local_layers=(True, False))
BLOCKS = {
    "bidirectional": BlockConfig(
        layers=LAYERS, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 1, 2)
    ),
    "a causal layer with a window": BlockConfig(
        layers=WINDOWED, block_size=MASKS + 1, mask_token=MASK, target_layers=(2,)
    ),
    "all layers causal": BlockConfig(  # JetSpec's, here with a window in the first layer
        layers=WINDOWED, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 2), causal=True
    ),
}


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


def read(lm, drafter, params, tokens):
    """What the drafter's logits ``[B, K, V]`` are in ``begun``; and the lengths, root counted."""
    state, context, features = begun(lm, drafter, params, tokens)
    logits = first_level(drafter, params, state, context)
    return np.asarray(logits), np.asarray(context.length), np.asarray(features)


@functools.partial(jax.jit, static_argnums=0)
def first_level(drafter, params, state, context):
    level, carry = drafter.make_level(*own_params(params), state, context)
    return level(carry, Draft(start=context.length - 1, tokens=context.root[:, None]), 0)[1]


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


FAULTS = ("features shifted", "positions off by one")
MASKINGS = {
    "bidirectional": ("causal",),
    "a causal layer with a window": ("causal", "both ways"),
    "all layers causal": ("both ways",),
}


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
        np.asarray(x[...], np.float32)
        for x in (lm.params["embedding"], lm.params["lm_head"]["weight"])
    )
    w = jax.tree.map(np.asarray, params["drafter"])

    def slow(row, fault=None):
        behind = features[row, : lengths[row] - 1]
        if name in BLOCKS:
            root = tokens[row, lengths[row] - 1]
            states = slow_block(drafter.config, w, behind, root, table, fault)[1:]
        else:
            states = slow_heads(drafter.config, w, behind, fault)
        return states @ head.T

    for row in range(BATCH):
        np.testing.assert_allclose(found[row], slow(row), atol=2e-4)
        for fault in FAULTS + MASKINGS.get(name, ()):
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
    with pytest.raises(ValueError, match="the tree is 5 deep, .* 3 places .*block_size=4"):
        BlockDrafter(config=BlockConfig(**good), target=lm.target, topology=specjax.trees.chain(5))
    experts = dataclasses.replace(LAYERS, num_experts=4, experts_per_token=2, expert_size=4)
    with pytest.raises(ValueError, match="no experts"):
        MTPHeadsConfig(layers=experts)
