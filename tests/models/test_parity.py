"""Logits equal those of transformers: by committed golden files, and live where torch is."""

import numpy as np
import pytest
from checkpoints import CASES, GOLDEN, golden_maker, logits_of
from flax import nnx

from specjax.models import load_config, load_weights, save_pretrained
from specjax.models.causal_lm import graph_definition
from specjax.models.families import FAMILIES
from specjax.models.layers import rope_frequencies
from specjax.models.translate import config_from_hf

TOLERANCE = 1e-4  # on logits of size 4 to 13
MAKER = golden_maker()


def test_every_family_has_a_golden_file():
    found = {load_config(GOLDEN / case).model_type for case in CASES}
    assert found | {"mimo"} == set(FAMILIES)  # with its modules: tests/test_mtp.py
    assert set(CASES) == set(MAKER.CASES)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_golden_ones(case):
    expected = np.load(GOLDEN / case / "expected.npz")
    found = logits_of(GOLDEN / case, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_pytorch_in_both_directions(case, tmp_path):
    """transformers writes, we read; we write, transformers reads. float32, other weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = MAKER.random_model(case, seed=1000)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    tokens = np.random.default_rng(7).integers(64, size=(2, 40))
    expected = MAKER.logits_of(theirs, tokens)
    found = logits_of(tmp_path / "theirs", tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)

    config = load_config(tmp_path / "theirs")
    ours = nnx.merge(graph_definition(config), load_weights(tmp_path / "theirs", config))
    save_pretrained(ours, tmp_path / "ours")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_allclose(MAKER.logits_of(again, tokens), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ["llama_scaled", "gpt2"])
def test_tapped_hidden_states_are_counted_as_transformers_counts_them(case, tmp_path):
    """0: the embeddings; i: the output of layer i; the last one is normed."""
    torch = pytest.importorskip("torch")
    theirs = MAKER.random_model(case, seed=2000)
    theirs.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    ours = nnx.merge(graph_definition(config), load_weights(tmp_path, config))
    tokens = np.random.default_rng(8).integers(64, size=(2, 10))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens), output_hidden_states=True).hidden_states
    positions = np.broadcast_to(np.arange(10), (2, 10))
    sees = np.triu(np.ones((1, 10, 10), bool))
    tapped = ours.hidden(tokens, positions, sees, taps=(0, 1, 2))[1]
    np.testing.assert_allclose(tapped, np.concatenate(expected, axis=-1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "scaling",
    [
        dict(rope_type="default"),
        dict(rope_type="linear", factor=4.0),
        MAKER.LLAMA3 | dict(original_max_position_embeddings=8192),
        dict(rope_type="yarn", factor=4.0),
        dict(rope_type="yarn", factor=4.0, truncate=False, beta_fast=16.0, beta_slow=2.0),
        dict(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.5),
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_rotations_stay_those_of_pytorch_at_position_100_000(scaling):
    """A frequency that is off by one bit there turns by 0.01 radians."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters=dict(scaling, rope_theta=5e5),
    )
    reference = LlamaRotaryEmbedding(theirs)
    config = config_from_hf(theirs.to_dict())
    inverse, factor = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, config.max_positions
    )
    assert np.abs(1e5 * (inverse - reference.inv_freq.numpy())).max() < 1e-4
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-6)
