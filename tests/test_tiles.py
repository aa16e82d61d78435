"""What the kernels compute by tiles where a prompt is read, and the calls that replace several of
XLA's operations: entries of caches, activations, and attention without transpositions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import LATENT
from test_native import attention_case, by_hand, normal
from test_native_quantized import held

from specjax import kernels
from specjax.kernels import prompts
from specjax.kernels.cpu import backend, calls, library, quantized_calls
from specjax.kernels.cpu.backend import CpuBackend
from specjax.kernels.quantized import Quantized
from specjax.kernels.xla import XlaBackend
from specjax.models import kv_cache
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Attention
from specjax.models.layers import Linear, swiglu_linear
from specjax.models.mla import LatentAttention
from specjax.types import Verdict

LIBRARIES = ("kernels", "quantized", "bfloat16", "float16")
problem = next(filter(None, map(library.register, LIBRARIES)), None)
pytestmark = pytest.mark.skipif(problem is not None, reason=f"no kernels: {problem}")
needs_tiles = pytest.mark.skipif(not library.has_tiles(), reason="a processor without tiles (AMX)")

# batch, heads, size of a head, groups, nodes, own entries, slots
PROMPTS = [
    (1, 4, 64, 3, 128, 128, 300),
    (2, 1, 32, 1, 48, 48, 128),
    (1, 2, 96, 3, 112, 130, 500),
    (3, 1, 128, 1, 64, 64, 40),
    (1, 3, 64, 1, 80, 80, 1),
    (2, 2, 64, 3, 48, 48, 100),
]


def narrow(arrays, dtype):
    return [jnp.asarray(x, dtype) for x in arrays]


def tiled(case, dtype, shift=0):
    """Attention by tiles, and its definition in float64, of the same numbers."""
    query, key, value, mask, prefix, length = attention_case(*case)
    arrays = narrow((query, *prefix, key, value), dtype)
    call = jax.jit(lambda *arrays: calls.attend(*arrays, None, True))
    got = call(*arrays, mask, np.clip(length + shift, 0, case[-1]))
    query, *prefix, key, value = (np.asarray(x, np.float64) for x in arrays)
    return np.asarray(got, np.float64), by_hand(query, key, value, mask, prefix, length)


@needs_tiles
@pytest.mark.parametrize("dtype, most", [("bfloat16", 1.5e-2), ("float32", 1e-4)])
@pytest.mark.parametrize("case", PROMPTS)
def test_attention_by_tiles_is_softmax_attention(case, dtype, most):
    got, wanted = tiled(case, dtype)
    assert np.abs(got - wanted).max() < most * np.abs(wanted).max()
    exact = jax.jit(lambda *arrays: calls.attend(*arrays, None))
    query, key, value, mask, prefix, length = attention_case(*case)
    plain = exact(*narrow((query, *prefix, key, value), dtype), mask, length)
    assert (np.asarray(plain, np.float64) != got).any()  # the tiles have computed it


@needs_tiles
def test_fault_one_slot_less_is_seen_by_that_measure():
    got, wanted = tiled(PROMPTS[0], "bfloat16", shift=-1)
    assert np.abs(got - wanted).max() > 1.5e-2 * np.abs(wanted).max()


@needs_tiles
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_slots_that_are_not_used_may_hold_anything(dtype):
    query, key, value, mask, prefix, length = attention_case(1, 2, 64, 2, 48, 48, 200)
    length = np.asarray([77], np.int32)
    spoiled = [np.where(np.arange(200)[:, None] < 77, x, np.nan) for x in prefix]
    call = jax.jit(lambda *arrays: calls.attend(*arrays, None, True))
    outs = [
        call(*narrow((query, *slots, key, value), dtype), mask, length)
        for slots in (prefix, spoiled)
    ]
    np.testing.assert_array_equal(*outs)


@needs_tiles
@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "int4 wide groups", "int4 channels"])
@pytest.mark.parametrize("out, size, columns", [(61, 192, 33), (25, 2304, 130), (530, 576, 64)])
def test_products_of_four_bits_as_sixteen_are_exact_to_that_rounding(kind, out, size, columns):
    weight, numbers = held(out, size, kind)
    x = normal(size, columns)
    exact = numbers @ x.astype(np.float64)
    steps = np.abs(numbers).max() / 32639 * np.abs(x).sum(axis=0).max()
    steps += np.abs(x).max() / 32639 * np.abs(numbers).sum(axis=1).max()
    product = jax.jit(quantized_calls.quantized_words, static_argnums=2)
    whole = np.asarray(product((weight,), x, False)[0])
    for width in (33, 47, 48):  # and every column has the same bits beside any others
        if width <= columns:
            np.testing.assert_array_equal(product((weight,), x[:, :width])[0], whole[:, :width])
    for turned in (False, True):
        (got,) = product((weight,), x, turned)
        np.testing.assert_array_equal(got.T if turned else got, whole)
        error = np.abs(whole - exact)
        assert error.max() < steps
        assert np.sqrt(np.mean(error**2)) < 2e-4 * np.sqrt(np.mean(exact**2))
    shifted = Quantized(weight.qvalue, weight.scale * 1.002, weight.zero)
    error = np.asarray(quantized_calls.quantized_words((shifted,), x)[0]) - exact
    assert np.sqrt(np.mean(error**2)) > 2e-4 * np.sqrt(np.mean(exact**2))  # the planted fault


@needs_tiles
def test_scales_that_are_not_finite_spoil_their_rows_alone():
    weight, _ = held(61, 192, "int4")
    spoiled = Quantized(weight.qvalue, weight.scale.at[3, 2].set(jnp.nan).at[9, 0].set(jnp.inf))
    got = np.asarray(quantized_calls.quantized_words((spoiled,), normal(192, 40))[0])
    assert np.flatnonzero(~np.isfinite(got).all(axis=1)).tolist() == [3, 9]


@needs_tiles
def test_only_prompts_are_read_by_tiles_and_not_with_fixed_bits(monkeypatch):
    taken = []
    monkeypatch.setattr(calls, "attend", lambda *arguments: taken.append(arguments[-1]))
    weight, x = held(37, 192, "int4")[0], jnp.zeros((192, 40))
    query, key, value, mask, prefix, length = map(
        lambda x: jax.tree.map(jnp.asarray, x), attention_case(1, 2, 64, 1, 48, 48, 64)
    )

    def ways():
        for rounded in (False, True):
            CpuBackend().attend(query, key, value, mask, prefix, length, 0, rounded=rounded)
        half = narrow((query, key, value), "bfloat16"), tuple(narrow(prefix, "bfloat16"))
        CpuBackend().attend(*half[0], mask, half[1], length, 0)
        words = backend._call_for((weight,), x) is quantized_calls.quantized_words
        return *taken[-3:], words

    assert ways() == (False,) * 4
    with prompts.reading():
        assert ways() == (False, True, True, True)
        monkeypatch.setenv("SPECJAX_BITS", "fixed")
        assert ways() == (False,) * 4


def test_what_is_compiled_for_prompts_is_not_taken_for_rounds():
    said = jax.jit(lambda x: x + prompts.are_read())
    assert said(jnp.zeros(())) == 0
    with prompts.reading():
        assert said(jnp.zeros(())) == 1
    assert said(jnp.zeros(())) == 0


@pytest.mark.parametrize(
    "dtype, most", [("float32", 8e-7), ("bfloat16", 1.01 * 2**-8), ("float16", 1.01 * 2**-11)]
)
def test_an_activation_is_computed_in_float32_and_rounded_once(dtype, most):
    extreme = [0, -3e4, 200, 88, -86, np.inf, np.nan]
    gate = jnp.asarray(np.concatenate([6 * normal(20_000), extreme]), dtype)
    up = jnp.asarray(np.concatenate([normal(20_000, seed=1), np.ones(7)]), dtype)
    got = np.asarray(jax.jit(lambda *x: calls.swiglu(*x, None))(gate, up), np.float64)
    x, y = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    with np.errstate(over="ignore"):
        wanted = x / (1 + np.exp(-x)) * y
    least = {"float32": 1e-30, "bfloat16": 1e-30, "float16": 2.0**-24}[dtype]
    np.testing.assert_allclose(got, wanted, rtol=most, atol=least)


@pytest.mark.parametrize("columns", [1, 32, 40])
def test_an_activation_is_computed_by_one_kernel_at_every_width(monkeypatch, columns):
    monkeypatch.setattr(calls, "swiglu", lambda *arguments: "the kernel")
    x = jnp.zeros((8, columns))
    assert CpuBackend().swiglu(x, x) == "the kernel"


def test_an_activation_has_the_derivatives_of_xlas():
    gate, up, by_xla = normal(3, 40), normal(3, 40, seed=1), XlaBackend().swiglu
    slopes = [
        jax.grad(lambda g, u, of=of: jnp.sum(jnp.sin(of(g, u))), argnums=(0, 1))(gate, up)
        for of in (lambda g, u: calls.swiglu(g, u, by_xla), by_xla)
    ]
    for got, wanted in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "out, size, columns",
    [(1, 1, 1), (300, 129, 3), (2048, 768, 8), (333, 4100, 7), (384, 128, 14), (61, 48, 32)],
)
def test_an_activation_within_its_products_has_the_bits_of_one_after_them(
    out, size, columns, dtype
):
    gate, up = (jnp.asarray(normal(out, size, seed=seed), dtype) for seed in (0, 1))
    x = normal(size, columns, seed=2)
    got = jax.jit(lambda *arrays: calls.swiglu_dots(*arrays, None))(gate, up, x)
    np.testing.assert_array_equal(got, calls.swiglu(*calls.dots((gate, up), x), None))


def test_an_activation_within_its_products_has_the_derivatives_of_xlas():
    arrays = normal(5, 7), normal(5, 7, seed=1), normal(7, 3)
    slopes = [
        jax.grad(lambda *a, of=of: jnp.sum(jnp.sin(of(*a))), argnums=(0, 1, 2))(*arrays)
        for of in (CpuBackend().swiglu_dots, XlaBackend().swiglu_dots)
    ]
    for got, wanted in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_takes_its_activation_into_products_where_one_call_can(monkeypatch):
    monkeypatch.setattr(kernels, "current", CpuBackend)
    asked = []
    monkeypatch.setattr(calls, "swiglu_dots", lambda *given: asked.append(given) or given[2][:4])

    def asks(x, bias=False, dtype=jnp.float32):
        asked.clear()
        made = [Linear(8, 4, bias=bias, rngs=nnx.Rngs(0), param_dtype=dtype) for _ in range(2)]
        swiglu_linear(x, *made)
        return bool(asked)

    few, many = jnp.ones((8, 2)), jnp.ones((8, calls.MOST_COLUMNS + 1))
    assert asks(few) and asks(few, dtype=jnp.bfloat16)
    assert not asks(few, bias=True), "a bias comes before the activation"
    assert not asks(many), "another kernel multiplies many columns"
    assert not asks(few.astype(jnp.bfloat16), dtype=jnp.bfloat16), "activations in bfloat16"


def test_weights_of_an_activation_that_do_not_fit_are_refused():
    weight, x = jnp.ones((4, 5)), jnp.ones((5, 2))
    with pytest.raises(ValueError, match=r"gate \(4, 5\) and up \(3, 5\) do not fit"):
        calls.swiglu_dots(weight, weight[:3], x, None)
    with pytest.raises(ValueError, match="weight is bfloat16: the kernels compute in float32"):
        calls.swiglu_dots(weight, weight.astype(jnp.bfloat16), x, None)


@pytest.mark.parametrize(
    ("num_heads", "given", "of_kernel", "turned"),
    [(6, {}, "2,3,20,5,4", "5,2,20,3,4"), (8, LATENT, "1,8,20,5,4", "5,1,20,8,4")],
)
def test_queries_are_not_transposed_between_projections_and_the_kernel(
    monkeypatch, num_heads, given, of_kernel, turned
):
    """The kernel takes them, and gives its result, in the layout of a projection."""
    monkeypatch.setattr(kernels, "current", CpuBackend)
    sizes = dict(vocab_size=8, hidden_size=24, intermediate_size=8, num_layers=1)
    heads = dict(num_heads=num_heads, num_kv_heads=2, head_dim=20)
    config = DecoderConfig(**sizes, **(heads | given))
    kind = LatentAttention if given else Attention
    layer = kind(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    nodes = 5, config.num_kv_heads, 20, num_heads // config.num_kv_heads, 4
    _, _, _, mask, prefix, length = attention_case(*nodes, 4, 128)
    rope = tuple(jnp.ones((config.rotary_dim // 2, 5, 4)) for _ in range(2))

    def layer_alone(x):
        def attention(q, *own):
            past = own[0], own[-1], mask, prefix, jnp.asarray(length)
            return CpuBackend().attend(q, *past), ()

        return layer(x, rope, 5, attention)[0]

    text = jax.jit(layer_alone).lower(normal(24, 20)).compile().as_text()
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    assert "specjax_attention" in text and of_kernel in shapes
    assert turned not in shapes


def committing(dtype, sizes=(4, 1)):
    """Caches of two rows, entries of five nodes, and a path of three with the slots of its nodes,
    of which some are written nowhere."""
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.integers(0, 100, shape)).astype(dtype)  # noqa: E731
    slots, entries = ([draw((3, 2, n, e)) for e in sizes] for n in (11, 5))
    path = jnp.asarray([[0, 1, 2], [0, 2, 4], [3, 4, 4]], jnp.int32)
    where = jnp.asarray([[9, 10, 11], [0, 1, 2], [11, 11, 11]], jnp.int32)
    return slots, entries, path, where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
def test_entries_are_written_into_the_slots_of_their_path_and_nowhere_else(dtype):
    given = committing(dtype)
    wanted = XlaBackend().write(*given)
    for got, one in zip(jax.jit(CpuBackend().write)(*given), wanted, strict=True):
        np.testing.assert_array_equal(got, one)
        assert (np.asarray(got) != np.asarray(given[0][0 if got.shape[3] > 1 else 1])).any()
    with pytest.raises(ValueError, match="entries .* and a cache .* do not fit"):
        calls.write(tuple(given[0]), tuple(reversed(given[1])), *given[2:], None)
    fewer = [(arrays[0], arrays[1][:1]) for arrays in given[:2]]
    with pytest.raises(ValueError, match="entries .* of 3 rows and a cache .* do not fit"):
        calls.write(*fewer, *given[2:], None)


def test_written_entries_have_derivatives():
    *arrays, path, where = committing("float32")

    def loss(arrays, on):
        return sum(jnp.sum(jnp.sin(x)) for x in on.write(*arrays, path, where))

    slopes = [jax.tree.leaves(jax.grad(loss)(arrays, on)) for on in (CpuBackend(), XlaBackend())]
    for got, wanted in zip(*slopes, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_cache_of_bfloat16_is_never_widened(monkeypatch):
    """XLA's scatter widens the whole cache on CPUs, which took longer than all else of a pass."""
    cache = ((jnp.zeros((1, 2, 512, 64), jnp.bfloat16),) * 2,) * 2
    entries = ((jnp.ones((1, 2, 4, 64), jnp.bfloat16),) * 2,) * 2
    path = jnp.arange(4, dtype=jnp.int32)[None]
    count, token = jnp.full((1,), 3), jnp.zeros((1,), jnp.int32)
    given = entries, jnp.zeros((1,), jnp.int32), Verdict(path=path, count=count, token=token)

    def of_cache_size(backend):
        monkeypatch.setattr(kernels, "current", lambda: backend)
        commit = jax.jit(lambda *given: kv_cache.commit(*given), donate_argnums=0)
        text = commit.lower(cache, *given).compile().as_text()
        return [line for line in text.splitlines() if "f32[" in line and "512,64]" in line]

    assert of_cache_size(CpuBackend()) == []
    assert of_cache_size(XlaBackend())  # the planted fault
