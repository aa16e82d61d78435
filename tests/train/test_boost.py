"""Collective boost-tuning: who is taught where, and what several drafters cover together."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_tables import model_table
from specjax.train import boost, config, distill, evaluate, losses, metrics, model
from training_toys import forward

from specjax.models import DecoderConfig

SHAPE = dict(hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
SMALL = DecoderConfig(vocab_size=5, head_dim=4, eos_ids=(0,), tie_embeddings=True, **SHAPE)
PAIR = distill.Pair(SMALL, SMALL, end_of_text=0)  # so that a drafter can be its target
WEIGHTS = [
    jax.tree.map(lambda x: 9 * x, model.create(SMALL, seed)[1]) for seed in range(3)
]  # of the target, and of two drafters
TOKENS = np.random.default_rng(0).integers(1, 5, (4, 13)).astype(np.int32)


def settings(boosted=True):
    own = distill.DistillConfig(
        model=model.ModelConfig(head_dim=4, **SHAPE),
        chunk=16,
        data=config.DataConfig(length=12, batch=4),
    )
    return boost.BoostConfig(distill=own, boosted=boosted)


def logits():
    graph, inputs = model.create(SMALL, 0)[0], TOKENS[:, :-1]
    return [forward(graph, own, inputs, jnp.zeros_like(inputs)) for own in WEIGHTS]


@pytest.mark.parametrize("boosted", [True, False])
def test_a_drafter_is_taught_where_those_before_it_fail(boosted):
    p, first, second = logits()
    frozen = {"target": WEIGHTS[0], "earlier": [WEIGHTS[1]]}
    terms = jax.jit(boost.make_loss(PAIR, settings(boosted)))(WEIGHTS[2], frozen, TOKENS, None)
    failed = 1 - np.asarray(losses.greedy_match(p, first))
    assert 0.1 < failed.mean() < 0.99
    weight = failed if boosted else np.ones_like(failed)
    expected = np.sum(weight * losses.fkl(p, second)) / weight.sum()
    np.testing.assert_allclose(evaluate.weighed(terms), expected, rtol=2e-5)
    np.testing.assert_allclose(terms["failed"].value, weight.mean(), rtol=1e-6)


def test_nothing_is_left_to_learn_after_a_drafter_that_is_never_wrong():
    frozen = {"target": WEIGHTS[0], "earlier": [WEIGHTS[0]]}
    loss = boost.make_loss(PAIR, settings())
    value, slope = jax.jit(
        jax.value_and_grad(lambda params: evaluate.weighed(loss(params, frozen, TOKENS, None)))
    )(WEIGHTS[2])
    assert value == 0 and not any(np.any(x) for x in jax.tree.leaves(slope))


def test_coverage_is_the_share_that_one_of_them_has_right():
    p, first, second = logits()
    frozen = {"target": WEIGHTS[0], "earlier": [WEIGHTS[1]]}
    weight = np.ones((4, 12), np.float32)
    found = jax.jit(boost.make_measure(PAIR, 16))(WEIGHTS[2], frozen, TOKENS, weight)
    right = [np.asarray(losses.greedy_match(p, q), bool) for q in (first, second)]
    np.testing.assert_allclose(found["coverage"].value, (right[0] | right[1]).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["greedy_match"].value, right[1].mean(), rtol=1e-6)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(config.ConfigError, match="num_drafters=1"):
        dataclasses.replace(settings(), num_drafters=1)
    with pytest.raises(config.ConfigError, match="distill.on_policy=0.5"):
        own = dataclasses.replace(settings().distill, on_policy=0.5, prompt_tokens=4)
        dataclasses.replace(settings(), distill=own)


def test_the_recipe_trains_one_after_the_other_and_decodes_with_their_union(place):
    root, _, teacher = place
    settings = root / "boost.toml"
    settings.write_text(f"""
[distill]
{teacher.replace("=", '="')}"
{model_table("distill.model", 8)}[distill.decoding]
num_prompts = 2
batch = 2
prompt_tokens = 6
new_tokens = 8
[distill.data]
corpus = "{root / "corpus"}"
length = 24
batch = 4
eval_rows = 4
[distill.run]
folder = "{root / "boost"}"
steps = 20
[distill.optimizer]
warmup = 2
adam_rate = 0.03
""")
    from specjax.train.cli import main

    assert main(["boost", "--config", str(settings)]) == 0
    one, two = metrics.read(root / "boost" / "boost.jsonl")
    assert one["coverage"] == one["greedy_match"]
    assert two["coverage"] >= max(one["coverage"], two["greedy_match"])
    assert 1 <= one["decoded_tau"] <= two["decoded_tau"] <= 4  # chains of three, greedy
    assert (root / "boost" / "2" / "model" / "model.safetensors").is_file()
    log = [row for row in metrics.read(root / "boost" / "2" / "log.jsonl") if "failed" in row]
    assert 0 < log[-1]["failed"] < 1
    # the card gives fields of the recipe, and names a folder by the last part of its path; what may
    # be others when a run goes on has its usual name
    card = (root / "boost" / "2" / "model" / "README.md").read_text()
    assert str(root) not in card
    (root / "card.toml").write_text(card.split("```toml\n")[1].partition("```")[0])
    printed = config.load(boost.Config, root / "card.toml").distill
    data = config.load(boost.Config, settings).distill.data
    assert printed.data == dataclasses.replace(data, corpus="corpus")
    kept = json.loads((root / "boost" / "2" / "config.json").read_text())
    assert kept["run.steps"] == 20 and kept["card.license"] == "" and kept["drafter"] == 2
    assert config.differences(kept, kept | {"run.steps": 22, "card.license": "mit"}) == []
