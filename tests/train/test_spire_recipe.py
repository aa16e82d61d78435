"""SPIRe is taught on the logits that it drafts with, and learns by its recipe."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brief_runs import brief, three_layers
from specjax.train import config, report, spire
from specjax.train.evaluate import make_evaluate, weighed
from specjax.train.rows import make_reader
from training_toys import logits_of

import specjax
from specjax import trees
from specjax.trees import expand
from specjax.types import Context, Draft, Segment

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = Path(__file__).parents[1] / "golden" / "features" / "target"  # a Llama of seven layers
ROWS, LENGTH, ROOT, END, STEPS = 3, 16, 9, 1, 3
FIELDS = ("window=5", "sinks=2", f"num_heads={STEPS}")


def made(*fields, tmp_path):
    (tmp_path / "empty.toml").write_text("")
    return config.load(spire.Config, tmp_path / "empty.toml", list(fields))


@pytest.fixture
def lm():
    return specjax.load(GOLDEN, tokenizer=False, dtype="float32")


def taught_and_drafted(built, lm, monkeypatch):
    """The logits ``[B, V]`` of three tokens after token 9 of each row: those of training, and those
    of drafting after a prompt, with the row's own tokens for drafts."""
    random = np.random.default_rng(1)
    noise = lambda x: np.asarray(x + 0.1 * random.normal(size=x.shape), np.float32)  # noqa: E731
    own = jax.tree.map(noise, built.params)
    tokens = random.integers(END + 1, 24, (ROWS, LENGTH + 1)).astype(np.int32)
    read, drafter = make_reader(lm.config, END, built.layers), built.drafter

    def follow(topology, context, level, carry, **how):
        said = []
        for depth in range(STEPS):
            seen = context.tokens[:, ROOT : ROOT + depth + 1]
            chain = trees.chain_parents(depth)
            grown = Draft(start=context.length - 1, tokens=seen, topology=chain)
            logits, carry = level(carry, grown, depth)
            said.append(logits[:, -1])
        return said, carry, None

    monkeypatch.setattr(expand, "expand", follow)

    @jax.jit
    def run(own, target_params, tokens):
        rows = read(target_params, tokens)
        outputs = built.outputs(own, target_params, rows)
        by_row = [logits_of(x).reshape(-1, ROWS, rows.steps(STEPS)) for x in outputs]
        taught = [x[:, :, ROOT - 1].T for x in by_row]
        features = [rows.layers[layer][:, :ROOT] for layer in drafter.features]
        prompt = Segment(
            tokens=tokens[:, :ROOT],
            next=tokens[:, 1 : ROOT + 1],
            features=jnp.concatenate(features, axis=2),
            start=jnp.zeros(ROWS, jnp.int32),
            num=jnp.full(ROWS, ROOT, jnp.int32),
        )
        context = Context(
            tokens=tokens,
            length=jnp.full(ROWS, ROOT + 1, jnp.int32),
            budget=jnp.full(ROWS, 8, jnp.int32),
            key=None,
            sampling=specjax.Sampling(temperature=0.0),
        )
        state = drafter.init(own, target_params, ROWS, 24)
        state = drafter.observe(own, target_params, state, prompt)
        said, _ = drafter.draft_step(own, target_params, state, context)
        return taught, said

    return run(own, lm.params, tokens)


def test_a_drafter_is_taught_on_the_logits_that_it_drafts_with(lm, monkeypatch, tmp_path):
    built = spire.make_spire(made(*FIELDS, tmp_path=tmp_path), SimpleNamespace(lm=lm))
    assert built.drafter.features == (5, 6)
    for ours, layer in zip(built.params["blocks"].values(), (5, 6), strict=True):
        theirs = lm.params["blocks"][layer]["mlp"]["down"]["weight"][...]
        np.testing.assert_array_equal(ours["mlp"]["down"]["weight"], theirs)
    taught, drafted = taught_and_drafted(built, lm, monkeypatch)
    for ours, theirs in zip(drafted, taught, strict=True):
        assert jnp.std(theirs) > 0.01
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_fault_a_drafter_that_is_taught_over_another_window_is_seen(lm, monkeypatch, tmp_path):
    right = spire.make_spire(made(*FIELDS, tmp_path=tmp_path), SimpleNamespace(lm=lm))
    fields = ("window=6", *FIELDS[1:])
    other = spire.make_spire(made(*fields, tmp_path=tmp_path), SimpleNamespace(lm=lm))
    wrong = SimpleNamespace(**vars(right) | {"outputs": other.outputs})
    taught, drafted = taught_and_drafted(wrong, lm, monkeypatch)
    assert np.abs(taught[2] - drafted[2]).max() > 1e-3


def test_the_held_out_loss_is_that_of_the_training(lm, tmp_path):
    asked = made(*FIELDS, tmp_path=tmp_path)
    built = spire.make_spire(asked, SimpleNamespace(lm=lm))
    read, given = make_reader(lm.config, END, built.layers), {"target": lm.params}
    tokens = np.random.default_rng(1).integers(END + 1, 24, (ROWS, LENGTH + 1)).astype(np.int32)
    loss = spire.make_loss(built, lm.target, read, asked)
    learned = float(weighed(jax.jit(loss)(built.params, given, tokens, None)))
    measure = spire.make_measure(built, lm.target, read, asked)
    held = make_evaluate(measure, {"": [(tokens, np.ones((ROWS, LENGTH), np.float32))]})
    np.testing.assert_allclose(held(built.params, given)["heldout_loss"], learned, rtol=1e-4)


def test_the_recipe_lowers_its_loss_and_what_it_exports_loads_back(place):
    root, train, _ = place
    target = three_layers(root, train)
    fields = [f"teacher={target}", "window=8", "num_heads=3"]
    fields += brief(root / "spire")
    assert train("spire", *fields) == 0
    rows = report.read(root / "spire" / "log.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < np.mean(losses[:4])
    assert 1 <= rows[-1]["decoded_tau"] <= 5 and 0 < rows[-1]["accuracy_1"] <= 1
    lm = specjax.load(target)
    found = specjax.load_drafter(root / "spire" / "model", lm).drafter
    assert (found.name, found.features, found.config.window) == ("spire", (1, 2), 8)
    asked = dict(max_new_tokens=8, stop=())
    named = specjax.generate(lm, "x1 = f(x2)", drafter=str(root / "spire" / "model"), **asked)
    assert named.text == specjax.generate(lm, "x1 = f(x2)", drafter=None, **asked).text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("teacher_share=0.5", "against the target's law"),
        ("acceptance_share=2", "acceptance_share=2.0; accepted: 0 to 1"),
        ("window=4", "window=4; accepted: more than num_heads=4"),
        ("num_layers=0", "num_layers=0; accepted: at least 1"),
        ("sinks=-1", "sinks=-1; accepted: at least 0"),
    ],
)
def test_settings_that_no_drafter_has_are_refused(word, message, tmp_path):
    with pytest.raises(config.ConfigError, match=message):
        made(word, tmp_path=tmp_path)


def test_more_blocks_than_the_target_has_are_refused(lm, tmp_path):
    with pytest.raises(config.ConfigError, match="fewer than the 7 layers"):
        spire.make_spire(made("num_layers=7", tmp_path=tmp_path), SimpleNamespace(lm=lm))
