"""Unlikelihood training: what counts as repeated, the loss against its formula, and the recipe."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from specjax.train import config, data, losses, model, own_text, report, step, unlikelihood
from training_toys import forward

from specjax.analysis.comparison import repeated_ngrams
from specjax.models import DecoderConfig

FILE = "model.safetensors"
SHAPE = DecoderConfig(
    vocab_size=5,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    eos_ids=(0,),
)
GRAPH, PARAMS = model.create(SHAPE, 0)
TOKENS = np.random.default_rng(0).integers(1, 5, (4, 33)).astype(np.int32)
KEYS = step.make_keys(jax.random.key(0), jnp.arange(4))


def settings(**fields):
    common = dict(ngram=2, prompt_tokens=9, data=config.DataConfig(length=32, batch=4))
    return unlikelihood.UnlikelihoodConfig(**common | fields)


def repeated_slowly(row, written, ngram):
    """The n-grams that occurred before, found by looking at each; see ``repetitions``."""
    seen, ends, member = set(), np.zeros(len(row), bool), np.zeros(len(row), bool)
    for end in range(ngram, len(row) + 1):
        if all(written[end - ngram : end]):
            gram = tuple(row[end - ngram : end])
            if gram in seen:
                ends[end - 1] = True
                member[end - ngram : end] = True
            seen.add(gram)
    return ends, member


def test_an_ngram_is_repeated_where_it_was_written_before():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 3, (6, 40)).astype(np.int32)
    written = np.arange(40) >= rng.integers(0, 20, (6, 1))
    written &= np.arange(40) < rng.integers(25, 41, (6, 1))
    for ngram in (2, 4):
        ends, member = unlikelihood.repetitions(tokens, jnp.asarray(written), ngram)
        slow = [repeated_slowly(*row, ngram) for row in zip(tokens, written, strict=True)]
        np.testing.assert_array_equal(ends, [own for own, _ in slow])
        np.testing.assert_array_equal(member, [own for _, own in slow])
        rows = [row[own] for row, own in zip(tokens, written, strict=True)]
        grams = sum(max(0, len(row) - ngram + 1) for row in rows)
        assert np.sum(ends) / grams == pytest.approx(repeated_ngrams(rows, ngram))
        assert 0 < np.sum(ends) < np.sum(member)


def test_the_unlikelihood_of_a_certain_token_has_a_finite_gradient():
    logits = jnp.asarray([[1.0, 2.0, -1.0], [60.0, -60.0, 0.0]])
    value = losses.unlikelihood(logits, jnp.asarray([1, 0]))
    np.testing.assert_allclose(value[0], -np.log(1 - jax.nn.softmax(logits[0])[1]), rtol=1e-6)
    np.testing.assert_allclose(value[1], 60, rtol=1e-6)  # log(1 - q) itself is infinite here
    slope = jax.grad(lambda x: losses.unlikelihood(x, jnp.asarray([1, 0])).sum())(logits)
    np.testing.assert_allclose(slope[:, [1, 0]].diagonal(), [0.7053845, 1.0], rtol=1e-5)


@pytest.mark.parametrize("new_tokens", [0, 15])
def test_the_loss_is_its_formula_on_the_corpus_and_on_what_the_model_writes(new_tokens):
    own = settings(scale=0.7, new_tokens=new_tokens)
    made = unlikelihood.make_loss(SHAPE, 0, own)

    length = own.own_length

    def logits_of(params, tokens):
        segments = data.segments_of(tokens[:, :-1], 0)
        return forward(GRAPH, params, tokens[:, :-1], segments)

    @jax.jit
    def run(params):
        found = made(params, None, TOKENS, KEYS)
        write = own_text.make_writer(SHAPE, 0, length, 9, 0.0)
        written, weight = write(params, TOKENS[:2, : length + 1], KEYS.rows[:2])
        return found, written, weight, logits_of(params, written), logits_of(params, TOKENS[2:])

    found, written, weight, of_own, of_text = jax.tree.map(np.asarray, run(PARAMS))
    assert written.shape == (2, length + 1) and length == (23 if new_tokens else 32)

    def said(logits, tokens):
        law = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
        return np.take_along_axis(law, tokens[:, 1:, None], 2)[..., 0]

    assert found["loss"].value == pytest.approx(-np.log(said(of_text, TOKENS[2:])).mean(), rel=1e-5)
    flags = [repeated_slowly(*row, 2) for row in zip(written[:, 1:], weight > 0, strict=True)]
    member = np.stack([own for _, own in flags])
    expected = -(np.log1p(-said(of_own, written)) * member).sum() / weight.sum()
    assert member.any() and not member.all()
    assert found["unlikelihood"].value == pytest.approx(expected, rel=1e-5)
    assert found["unlikelihood"].share == 0.7 and found["repeated"].share == 0
    rows = [row[own > 0] for row, own in zip(written[:, 1:], weight, strict=True)]
    assert found["repeated"].value == pytest.approx(repeated_ngrams(rows, 2))


def test_a_target_learns_not_to_repeat_itself(place):
    root, train, teacher = place
    fields = [teacher.replace("teacher=", "target="), f"run.folder={root / 'unlikely'}"]
    fields += [
        "prompt_tokens=8",
        "ngram=2",
        "optimizer.warmup=2",
        "optimizer.adam_rate=0.02",
        "scale=5",
    ]
    fields += ["run.steps=60", "run.eval_every=30", "run.save_every=60"]
    assert train("unlikelihood", *fields) == 0
    rows = report.read(root / "unlikely" / "log.jsonl")
    shares = [row["repeated"] for row in rows if "repeated" in row]
    assert np.mean(shares[-5:]) < 0.8 * np.mean(shares[:5])
    assert {"heldout_repeated", "heldout_bits_per_byte"} <= set(rows[-1])
    ours, theirs = weights_of(root / "unlikely" / "model"), weights_of(teacher.partition("=")[2])
    assert train("unlikelihood", *fields, "start_share=0.5") == 0  # the same run, exported anew
    mixed = weights_of(root / "unlikely" / "model")
    for name, end in ours.items():
        np.testing.assert_allclose(mixed[name], (theirs[name] + end) / 2, rtol=0.01, atol=1e-3)
    assert any(np.abs(mixed[name] - end).max() > 0.01 for name, end in ours.items())


def weights_of(folder):
    """The weights of a folder by name, float32."""
    return {k: np.asarray(v, np.float32) for k, v in load_file(Path(folder) / FILE).items()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(own_share=1.0), "at least one row to the model and one to the corpus"),
        (dict(own_share=0.05), "own_share=0.05 of 4 rows"),
        (dict(ngram=0), "ngram=0; accepted: at least 1"),
        (dict(prompt_tokens=32), "prompt_tokens=32; accepted: 1 to 31"),
        (dict(new_tokens=1), "new_tokens=1; accepted: ngram=2 to data.length=32"),
        (dict(new_tokens=30), "prompt_tokens=9; accepted: 1 to 3"),
        (dict(start_share=1.0), "start_share=1.0; accepted: at least 0, below 1"),
        (dict(scale=-1.0), "scale=-1.0; accepted: at least 0"),
        (
            dict(data=config.DataConfig(length=32, batch=4, samples=("a.npz",))),
            "learns from a corpus and from what it writes",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused(fields, message):
    with pytest.raises(config.ConfigError, match=message):
        settings(**fields)
