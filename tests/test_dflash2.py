"""DFlash2 against a slow one that knows no cache, its broken twins, its layout and its shapes."""

import dataclasses
import json

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
    slow_block,
    weights_of,
    whole_law,
)
from safetensors.numpy import load_file
from toys import own_params, said_below

import specjax
from specjax import trees
from specjax.drafters import DFlash2
from specjax.drafters.dflash2 import DFlash2Config
from specjax.sampling import drawing

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = dict(layers=LAYERS, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 1, 2))
SIZES = dict(conv_taps=2, conv_group=8, selector_rank=5, num_candidates=4)
CONFIG = DFlash2Config(**SHAPE, **SIZES)


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


def said(drafter, params, state, context, paths):
    return said_below(drafter, *own_params(params), state, context, paths)[0]


def slow(config, w, base, hidden, path, fault=None):
    """The same ``[D, V]`` of one row, for logits ``base`` and states ``hidden`` of its places."""
    select, found = w["selector"], []
    for place, before in enumerate(path):
        read = np.arange(len(hidden)) if fault == "the place before" else None
        state = hidden[place] if read is None else hidden[max(place - 1, 0)]
        ahead, behind = ("successors", "predecessors")[:: -1 if fault == "turned" else 1]
        edge = select[behind][before] * (select["projection"]["weight"] @ state)
        scores = base[place] + select[ahead] @ edge
        ranked = scores if fault == "candidates by scores" else base[place]
        others = np.argsort(-ranked, kind="stable")[config.num_candidates :]
        scores[others] = -np.inf
        found.append(scores)
    return np.stack(found)


CONVOLVED = ("taps go around", "by the output", "causal", "positions off by one")
SELECTED = ("the place before", "turned", "candidates by scores")


def test_logits_are_those_of_a_slow_drafter_and_its_broken_twins_differ(lm):
    """Logits below each token of a path, by passes over whole texts."""
    drafter = DFlash2(config=CONFIG, target=lm.target)
    tokens = np.random.default_rng(3).integers(0, 72, (BATCH, SLOTS)).astype(np.int32)
    params = {"target": lm.params, "drafter": weights_of(drafter)}
    state, context, features = begun(lm, drafter, params, tokens)
    lengths = np.asarray(context.length)
    drawn = np.random.default_rng(4).integers(0, 72, (BATCH, MASKS - 1))
    paths = np.concatenate([tokens[np.arange(BATCH), lengths - 1][:, None], drawn], axis=1)
    run_said = jax.jit(said, static_argnums=0)
    found = np.asarray(run_said(drafter, params, state, context, paths))
    drawing = dataclasses.replace(drafter, sibling_sampling="iid")
    drawn_from = np.exp(np.asarray(run_said(drawing, params, state, context, paths)))
    embedding, head = lm.params["embedding"][...], lm.params["lm_head"]["weight"][...]
    table, head = np.asarray(embedding, np.float32), np.asarray(head, np.float32)
    w = jax.tree.map(np.asarray, params["drafter"])

    def places(row, fault=None):
        features_before = np.asarray(features[row, : lengths[row] - 1])
        return slow_block(CONFIG, w, features_before, paths[row, 0], table, fault)[1:]

    def twin(row, fault=None):
        hidden = places(row, fault if fault in CONVOLVED else None)
        return slow(CONFIG, w, hidden @ head.T, hidden, paths[row], fault)

    for row in range(BATCH):
        np.testing.assert_allclose(found[row], twin(row), atol=5e-4)
        law = whole_law(twin(row), places(row) @ head.T)  # where tokens are drawn
        np.testing.assert_allclose(drawn_from[row], law, atol=2e-5)
        assert (law.argmax(axis=1) == found[row].argmax(axis=1)).all()
        assert (np.isfinite(found[row]).sum(axis=1) == CONFIG.num_candidates).all()
        for fault in CONVOLVED + SELECTED:
            wrong, right = (np.maximum(x, -1e9) for x in (twin(row, fault), found[row]))
            assert np.abs(wrong - right).max() > 0.01, fault


def test_convolutions_begin_as_the_identity():
    from flax import nnx

    layers = DFlash2.module(CONFIG, rngs=nnx.Rngs(0))
    conv = layers.layers.blocks[0].mlp_conv
    x = jnp.asarray(np.random.default_rng(0).normal(size=(24, 8)), jnp.float32)
    read, dynamic = conv.enter(x, 2)
    np.testing.assert_array_equal(read, x)
    np.testing.assert_array_equal(conv.leave(2 * x, dynamic, 2), 2 * x)


def test_what_is_saved_has_the_authors_names_and_is_loaded_again(lm, tmp_path):
    layers = dataclasses.replace(LAYERS, model_type="qwen3")  # as files have them
    config = dataclasses.replace(CONFIG, layers=layers, target_layers=(1, 2))
    drafter = DFlash2(config=config, target=lm.target)
    params = weights_of(drafter)
    specjax.save_drafter(drafter, params, tmp_path, target=lm)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DFlash2DraftModel"]
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    assert written["block_size"] == MASKS + 1
    own |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4}
    assert written["dflash_config"] == own
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["layers.1.mlp_conv.base_kernel"].shape == (2, 2, 24)
    assert tensors["layers.0.attention_conv.kernel_projection.weight"].shape == (12, 24)
    assert tensors["candidate_selector.successor_codebook"].shape == (72, 5)
    again = specjax.load_drafter(tmp_path, lm)
    assert again.drafter == drafter
    for ours, theirs in zip(*map(jax.tree.leaves, (again.params, params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    del written["dflash_config"]["selector_rank"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="a DFlash2 drafter lacks selector_rank"):
        specjax.load_drafter(tmp_path, lm)


def test_shapes_that_do_not_fit_are_named(lm):
    for wrong, words in (
        (dict(conv_taps=0), "conv_taps=0"),
        (dict(conv_group=7), "conv_group=7: it does not divide hidden_size=24"),
        (dict(num_candidates=73), "num_candidates=73: .* the vocabulary has 72"),
    ):
        with pytest.raises(ValueError, match=words):
            DFlash2Config(**SHAPE | SIZES | wrong)
    with pytest.raises(ValueError, match="5 children, and each place has 4 candidates"):
        DFlash2(config=CONFIG, target=lm.target, topology=trees.branching(5))


def test_candidates_are_the_greatest_logits_and_no_vocabulary_is_sorted():
    """XLA sorts all numbers on a CPU where it merges ``top_k`` with a slice of what it returns."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4096))
    compiled = [
        jax.jit(lambda x, top=top: [y[:, 0] for y in top(x, 16)]).lower(x).compile()
        for top in (drawing.greatest, jax.lax.top_k)
    ]
    ours, merged = (one.as_text() for one in compiled)
    assert " sort(" not in ours
    assert jax.default_backend() != "cpu" or " sort(" in merged  # else the barrier is not needed
    for one, other in zip(compiled[0](x), compiled[1](x), strict=True):
        np.testing.assert_array_equal(one, other)
