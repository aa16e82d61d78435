"""Logits on CPUs have the same bits in a pass over one token and over several, and alone and in a
batch, so that greedy texts are the same with and without speculation, in narrow types, too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native import NARROWER, normal, passes_with_narrower_vectors
from toys import decoder_weights

import specjax
from specjax import trees
from specjax.kernels.cpu import backend, calls, compiler, library
from specjax.kernels.cpu.backend import CpuBackend
from specjax.kernels.xla import XlaBackend
from specjax.models.causal_lm import CausalLM
from specjax.models.config import DecoderConfig
from specjax.types import Draft, Verdict

problem = library.register() or library.register("bfloat16")
lacking = problem is not None and compiler.find() is None
pytestmark = pytest.mark.skipif(lacking, reason=f"no kernels: {problem}")
KINDS = [jnp.float32, jnp.bfloat16, jnp.float16]
NARROW = KINDS[1:]
LENGTH = 24  # tokens of a row
TOY = DecoderConfig(
    vocab_size=131,
    hidden_size=72,  # no multiple of a vector
    intermediate_size=100,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=20,
    qkv_bias=True,
)
FEW_PASSES = [(1, 2), (1, 5), (1, 16), (3, 4)]  # rows and tokens of each
PASSES = [*((1, w) for w in (2, 3, 4, 5, 8, 13, 16)), (2, 5), (3, 4), (8, 1), (2, 16), (8, 4)]


@pytest.fixture(autouse=True)
def library_of_float16(request):
    """Loads the kernels for float16 where a test calls them."""
    if "float16" in request.node.name.replace("bfloat16", ""):
        assert library.register("float16") is None


def toy(dtype):
    return CausalLM(TOY), jax.tree.map(lambda x: x.astype(dtype), decoder_weights(TOY))


@functools.partial(jax.jit, static_argnums=(0, 5))
def step(target, params, cache, tokens, start, fault=None):
    """The logits of a pass over ``tokens [B, W]``, and the cache with them."""
    del fault  # a key for programs that are traced with one
    batch, width = tokens.shape
    draft = Draft(start=start, tokens=tokens, topology=trees.chain_parents(width - 1))
    scores = target.verify(params, cache, draft)
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    count, token = jnp.full((batch,), width - 1), jnp.zeros((batch,), jnp.int32)
    verdict = Verdict(path=path, count=count, token=token)
    return scores.logits, target.commit(cache, scores.entries, start, verdict)


def logits_by(target, params, tokens, width, fault=None):
    """Logits ``[B, T, V]`` of rows that are read ``width`` tokens at a time."""
    batch, length = tokens.shape
    cache, out = target.init(params, batch, length + width), []
    for at in range(0, length // width * width, width):
        start = jnp.full((batch,), at, jnp.int32)
        piece = jnp.asarray(tokens[:, at : at + width], jnp.int32)
        logits, cache = step(target, params, cache, piece, start, fault)
        out.append(np.asarray(logits, np.float32))
    return np.concatenate(out, axis=1)


def moved(target, params, passes, tokens, fault=None):
    """The batches and widths at which logits of a row are not those of one token alone."""
    alone = logits_by(target, params, tokens[:1], 1, fault)
    found = []
    for batch, width in passes:
        got = logits_by(target, params, tokens[:batch], width, fault)[0]
        if not np.array_equal(got, alone[0, : len(got)]):
            found.append((batch, width))
    return found


def random_tokens(vocab, rows=8, length=LENGTH):
    return np.random.default_rng(0).integers(0, vocab, (rows, length))


@pytest.mark.parametrize("dtype", KINDS)
def test_logits_of_a_toy_have_the_same_bits_at_every_width_and_batch(dtype):
    assert moved(*toy(dtype), FEW_PASSES, random_tokens(TOY.vocab_size)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_of_the_embedded_target_have_the_same_bits(dtype):
    lm = specjax.load("embedded", dtype=dtype)
    tokens = random_tokens(lm.config.vocab_size, length=48)
    assert moved(lm.target, lm.params, PASSES, tokens) == []


def test_fault_products_that_are_summed_in_another_order_for_several_columns_are_seen(monkeypatch):
    def halved(weights, x, transpose_out=False):
        if x.shape[1] == 1:
            return calls.dots(weights, x, transpose_out)
        cut = x.shape[0] // 2
        lower = calls.dots(tuple(w[:, :cut] for w in weights), x[:cut], transpose_out)
        upper = calls.dots(tuple(w[:, cut:] for w in weights), x[cut:], transpose_out)
        return tuple(a + b for a, b in zip(lower, upper, strict=True))

    tokens = random_tokens(TOY.vocab_size, rows=1, length=8)
    monkeypatch.setattr(backend, "_call_for", lambda weights, x: halved)
    assert moved(*toy(jnp.float32), [(1, 4)], tokens, fault="halved") == [(1, 4)]


def columns_of(case, dtype):
    """The arrays of ``calls.attend`` of a causal sequence, as a function of its first node and of
    how many nodes there are; all before are in the cache."""
    _, heads, size, groups, nodes, *_ = case
    query = jnp.asarray(2 * normal(1, heads, size, groups, nodes), dtype)
    key = jnp.asarray(normal(1, heads, nodes, size, seed=1), dtype)
    value = jnp.asarray(normal(1, heads, nodes, size, seed=2), dtype)

    def arrays(first, count):
        own = slice(first, first + count)
        mask = np.triu(np.ones((1, count, count), bool))
        entries = key[:, :, own], value[:, :, own]
        return query[..., own], key, value, *entries, mask, np.asarray([first], np.int32)

    return arrays


attend = jax.jit(lambda *arrays: calls.attend(*arrays, None))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "case", [(1, 2, 64, 3, 300), (1, 1, 20, 1, 300), (1, 2, 7, 2, 300), (1, 1, 80, 1, 300)]
)
def test_attention_of_a_node_does_not_depend_on_the_others_or_on_what_is_cached(case, dtype):
    """Over the bounds of blocks of slots, which come elsewhere in the sequence each time."""
    arrays = columns_of(case, dtype)
    alone = {n: np.asarray(attend(*arrays(n, 1)), np.float32) for n in range(100, 300, 7)}
    for first, count in ((98, 4), (100, 9), (120, 16), (0, 140), (250, 33)):
        got = np.asarray(attend(*arrays(first, count)), np.float32)
        for n in set(alone) & {*range(first, first + count)}:
            np.testing.assert_array_equal(got[..., n - first : n - first + 1], alone[n])


@pytest.mark.parametrize("dtype", KINDS)
def test_attention_of_a_node_of_a_tree_is_that_of_its_path(dtype):
    arrays = columns_of((1, 2, 64, 2, 200), dtype)
    query, keys, values, key, value, _, length = arrays(130, 8)
    parents = (-1, 0, 0, 1, 2, 3, 4, 5)
    mask = np.eye(8, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[:, node] |= mask[:, parent]
    got = attend(query, keys, values, key, value, mask[None], length)
    path = np.flatnonzero(mask[:, 7])
    *before, node = path
    slots = slice(130, 130 + len(before))
    keys = keys.at[:, :, slots].set(key[:, :, before])
    values = values.at[:, :, slots].set(value[:, :, before])
    own = key[:, :, [node]], value[:, :, [node]], np.ones((1, 1, 1), bool)
    wanted = attend(query[..., [node]], keys, values, *own, length + len(before))
    np.testing.assert_array_equal(got[..., 7], wanted[..., 0])


@pytest.mark.parametrize("dtype, bits", [(jnp.bfloat16, 8), (jnp.float16, 11)])
@pytest.mark.parametrize("out, size", [(1, 1), (7, 5), (61, 129), (48, 64), (270, 2200)])
def test_narrow_products_are_rounded_once_and_every_column_has_the_same_bits(
    out, size, dtype, bits
):
    weight, whole = (jnp.asarray(x, dtype) for x in (normal(out, size), normal(size, 70)))
    exact = np.asarray(weight, np.float64) @ np.asarray(whole, np.float64)
    bound = (
        np.abs(exact) * 2.0**-bits
        + 1e-6 * (np.abs(np.asarray(weight, np.float64)).sum(1) + 1).max()
    )
    product = jax.jit(calls.half_dots, static_argnums=2)
    wanted = np.asarray(product((weight,), whole)[0], np.float32)
    assert np.all(np.abs(wanted - exact) <= bound)
    for columns in (1, 2, 5, 8, 9, 13, 16, 17, 32, 33):
        x = whole[:, :columns]
        (got,) = product((weight,), x)
        turned, first = product((weight, weight[:1]), x, True)
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted[:, :columns])
        np.testing.assert_array_equal(turned, got.T)
        np.testing.assert_array_equal(first, got[:1].T)


def test_every_float16_is_read_and_written_as_ieee_says():
    """Subnormal numbers, infinities and NaN included; and sums are rounded to the nearest."""
    times = jax.jit(lambda weight, x: calls.half_dots((weight,), x)[0])

    def product(weight, x):
        made = times(jnp.asarray(weight[None], jnp.float16), jnp.asarray(x, jnp.float16))
        return np.asarray(made)[0]

    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(product(np.ones(1), numbers[None]), numbers)
    random = np.random.default_rng(0)
    pairs = random.permutation(numbers[np.isfinite(numbers)])[:60_000].reshape(2, -1)
    with np.errstate(over="ignore"):
        wanted = pairs.astype(np.float32).sum(0).astype(np.float16)
        assert np.isinf(wanted).any()
    np.testing.assert_array_equal(product(np.ones(2), pairs), wanted)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_products_have_derivatives_and_refuse_other_types(dtype):
    weight, x = jnp.asarray(normal(5, 7), dtype), jnp.asarray(normal(7, 3), dtype)

    def gradient(product):
        loss = lambda w, x: jnp.sum(jnp.sin(product(w, x).astype(jnp.float32)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(weight, x)

    for turned in (False, True):
        got = gradient(lambda w, x, turned=turned: calls.half_dots((w,), x, turned)[0].T)
        for one, other in zip(got, gradient(jnp.dot), strict=True):
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0.05, atol=0.05
            )
    with pytest.raises(ValueError, match="float32; all must be bfloat16, or all float16"):
        calls.half_dots((weight,), x.astype(jnp.float32))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("size", [1, 5, 16, 100, 192])
def test_norms_are_those_of_xla_and_every_column_has_the_same_bits(size, dtype):
    for kind in (
        dict(centered=False, plus_one=False),
        dict(centered=True, plus_one=False),
        dict(centered=False, plus_one=True),
    ):
        whole = jnp.asarray(3 * normal(size, 40) + 1, dtype)
        weight = jnp.asarray(normal(size), dtype)
        bias = jnp.asarray(normal(size, seed=1), dtype) if kind["centered"] else None
        given = functools.partial(CpuBackend().norm, weight=weight, bias=bias, eps=1e-5, **kind)
        ours, wanted = jax.jit(given), XlaBackend().norm(whole, weight, bias, eps=1e-5, **kind)
        got = np.asarray(ours(whole), np.float32)
        bound = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}.get(dtype, 1e-6)
        np.testing.assert_allclose(got, np.asarray(wanted, np.float32), rtol=bound, atol=4 * bound)
        for columns in (1, 2, 5, 8, 17):
            x = whole[:, :columns]
            np.testing.assert_array_equal(np.asarray(ours(x), np.float32), got[:, :columns])
        parted = ours(whole.reshape(size, 5, 2, 4)).reshape(size, 40)
        np.testing.assert_array_equal(np.asarray(parted, np.float32), got)


def test_a_norm_has_the_derivatives_of_xlas():
    x, weight = jnp.asarray(normal(8, 3)), jnp.asarray(normal(8))

    def gradients(on):
        loss = lambda x, weight: jnp.sum(jnp.sin(on.norm(x, weight, eps=1e-5)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(x, weight)

    for one, other in zip(gradients(CpuBackend()), gradients(XlaBackend()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_fixed_bits_send_wide_products_to_the_kernels_and_other_values_are_refused(monkeypatch):
    weight, x = jnp.asarray(normal(40, 300)), jnp.asarray(normal(300, 40))
    assert backend._call_for((weight,), x) is calls.many_dots
    monkeypatch.setenv("SPECJAX_BITS", "fixed")
    got, alone = CpuBackend().dot(weight, x), CpuBackend().dot(weight, x[:, :1])
    np.testing.assert_array_equal(got[:, :1], alone)
    monkeypatch.setenv("SPECJAX_BITS", "moving")
    with pytest.raises(ValueError, match="SPECJAX_BITS='moving': it must be fixed, or not be set"):
        CpuBackend().dot(weight, x)


WAYS = ("-DSPECJAX_WITHOUT_TILES", "-DSPECJAX_WITHOUT_TILES -DSPECJAX_WITHOUT_DOTS")


@pytest.mark.parametrize("flags", [*WAYS, *NARROWER])
def test_other_ways_and_narrower_vectors_compute_the_same(flags):
    code = """
import jax.numpy as jnp
import test_fixed_bits as t
assert library.register("float16") is None
t.test_every_float16_is_read_and_written_as_ieee_says()
for out, size in ((61, 129), (270, 2200)):
    for dtype, bits in ((jnp.bfloat16, 8), (jnp.float16, 11)):
        t.test_narrow_products_are_rounded_once_and_every_column_has_the_same_bits(
            out, size, dtype, bits
        )
for dtype in t.KINDS:
    t.test_attention_of_a_node_does_not_depend_on_the_others_or_on_what_is_cached(
        (1, 2, 20, 3, 300), dtype
    )
    t.test_norms_are_those_of_xla_and_every_column_has_the_same_bits(100, dtype)
"""
    passes_with_narrower_vectors(flags.split(), "kernels", code)
