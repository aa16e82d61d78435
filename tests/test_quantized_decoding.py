"""A quantized target is a law of its own: speculative text is that scheme's plain text, and the
distance to the float model is measured."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import cli
from specjax._internal import compile_cache
from specjax.decoding import reference
from specjax.kernels import quantized
from specjax.models import quantize, save_pretrained

DATA = pathlib.Path(specjax.__file__).parent / "data" / "heldout_prompts.jsonl"
TEXTS = [json.loads(line)["text"] for line in DATA.read_text().splitlines()]
PROMPTS = [text[:120] for text in TEXTS[::70]]
SCHEMES = {
    "int8": specjax.Quantization("int8"),
    "int8 groups": specjax.Quantization("int8", group_size=64),
    "int4": specjax.Quantization("int4"),
    "int4 all": specjax.Quantization("int4", group_size=64, lm_head="int4"),
}


@pytest.fixture(scope="module")
def models():
    return {name: specjax.load("embedded", quantize=wish) for name, wish in SCHEMES.items()}


def generate(lm, drafter):
    return specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=48)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_text_of_every_drafter_is_the_plain_text_of_the_scheme(models, scheme):
    lm = models[scheme]
    plain = generate(lm, None)
    drafters = ["ngram", "eagle3"]
    if scheme == "int4":
        drafters.append(specjax.load("embedded-draft", quantize="int8"))
    for drafter in drafters:
        out = generate(lm, drafter)
        assert out.texts == plain.texts
        assert out.stats.acceptance > 0.2
        assert out.stats.approximate == f"target quantized to {SCHEMES[scheme]}"


@pytest.mark.usefixtures("quick_compilation")
def test_fault_a_product_a_group_off_in_wide_passes_changes_the_text(monkeypatch):
    """As a kernel would that took the scale of another group for several columns only."""
    lm = specjax.load("embedded-draft", quantize="int4")  # of two layers, so that it compiles soon
    plain = generate(lm, None)
    assert generate(lm, "ngram").texts == plain.texts
    backend = type(specjax.kernels.current())
    dots = backend.dots

    def broken(self, weights, x, transpose_out=False):
        if 1 < x.shape[1] // len(PROMPTS) < 8:
            weights = tuple(
                dataclasses.replace(w, scale=jnp.roll(w.scale, 1, axis=1))
                if isinstance(w, quantized.Quantized) and w.bits == 4
                else w
                for w in weights
            )
        return dots(self, weights, x, transpose_out)

    monkeypatch.setattr(backend, "dots", broken)
    jax.clear_caches()
    out = generate(lm, "ngram")
    jax.clear_caches()
    assert out.texts != plain.texts


def test_the_error_is_the_divergence_of_the_quantized_law_from_the_float_one(models):
    lm, texts = specjax.load("embedded"), TEXTS[:6]
    found = specjax.quantization_error(lm, models["int4"], texts, max_tokens=40)
    kl, count = 0.0, 0
    for text in texts:
        tokens = jnp.asarray([lm.tokenizer.encode(text)[:40]])
        p, q = (
            np.asarray(reference.logits(x.target, x.params, tokens), np.float64)[0]
            for x in (lm, models["int4"])
        )
        p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
        kl, count = kl + (np.exp(p) * (p - q)).sum(), count + len(p)
    assert found.positions == count
    assert found.kl == pytest.approx(kl / count, rel=1e-3)
    assert 0 < found.variation < 1 and 0 < found.agreement < 1
    same = specjax.quantization_error(lm, specjax.load("embedded"), texts[:1])
    assert same.kl == pytest.approx(0, abs=1e-6) and same.agreement == 1


def test_fewer_bits_are_further_off(models):
    lm = specjax.load("embedded")
    kl = {name: specjax.quantization_error(lm, m, TEXTS[::8]).kl for name, m in models.items()}
    # what ships is in int8 already, a scale a row, so that this scheme changes next to nothing
    assert kl["int8"] < 1e-6 < kl["int8 groups"] < 0.01
    assert kl["int8 groups"] < kl["int4"] < kl["int4 all"]


def test_a_head_in_eight_bits_costs_less_than_a_hundredth_and_one_in_four_bits_more(tmp_path):
    """What ships is in int8 already, so each weight is moved by up to half a step."""
    shipped, rng = specjax.load("embedded", quantize="float"), np.random.default_rng(0)

    def moved(weight):
        if weight.ndim < 2:
            return weight
        step = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / 127
        return weight + step * jnp.asarray(rng.uniform(-0.5, 0.5, weight.shape), weight.dtype)

    save_pretrained(
        dataclasses.replace(shipped, params=jax.tree.map(moved, shipped.params)), tmp_path
    )
    lm = specjax.load(tmp_path)
    kl = {}
    for head in ("float", "int8", "int4"):
        wish = specjax.Quantization("int4", group_size=64, lm_head=head)
        kl[head] = specjax.quantization_error(
            lm, specjax.load(tmp_path, quantize=wish), TEXTS[::8]
        ).kl
    assert 0 < abs(kl["int8"] - kl["float"]) < 0.001 < kl["float"]
    assert kl["int4"] > kl["int8"] + 0.005

    state = dict(nnx.to_flat_state(lm.params))
    table = state["embedding",]
    state["embedding",] = table.replace(
        quantize.encode("embedding", table.get_value(), "int8", "float32")
    )
    head = dataclasses.replace(lm, params=nnx.from_flat_state(list(state.items())))
    assert 1e-6 < specjax.quantization_error(lm, head, TEXTS[::8]).kl < 0.001


def test_the_command_states_the_error_and_saves_what_it_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    folder = tmp_path / "int4"
    command = ["quantize", "--quantize", "int4", "--group-size", "64", "--limit", "2"]
    assert cli.main([*command, "--json", "-o", str(folder)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["scheme"] == "int4 (group_size=64)" and 0 < said["kl"] < 1
    texts = TEXTS[:: len(TEXTS) // 2][:2]
    lm = specjax.load("embedded")
    again = specjax.quantization_error(lm, specjax.load(folder), texts)
    assert again.kl == pytest.approx(said["kl"], rel=1e-4)
    assert cli.main(["quantize", "--quantize", "int4", "--group-size", "48"]) == 2
    assert "--group-size 48: it must be a multiple of 32" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--group-size", "64"]) == 2
    assert "it is used with --quantize only; give --quantize as well" in capsys.readouterr().err


def test_a_scheme_that_cannot_be_saved_is_refused_before_anything_is_read(monkeypatch, capsys):
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    monkeypatch.setattr(specjax, "load", lambda *a, **k: pytest.fail("a model was read"))
    assert cli.main(["quantize", "--quantize", "fp8", "-o", "somewhere"]) == 2
    assert "--output somewhere: there is no layout for fp8" in capsys.readouterr().err


def test_models_that_cannot_be_compared_are_refused():
    lm, quantized_lm = (specjax.load("embedded-draft", quantize=x) for x in (None, "int8"))
    with pytest.raises(ValueError, match="model: .* is quantized; give the float model"):
        specjax.quantization_error(quantized_lm, lm, TEXTS[:1])
    with pytest.raises(ValueError, match="texts: they hold no token"):
        specjax.quantization_error(lm, quantized_lm, [])
    with pytest.raises(ValueError, match="max_tokens=0"):
        specjax.quantization_error(lm, quantized_lm, TEXTS[:1], max_tokens=0)
