"""Weights in eight and four bits: what they hold, what they compute, and what they are called."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import SMALL, byte_tokenizer, encoded, random_params
from flax import nnx

import specjax
from specjax import cli
from specjax._internal import compile_cache
from specjax.kernels import quantized
from specjax.models import Decoder, reading, save_pretrained
from specjax.models import quantize as q
from specjax.models.hf import _named
from specjax.models.layers import product

pytest_plugins = ["pairs"]
SCHEMES = sorted(q.SCHEMES)
EVEN = dataclasses.replace(SMALL, intermediate_size=64)  # groups of 32 divide all its sizes


@pytest.fixture
def even(tmp_path):
    """A folder with the weights and the tokenizer of ``EVEN``."""
    save_pretrained(Decoder(EVEN, rngs=nnx.Rngs(3)), tmp_path / "even", tokenizer=byte_tokenizer())
    return tmp_path / "even"


@pytest.fixture
def command(capsys, monkeypatch, folders):
    """``command(*arguments) -> (exit code, stdout, stderr)`` of ``specjax generate``."""
    monkeypatch.setattr(compile_cache, "enable", lambda: None)

    def run(*arguments):
        model = ["--model", str(folders["target"]), "--max-new-tokens", "4"]
        code = cli.main(["generate", "x", *model, *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def weight(rows, columns, scheme, seed=0):
    """A random weight ``[rows, columns]``, and the same quantized."""
    values = jax.random.normal(jax.random.key(seed), (rows, columns))
    return values, q.encode("weight", values, scheme, "float32")


# ------------------------------------------------------------------- what is held


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_matrix_is_held_in_few_bits_and_nothing_else_is(even, scheme):
    lm, plain = specjax.load(even, quantize=scheme), specjax.load(even)
    for (name, held), (_, original) in zip(_named(lm.params), _named(plain.params), strict=True):
        held, original = held.get_value(), original.get_value()
        if original.ndim == 2:
            outer = name in ("embedding", "lm_head.weight")
            kind = "int8" if outer and scheme == "int4" else scheme
            assert held.qvalue.dtype == q.SCHEMES[kind] and held.shape == original.shape, name
            groups = original.shape[1] // 32 if kind == "int4" else 1
            assert held.scale.shape == (len(original), groups)
        else:
            np.testing.assert_array_equal(held, original)
    assert lm.dtype == "float32" and lm.fingerprint != plain.fingerprint
    cache = lm.target.init(lm.params, 1, 8)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {"float32"}


def test_learned_positions_are_looked_up_and_stay_as_they_are():
    gpt2 = dataclasses.replace(SMALL, positions="learned", max_positions=16)
    params = encoded(random_params(gpt2), "int8")
    assert params["position_embedding"].get_value().dtype == "float32"
    assert q.is_quantized(params["embedding"].get_value())


@pytest.mark.parametrize(("scheme", "share"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_no_value_is_further_off_than_rounding_within_its_channel(scheme, share):
    values, held = weight(64, 48, scheme)
    values = values.at[5].multiply(1000.0)  # a large channel must not cost the others
    held = q.encode("weight", values, scheme, "float32")
    error = jnp.max(jnp.abs(q.floats(held, "float32") - values), axis=1)
    assert jnp.all(error <= 1.001 * share * jnp.max(jnp.abs(values), axis=1))


# ------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(7, 96, 100), (64, 32, 1 << 20), (2, 64, 1)]
)
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_product_is_that_of_the_dequantized_weight(
    scheme, rows, columns, block, tokens, monkeypatch
):
    monkeypatch.setattr(quantized, "BLOCK", block)
    _, held = weight(rows, columns, scheme)
    x = jax.random.normal(jax.random.key(1), (columns, tokens))
    wanted = np.asarray(q.floats(held, "float32")) @ np.asarray(x)
    atol = 1e-4
    if scheme in ("int8", "int4"):  # CPU kernels may round x to 16 bits: half a step of every input
        numbers = np.abs(np.asarray(q.floats(held, "float32")))
        atol += np.abs(x).max() / 65278 * numbers.sum(axis=1).max()
    np.testing.assert_allclose(jax.jit(product)(held, x), wanted, atol=atol)
    half = jax.jit(product)(held, x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_an_embedding_are_those_of_the_dequantized_table(scheme):
    _, held = weight(9, 64, scheme)
    index = jnp.asarray([0, 8, 3, 3])
    wanted = q.floats(held, "float32")[index]
    np.testing.assert_allclose(quantized.take(held, index, jnp.float32), wanted, rtol=1e-6)
    assert quantized.take(held, index, jnp.bfloat16).dtype == jnp.bfloat16


# ------------------------------------------------------------------- what it is called


def test_a_quantized_target_says_that_it_is_approximate_wherever_it_decodes(folders, command):
    name = "target quantized to int8"
    lm = specjax.load(folders["target"], quantize="int8")
    assert repr(lm) == f"LM('{folders['target']}', quantized to int8: approximate)"
    out = specjax.generate(lm, "def f(x):", drafter="ngram", max_new_tokens=8)
    assert out.stats.approximate == name and f"{name}: approximate" in str(out.stats)
    assert f"{name}: approximate" in command("--quantize", "int8")[2]
    stats = json.loads(command("--quantize", "int8", "--json")[1])["stats"]
    assert stats["approximate"] is True and stats["approximation"] == name


def test_what_is_not_quantized_is_not_called_approximate(folders, pair, command):
    assert "approximate" not in repr(pair[0])
    drafter = specjax.load(folders["draft"], quantize="int8")
    out = specjax.generate(pair[0], "def f(x):", drafter=drafter, max_new_tokens=8)
    assert out.stats.approximate == "" and "approximate" not in str(out.stats)
    drafted = command("--drafter", folders["draft"], "--drafter-quantize", "fp8", "--json")
    stats = json.loads(drafted[1])["stats"]
    assert stats["approximate"] is False and stats["approximation"] is None


# ------------------------------------------------------------------- what is refused


def test_an_unknown_scheme_is_refused_before_anything_is_looked_up():
    with pytest.raises(
        ValueError, match="quantize='int5' is unknown; accepted: int8, int4, fp8, float"
    ):
        specjax.load("no/where", quantize="int5")


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(scheme="int4", group_size=48), "group_size=48: it must be a multiple of 32"),
        (dict(scheme="int8", group_size=0), "group_size=0: it must be a multiple of 32"),
        (dict(scheme="fp8", group_size=32), "group_size=32: fp8 has a scale for each output"),
        (dict(scheme="int8", lm_head="int4"), "lm_head='int4'.*accepted are int8, float, None"),
        (dict(scheme="int4", lm_head="no"), "lm_head='no'.*accepted are int4, int8, float, None"),
        (dict(scheme="four"), "quantize='four' is unknown; accepted: int8, int4, fp8, float"),
    ],
)
def test_settings_that_no_scheme_has_are_refused_by_the_name_of_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        specjax.Quantization(**settings)


def test_a_group_size_that_does_not_divide_is_refused_before_a_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr(reading, "read_slice", None)
    message = r"group_size=32 does not divide the 48 inputs of blocks\.0\.mlp\.down\.weight; take "
    with pytest.raises(ValueError, match=message + "quantize='int8' without group_size"):
        specjax.load(folder, quantize="int4")
    wish = specjax.Quantization("int8", group_size=64)
    with pytest.raises(ValueError, match="group_size=64 does not divide the 32 inputs.*=32, or"):
        specjax.load(folder, quantize=wish)


@pytest.mark.parametrize("lm_head", ["int4", "int8", "float"])
def test_the_head_is_held_as_asked_for(even, lm_head):
    wish = specjax.Quantization("int4", lm_head=lm_head)
    lm = specjax.load(even, quantize=wish)
    assert lm.target.approximate == f"target quantized to int4 (lm_head={lm_head})"
    for table in (lm.target.table(lm.params), lm.target.head_table(lm.params)):
        held = table.qvalue.dtype if q.is_quantized(table) else table.dtype
        assert held == {"int4": "uint8", "int8": "int8", "float": "float32"}[lm_head]


def test_the_scale_of_a_group_of_four_bits_is_no_worse_than_the_widest():
    values, held = weight(64, 256, "int4")
    groups = values.reshape(64, 8, 32)
    widest = np.abs(groups).max(axis=-1, keepdims=True) / 8
    plain = np.clip(np.round(groups / widest), -8, 7) * widest
    error = np.mean((np.asarray(q.floats(held, "float32")).reshape(groups.shape) - groups) ** 2)
    assert error < 0.95 * np.mean((plain - groups) ** 2)
    nothing = q.encode("weight", jnp.zeros((2, 64)), "int4", "float32")
    np.testing.assert_array_equal(q.floats(nothing, "float32"), np.zeros((2, 64)))


def test_experts_of_four_bits_are_read_as_the_floats_that_they_are():
    stack = jax.random.normal(jax.random.key(0), (4, 64, 96))
    held = q.encode("blocks.0.mlp.experts.up", stack, "int4", "float32")
    floats, x = q.floats(held, jnp.float32), jax.random.normal(jax.random.key(1), (96, 3))
    np.testing.assert_array_equal(
        q.floats(q.rows(held, jnp.asarray([2, 0])), jnp.float32), floats[jnp.asarray([2, 0])]
    )
    got = jax.jit(q.dot_rows, static_argnums=3)(held, 3, 16, 32, x)
    np.testing.assert_allclose(got, floats[3, 16:48] @ x, atol=1e-4)


def test_without_qwix_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ValueError, match=r"needs qwix.*pip install 'specjax\[quantize\]'"):
        specjax.load("embedded", quantize="fp8")


def test_fp8_is_refused_where_the_backend_cannot_convert_it(monkeypatch):
    def compile(self):
        raise jax.errors.JaxRuntimeError("F8E4M3FN is not supported")

    q.computes.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        with pytest.raises(ValueError, match="cannot convert float8_e4m3fn; use quantize='int8'"):
            specjax.load("embedded", quantize="fp8")
    q.computes.cache_clear()


def test_what_is_quantized_is_not_quantized_again_and_fp8_is_not_saved(folder, tmp_path):
    lm = specjax.load(folder, quantize="int8")
    with pytest.raises(ValueError, match="embedding is quantized already .int8"):
        q.encode("embedding", lm.params["embedding"].get_value(), "fp8", "float32")
    with pytest.raises(ValueError, match="no layout for fp8; save the model as load returns it"):
        save_pretrained(specjax.load(folder, quantize="fp8"), tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'awq'.*use the unquantized checkpoint"):
        specjax.load(folder, quantize="int8")


def test_a_drafter_without_weights_is_not_quantized(command):
    code, _, err = command("--drafter", "ngram", "--drafter-quantize", "int8")
    assert code == 2 and "--drafter ngram has no weights" in err
