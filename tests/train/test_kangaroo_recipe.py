"""Kangaroo's adapter is taught on the logits that it drafts with, and learns by its recipe."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brief_runs import brief, three_layers
from specjax.train import config, kangaroo, report
from specjax.train.rows import make_reader
from toys import cache_of
from training_toys import logits_of

import specjax
from specjax import trees
from specjax.trees import expand
from specjax.types import Context, Draft, Segment

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = Path(__file__).parents[1] / "golden" / "features" / "target"  # a Llama of seven layers
ROWS, LENGTH, ROOT, END = 3, 14, 6, 1


def made(*fields, tmp_path):
    (tmp_path / "empty.toml").write_text("")
    return config.load(kangaroo.Config, tmp_path / "empty.toml", list(fields))


@pytest.fixture
def lm():
    return specjax.load(GOLDEN, tokenizer=False, dtype="float32")


def taught_and_drafted(built, lm, monkeypatch):
    """The logits ``[B, V]`` of two depths below token 6 of each row: those of training, and those
    of drafting after a prompt, with the row's own tokens for drafts."""
    random = np.random.default_rng(1)
    noise = lambda x: np.asarray(x + 0.1 * random.normal(size=x.shape), np.float32)  # noqa: E731
    own = jax.tree.map(noise, built.params)
    tokens = random.integers(END + 1, 24, (ROWS, LENGTH + 1)).astype(np.int32)
    read, drafter = make_reader(lm.config, END, built.layers), built.drafter

    def follow(topology, context, level, carry, **how):
        said = []
        for depth in range(2):
            chain = trees.chain_parents(depth)
            seen = context.tokens[:, ROOT : ROOT + depth + 1]
            grown = Draft(start=context.length - 1, tokens=seen, topology=chain)
            logits, carry = level(carry, grown, depth)
            said.append(logits[:, -1])
        return said, carry, None

    monkeypatch.setattr(expand, "expand", follow)

    @jax.jit
    def run(own, target_params, tokens):
        rows = read(target_params, tokens)
        (output,) = built.outputs(own, target_params, rows)
        by_row = logits_of(output).reshape(-1, ROWS, rows.steps(1))
        taught = [by_row[:, :, ROOT - 1 + depth].T for depth in range(2)]
        params, length = built.publish(own), jnp.full(ROWS, ROOT + 1, jnp.int32)
        prompt = Segment(
            tokens=tokens[:, :ROOT],
            next=tokens[:, 1 : ROOT + 1],
            features=rows.layers[drafter.layer][:, :ROOT],
            start=jnp.zeros(ROWS, jnp.int32),
            num=jnp.full(ROWS, ROOT, jnp.int32),
        )
        context = Context(
            tokens=tokens,
            length=length,
            budget=jnp.full(ROWS, 8, jnp.int32),
            key=None,
            sampling=specjax.Sampling(temperature=0.0),
            cache=cache_of(lm.target, target_params, tokens, length - 1),
            stop_drafting=lambda tokens: jnp.zeros(ROWS, bool),  # then nothing is handed over
        )
        state = drafter.init(params, target_params, ROWS, 24)
        state = drafter.observe(params, target_params, state, prompt)
        said, _ = drafter.draft_step(params, target_params, state, context)
        return taught, said

    return run(own, lm.params, tokens)


def test_an_adapter_is_taught_on_the_logits_that_it_drafts_with(lm, monkeypatch, tmp_path):
    built = kangaroo.make_kangaroo(made(tmp_path=tmp_path), SimpleNamespace(lm=lm))
    np.testing.assert_array_equal(built.params["norm"]["weight"], lm.params["norm"]["weight"][...])
    taught, drafted = taught_and_drafted(built, lm, monkeypatch)
    for ours, theirs in zip(drafted, taught, strict=True):
        assert jnp.std(theirs) > 0.01
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_fault_an_adapter_that_is_taught_on_another_layer_is_seen(lm, monkeypatch, tmp_path):
    built = kangaroo.make_kangaroo(made(tmp_path=tmp_path), SimpleNamespace(lm=lm))
    other = kangaroo.make_kangaroo(made("exit=3", tmp_path=tmp_path), SimpleNamespace(lm=lm))
    wrong = dataclasses.replace(other, drafter=built.drafter, layers=(2, 3))
    taught, drafted = taught_and_drafted(wrong, lm, monkeypatch)
    assert np.abs(taught[0] - drafted[0]).max() > 1e-2


def test_the_recipe_lowers_its_loss_and_what_it_exports_loads_back(place):
    root, train, _ = place
    target = three_layers(root, train)
    fields = [f"teacher={target}", "exit=1", "threshold=0.4"]
    fields += brief(root / "kangaroo")
    assert train("kangaroo", *fields) == 0
    rows = report.read(root / "kangaroo" / "log.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < np.mean(losses[:4])
    assert 1 <= rows[-1]["decoded_tau"] <= 7 and 0 < rows[-1]["accuracy_1"] <= 1
    lm = specjax.load(target)
    found = specjax.load_drafter(root / "kangaroo" / "model", lm).drafter
    assert (found.name, found.layer, found.threshold) == ("kangaroo", 1, 0.4)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("exit=0", "exit=0; accepted: at least 1"),
        ("num_heads=2", "one adapter drafts every depth"),
        ("threshold=2", "threshold=2.0; accepted: 0 to 1"),
    ],
)
def test_settings_that_no_adapter_has_are_refused(word, message, tmp_path):
    with pytest.raises(config.ConfigError, match=message):
        made(word, tmp_path=tmp_path)


def test_an_exit_after_which_no_layer_follows_is_refused(lm, tmp_path):
    with pytest.raises(config.ConfigError, match="exit=7: .* has 7 layers.* accepted: 1 to 6"):
        kangaroo.make_kangaroo(made("exit=7", tmp_path=tmp_path), SimpleNamespace(lm=lm))
