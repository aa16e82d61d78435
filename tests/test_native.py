"""The C++ kernels compute what XLA computes, and the whole loop runs on them as it does on XLA."""

import os
import pathlib
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.kernels import attention, quantized
from specjax.kernels.cpu import calls, compiler, library
from specjax.kernels.cpu.backend import CpuBackend, cast_exact_bf16
from specjax.kernels.xla import XlaBackend
from specjax.kernels.xla_cpu import XlaCpuBackend

problem = library.register() or library.register("bfloat16")
# where there is a compiler, kernels that do not compile are a failure
lacking = problem is not None and compiler.find() is None
needs_kernels = pytest.mark.skipif(lacking, reason=f"no kernels: {problem}")
TESTS = pathlib.Path(__file__).parent


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@needs_kernels
@pytest.mark.parametrize("out, size", [(1, 1), (7, 5), (61, 2129), (850, 767), (4096, 64)])
def test_product_is_exact_to_rounding_for_every_number_of_columns(out, size):
    weight = normal(out, size)
    for columns in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 19, 20, 25, 31, 32, 33):
        x = normal(size, columns, seed=columns)
        got = jax.jit(calls.dot)(weight, x)
        wanted = weight.astype(np.float64) @ x
        bound = 1e-6 * (np.abs(weight) @ np.abs(x)).max() + 1e-6
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


@needs_kernels
@pytest.mark.parametrize("out, size", [(1, 1), (61, 129), (37, 48), (530, 768), (360, 2500)])
def test_weights_in_bfloat16_give_the_products_of_the_floats_that_they_are(out, size):
    """A backend takes them and float32 weights together; one call of the library does not."""
    halves = jnp.asarray(normal(out, size), jnp.bfloat16)
    mixed = halves, halves.astype(jnp.float32)
    both = jax.jit(CpuBackend().dots)
    with pytest.raises(ValueError, match="weight is bfloat16: the kernels compute in float32"):
        calls.dots(mixed, normal(size, 1))
    for columns in (1, 2, 4, 8, 9, 16, 33):
        x = normal(size, columns, seed=columns)
        narrow, wide = both(mixed, x)
        alone, exact = jax.jit(calls.dot)(halves, x), np.asarray(halves, np.float64) @ x
        for got in (narrow, wide, alone):
            np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6 * size**0.5)


@needs_kernels
@pytest.mark.parametrize("size", [1, 5, 16, 33, 2048, 50_000])
def test_argmax_is_the_first_of_the_greatest_and_none_where_that_is_not_finite(size):
    x = np.round(normal(3, 4, size), 1)  # with ties
    wanted = x.argmax(axis=-1)
    assert np.asarray(jax.jit(calls.argmax)(x)).tolist() == wanted.tolist()
    over = jax.jit(jax.vmap(calls.argmax, in_axes=1, out_axes=1))(x)
    assert np.asarray(over).tolist() == wanted.tolist()
    x[0, 0], x[0, 1, size // 2], x[0, 2, -1] = -np.inf, np.inf, np.nan
    x[1, :, : size // 3] = -np.inf
    wanted = x.argmax(axis=-1)
    wanted[0, :3] = -1
    assert np.asarray(jax.jit(calls.argmax)(x)).tolist() == wanted.tolist()
    for nothing in (jnp.ones(()), jnp.ones((3, 0))):
        with pytest.raises(ValueError, match=r"argmax: x .* has no numbers over its last axis"):
            calls.argmax(nothing)


@needs_kernels
@pytest.mark.parametrize(("size", "count"), [(1, 1), (5, 5), (33, 2), (2048, 3), (50_000, 64)])
def test_the_likeliest_are_those_of_xla_with_their_logarithms(size, count):
    """In descending order, the first of equal ones first; none in rows that hold no law."""
    x = np.round(3 * normal(3, 4, size), 1) + 0.0  # with ties, and no -0.0
    x[0, 0, 0] = x[1, 0, : size - size // 3] = -np.inf
    x[2, 1, size // 2], x[2, 2, -1], x[2, 3] = np.inf, np.nan, -np.inf
    index, said = map(np.asarray, jax.jit(lambda x: calls.likeliest(x, count))(x))
    wanted, logs = map(np.asarray, jax.jit(lambda x: XlaBackend().likeliest(x, count))(x))
    assert index.tolist() == wanted.tolist()
    np.testing.assert_allclose(said, logs, rtol=2e-6, atol=2e-6)
    assert (index[2, 1:] == -1).all() and (said[2, 1:] == -np.inf).all()
    order = np.argsort(-x[0, 1:], axis=-1, kind="stable")[:, :count]
    assert (index[0, 1:] == order).all()  # in NumPy, too
    law = np.exp(x[0, 1:].astype(np.float64))
    law /= law.sum(axis=-1, keepdims=True)
    at_best = np.take_along_axis(law, order, axis=-1)
    np.testing.assert_allclose(np.exp(said[0, 1:]), at_best, rtol=2e-5)
    over = jax.vmap(lambda x: calls.likeliest(x, count), in_axes=1, out_axes=1)(x)
    assert (over[0] == index).all() and (over[1] == said).all()


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_a_table_as_columns_and_copies_are_those_of_xla_with_their_derivatives(dtype):
    table, index = jnp.asarray(normal(50, 24), dtype), jnp.asarray([3, -1, 77, 0])
    for some in (index, index[:1], index[:0]):
        rows = lambda t, some=some: calls.copy(calls.columns(t, some)).T  # noqa: E731
        wanted = lambda t, some=some: t[some].astype(jnp.float32)  # noqa: E731
        for f in (lambda g: g, lambda g: jax.grad(lambda t: jnp.sum(g(t) ** 3))):
            assert jnp.array_equal(jax.jit(f(rows))(table), jax.jit(f(wanted))(table))


def test_weights_of_products_are_cast_where_that_loses_nothing_and_something_stays():
    exact = jnp.asarray([[1.0, 0.5], [-3.0, 256.0]])
    params = {"a": {"weight": exact}, "b": {"weight": exact + 1e-6}, "embedding": exact}
    found = cast_exact_bf16(params | {"norm": {"weight": exact[0]}})
    assert found["a"]["weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["a"]["weight"].astype(jnp.float32), exact)
    others = found["b"]["weight"], found["norm"]["weight"], found["embedding"]
    assert all(x.dtype == jnp.float32 for x in others)
    assert cast_exact_bf16({"a": {"weight": exact}})["a"]["weight"].dtype == jnp.float32


@needs_kernels
@pytest.mark.parametrize(
    "out, size",
    # deep; rows that are left over; rows one by one; a piece that is no multiple of a vector
    [(64, 2129), (2047, 300), (1050, 2100), (100, 1077)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_column_of_a_product_is_the_same_bits_beside_neighbours_and_at_any_hour(out, size, dtype):
    """More than eight columns are multiplied in shares of four to eight, whose rows are fetched in
    another order."""
    weight, x = normal(out, size).astype(dtype), normal(size, 32)
    whole = np.asarray(jax.jit(calls.dot)(weight, x))
    for columns in (1, 2, 5, 7, 8, *4 * [9], 11, 13, 14, 16, 17, 19, 20, 25, 32):
        got = np.asarray(jax.jit(calls.dot)(weight, x[:, :columns]))
        np.testing.assert_array_equal(got, whole[:, :columns])
        last = np.asarray(jax.jit(calls.dot)(weight, x[:, -columns:]))
        np.testing.assert_array_equal(last, whole[:, -columns:])


@needs_kernels
def test_a_turned_product_is_the_product_turned():
    for columns in (1, 3, 8, 17, 32):
        weight, x = normal(53, 2129), normal(2129, columns, seed=columns)
        turned = jax.jit(calls.dot, static_argnums=2)(weight, x, True)
        np.testing.assert_array_equal(turned, np.asarray(jax.jit(calls.dot)(weight, x)).T)


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_with_no_columns_are_empty_in_every_type(dtype):
    few_bits = quantized.Quantized(jnp.ones((8, 5), jnp.int8), jnp.ones((8, 1)))
    for weight in (jnp.ones((8, 5), dtype), few_bits):
        for turned in (False, True):
            got = CpuBackend().dot(weight, jnp.ones((5, 0), dtype), turned)
            assert got.shape == ((0, 8) if turned else (8, 0)) and got.dtype == dtype


@needs_kernels
def test_products_of_one_call_are_those_of_a_call_each():
    for columns in (1, 4, 16):
        x = normal(67, columns)
        weights = tuple(normal(out, 67, seed=out) for out in (530, 1, 64, 2000))
        for turned in (False, True):
            got = jax.jit(calls.dots, static_argnums=2)(weights, x, turned)
            for weight, y in zip(weights, got, strict=True):
                alone = jax.jit(calls.dot, static_argnums=2)(weight, x, turned)
                np.testing.assert_array_equal(y, alone)
    with pytest.raises(ValueError, match="9 weights, it takes 1 to 8"):
        calls.dots((weights[0],) * 9, x)


@needs_kernels
def test_product_has_the_derivatives_of_a_product():
    weight, x = normal(5, 7), normal(7, 3)

    def loss(product):
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(product(w, x))), argnums=(0, 1))

    for got, wanted in zip(loss(calls.dot)(weight, x), loss(jnp.dot)(weight, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@jax.jit
def kernel_attention(*arrays):
    return calls.attend(*arrays, None)  # without derivatives


def attention_case(batch, heads, size, groups, nodes, own, slots, spread=1.0):
    rng = np.random.default_rng([batch, heads, size, groups, nodes, own, slots])
    query = spread * normal(batch, heads, size, groups, nodes)
    key, value = normal(batch, heads, own, size, seed=1), normal(batch, heads, own, size, seed=2)
    prefix = normal(batch, heads, slots, size, seed=3), normal(batch, heads, slots, size, seed=4)
    mask = rng.random((batch, own, nodes)) < 0.5
    mask[:, -nodes:] |= np.eye(nodes, dtype=bool)  # a node sees itself
    length = rng.integers(0, slots + 1, batch).astype(np.int32)
    length[0] = slots - 1
    return query, key, value, mask, prefix, length


def by_hand(query, key, value, mask, prefix, length):
    """The definition, row by row, in float64."""
    out = np.zeros(query.shape)
    for b, used in enumerate(length):
        keys = np.concatenate([prefix[0][b][:, :used], key[b]], axis=1).astype(np.float64)
        values = np.concatenate([prefix[1][b][:, :used], value[b]], axis=1)
        seen = np.concatenate([np.ones((used, mask.shape[2]), bool), mask[b]])
        score = np.einsum("kse,kegn->ksgn", keys, query[b]) / np.sqrt(query.shape[2])
        score = np.where(seen[None, :, None], score, -np.inf)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        out[b] = np.einsum("ksgn,kse->kegn", weight, values)
    return out


CASES = [
    (1, 4, 64, 3, 8, 8, 512),
    (3, 2, 20, 2, 5, 9, 300),  # earlier nodes of the draft; no size a multiple of a vector
    (2, 1, 7, 1, 1, 1, 130),
    (1, 2, 64, 2, 140, 140, 256),  # a chunk of a prompt
    (2, 2, 16, 1, 4, 4, 5000),  # longer than a block
    (1, 2, 16, 1, 4, 4, 2 * attention.BLOCK),
    (2, 2, 56, 1, 2, 3, 300),  # few columns: the last vector of features overlaps
    (1, 3, 64, 2, 1, 1, 260),
    (2, 1, 80, 7, 1, 2, 129),
]
# Columns of one vector and of several, whole or not, over prefixes whose rows differ in length.
WIDE_CASES = [
    (1, 2, 32, 1, 12, 12, 140),
    (2, 1, 64, 3, 4, 5, 300),
    (3, 1, 32, 1, 33, 33, 200),
    (2, 1, 80, 3, 33, 40, 150),
    (2, 2, 64, 3, 128, 128, 260),
    (1, 1, 128, 3, 128, 130, 40),
    (2, 1, 64, 1, 256, 256, 1),
]


@needs_kernels
@pytest.mark.parametrize("case", CASES + WIDE_CASES)
def test_attention_kernel_is_softmax_attention(case):
    query, key, value, mask, prefix, length = attention_case(*case)
    got = kernel_attention(query, *prefix, key, value, mask, length)
    wanted = by_hand(query, key, value, mask, prefix, length)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.sqrt(case[2]))


@needs_kernels
@pytest.mark.parametrize("case", [(2, 2, 64, 3, 128, 128, 260), (1, 1, 80, 1, 100, 100, 5)])
def test_attention_kernel_leaves_out_what_no_node_of_a_chunk_sees(case):
    """Of a causal chunk, of one whose last entries nobody sees, and of a tree's branches."""
    query, key, value, mask, prefix, length = attention_case(*case)
    nodes = mask.shape[2]
    causal = np.triu(np.ones((nodes, nodes), bool))
    short = causal & (np.arange(nodes) < nodes - 21)[:, None]
    side_by_side = np.kron(np.eye(4, dtype=bool), np.ones((nodes // 4,) * 2, bool)) & causal
    for mask in (causal, short, side_by_side):
        mask = np.broadcast_to(mask, (case[0], *mask.shape))
        got = kernel_attention(query, *prefix, key, value, mask, length)
        wanted = by_hand(query, key, value, mask, prefix, length)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.sqrt(case[2]))


@pytest.mark.parametrize("case", CASES)
def test_attention_by_xla_is_softmax_attention(case):
    query, key, value, mask, prefix, length = attention_case(*case)
    sizes = np.asarray(attention.prefix_sizes(case[-1]))
    choice = jnp.int32(np.sum(sizes < length.max()))
    got = jax.jit(XlaCpuBackend().attend)(query, key, value, mask, prefix, length, choice)
    wanted = by_hand(query, key, value, mask, prefix, length)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.sqrt(case[2]))


@needs_kernels
def test_attention_kernel_does_not_read_slots_beyond_the_length():
    query, key, value, mask, prefix, length = attention_case(2, 2, 16, 2, 3, 3, 400)
    length = np.asarray([0, 131], np.int32)
    clean = kernel_attention(query, *prefix, key, value, mask, length)
    for part in prefix:
        for row, used in enumerate(length):
            part[row, :, used:] = np.nan
    got = kernel_attention(query, *prefix, key, value, mask, length)
    assert np.all(np.isfinite(got))
    np.testing.assert_array_equal(got, clean)


@needs_kernels
def test_attention_kernel_survives_scores_that_overflow_an_exponential():
    query, key, value, mask, prefix, length = attention_case(1, 2, 16, 2, 3, 3, 300, spread=1e4)
    got = kernel_attention(query, *prefix, key, value, mask, length)
    wanted = by_hand(query, key, value, mask, prefix, length)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-2)


def test_memory_of_a_long_prompt_does_not_grow_with_the_prefix():
    """XLA's path: blocks of the prefix, not all its scores at once."""

    def scratch(slots):
        shapes = attention_case(1, 2, 16, 2, 128, 128, 4)
        query, key, value, mask, _, length = map(jnp.asarray, shapes[:4] + (0,) + shapes[5:])
        prefix = (jax.ShapeDtypeStruct((1, 2, slots, 16), jnp.float32),) * 2
        compiled = jax.jit(XlaCpuBackend().attend).lower(
            query, key, value, mask, prefix, length, jnp.int32(0)
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert scratch(16 * attention.BLOCK) < 1.2 * scratch(2 * attention.BLOCK)


def test_kernels_are_chosen_by_the_devices_in_use_and_not_by_the_default_backend(monkeypatch):
    """As on a machine with a GPU: by ``jax.default_device``, by a mesh, by where weights lie; and
    again for each, where a function is traced for one and then called for another."""
    cpu = jax.devices("cpu")[0]
    on_cpu = type(kernels.current())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "backends", lambda: {"cpu": 1, "gpu": 2})
    seen = []
    run = jax.jit(lambda x: seen.append(type(kernels.current())) or x + 1)
    x = jnp.ones(3)
    mesh = jax.make_mesh((1,), ("data",), devices=[cpu])
    run(x)
    with jax.default_device(cpu):
        run(x)
    with jax.set_mesh(mesh):
        run(x)
    with kernels.following({"weight": x}):
        run(x)
    run(x)
    assert seen == [XlaBackend, on_cpu, on_cpu]  # the last two calls find their traces
    assert type(kernels.of({"weight": x})) is on_cpu
    assert type(kernels.of({"weight": np.ones(3)})) is XlaBackend
    assert type(kernels.current(mesh)) is on_cpu
    with kernels.following({"weight": np.ones(3)}):
        assert type(kernels.current()) is XlaBackend


@needs_kernels
@pytest.mark.parametrize("level", compiler.LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("name", ["kernels", "bfloat16", "float16"])
def test_the_kernels_compile_without_a_warning(tmp_path, level, name):
    flags = *level.flags, "-O0", "-Werror"
    compiler.compile_to(
        tmp_path / "library.so", compiler.find(), jax.ffi.include_dir(), flags, name
    )


@needs_kernels
def test_attention_kernel_shows_a_score_that_is_no_number():
    query, key, value, mask, prefix, length = attention_case(1, 1, 16, 1, 2, 2, 300)
    prefix[0][0, 0, 7] = np.nan
    got = kernel_attention(query, *prefix, key, value, mask, length)
    assert np.all(np.isnan(got))


@needs_kernels
def test_attention_has_the_derivatives_of_xlas():
    query, key, value, mask, prefix, length = attention_case(2, 2, 8, 2, 3, 3, 20)

    def gradients(backend):
        def loss(query, key, values):
            past = (prefix[0], values)
            return jnp.sum(jnp.sin(backend.attend(query, key, value, mask, past, length, 0)))

        return jax.grad(loss, argnums=(0, 1, 2))(*map(jnp.asarray, (query, key, prefix[1])))

    length = jnp.asarray(length)
    got = gradients(CpuBackend())
    for one, other in zip(got, gradients(XlaCpuBackend()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_read():
    with pytest.raises(ValueError, match=r"weight \(4, 5\) and x \(6, 2\) do not fit"):
        calls.dot(jnp.ones((4, 5)), jnp.ones((6, 2)))
    query, key, value, mask, prefix, length = map(
        lambda x: jax.tree.map(jnp.asarray, x), attention_case(2, 2, 8, 2, 3, 3, 20)
    )
    for name, wrong in {
        "own_mask": (query, *prefix, key, value, mask[:, 1:], length),
        "length": (query, *prefix, key, value, mask, length[:1]),
        "values": (query, prefix[0], prefix[1][:, :, :5], key, value, mask, length),
    }.items():
        with pytest.raises(ValueError, match=f"attend: {name} is"):
            calls.attend(*wrong, None)
    with pytest.raises(ValueError, match="x is float16: the kernels compute in float32"):
        calls.dot(jnp.ones((4, 5)), jnp.ones((5, 2), jnp.float16))


NARROWER = ("-mno-avx512f", "-mno-avx") if platform.machine() == "x86_64" else ()


def passes_with_narrower_vectors(flags, name, code):
    """Asserts that ``code`` ends without an error in a process whose library ``name`` of kernels is
    compiled with ``flags``, a text or several."""
    flags = [flags] if isinstance(flags, str) else flags
    begin = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from specjax.kernels.cpu import library
library.prebuilt, build = lambda name: [], library.build
library.build = lambda compiler, name: build(compiler, *{flags!r}, name=name)
assert library.register({name!r}) is None
"""
    done = python(begin + code)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_kernels
@pytest.mark.parametrize("flag", NARROWER)
def test_kernels_for_narrower_vectors_compute_the_same(flag):
    code = """
import jax, numpy as np
import test_native as t
t.test_product_is_exact_to_rounding_for_every_number_of_columns(530, 767)
t.test_weights_in_bfloat16_give_the_products_of_the_floats_that_they_are(530, 67)
for dtype in (np.float32, jax.numpy.bfloat16):
    t.test_a_column_of_a_product_is_the_same_bits_beside_neighbours_and_at_any_hour(64, 2129, dtype)
for case in t.CASES[:4] + t.WIDE_CASES[:5]:
    t.test_attention_kernel_is_softmax_attention(case)
"""
    passes_with_narrower_vectors(flag, "kernels", code)


@needs_kernels
def test_loop_on_kernels_passes_the_tests_of_the_loop():
    """Held-out prompts, trees, several prefix sizes, compiled copies: on the kernels as on XLA."""
    files = [TESTS / name for name in ("test_heldout.py", "test_decoder.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)],
        env=os.environ | {"SPECJAX_NATIVE": "always", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:]
