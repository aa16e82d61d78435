"""The kernels for weights of eight and four bits compute products with the floats that these stand
for, by C++ and by XLA."""

import dataclasses
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native import normal, passes_with_narrower_vectors

from specjax.kernels import quantized
from specjax.kernels.cpu import backend, calls, compiler, library, quantized_calls
from specjax.kernels.cpu.backend import CpuBackend
from specjax.kernels.quantized import Quantized
from specjax.kernels.xla import XlaBackend
from specjax.kernels.xla_cpu import PREFILL_CHUNK, XlaCpuBackend

problem = library.register("quantized")
lacking = problem is not None and compiler.find() is None
needs_kernels = pytest.mark.skipif(lacking, reason=f"no kernels: {problem}")
KINDS = {  # bits, inputs of a group (None: all), whether there are zeros
    "int8": (8, None, False),
    "int8 groups": (8, 32, False),
    "int8 zeros": (8, 64, True),
    "int4": (4, 32, False),
    "int4 wide groups": (4, 96, False),
    "int4 zeros": (4, 96, True),
    "int4 channels": (4, None, False),
}
# by processors with VNNI
IN_BYTES = ("int8", "int4", "int4 wide groups", "int4 zeros", "int4 channels")
SHAPES = [(1, 192), (7, 192), (61, 576), (530, 192), (25, 2304)]  # 2304: deeper than a block
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 19, 20, 25, 31, 32, 70)


def held(out, size, kind, seed=0):
    """A random weight, and the float64 numbers ``[out, size]`` that it stands for."""
    bits, group, zeros = KINDS[kind]
    rng = np.random.default_rng([out, size, seed])
    groups = 1 if group is None else size // group
    values = rng.integers(*((-127, 128) if bits == 8 else (0, 16)), (out, size), np.int8)
    scale = rng.uniform(0.5, 2, (out, groups)).astype(np.float32)
    zero = rng.integers(*((-100, 100) if bits == 8 else (0, 17)), (out, groups), np.int8)
    middle = zero.astype(np.float64) if zeros else 8 if bits == 4 else 0
    parts = values.reshape(out, groups, -1) - np.broadcast_to(middle, (out, groups))[:, :, None]
    numbers = (parts * scale[:, :, None].astype(np.float64)).reshape(out, size)
    stored = jnp.asarray(values) if bits == 8 else quantized.pack(jnp.asarray(values))
    return Quantized(stored, jnp.asarray(scale), jnp.asarray(zero) if zeros else None), numbers


def bound(numbers, x, kind=None):
    """The rounding that products of these numbers may have: that of float32, and for kinds whose
    columns may be rounded to 16 bits, half a step of every input."""
    rounding = 1e-6 * (np.abs(numbers) @ np.abs(x)).max() + 1e-6
    step = np.abs(x).max() / 32639 if kind in IN_BYTES else 0
    return rounding + step / 2 * np.abs(numbers).sum(axis=1).max()


def beyond_bfloat16(got, numbers, x):
    """The largest error over what rounding to bfloat16 may make of it: of each weight, if it is
    widened to that type, and of the result, by half of a last bit each."""
    x = np.asarray(x, np.float64)
    wanted = numbers @ x
    most = 2**-8 * (np.abs(numbers) @ np.abs(x) + np.abs(wanted)) + bound(numbers, x)
    return (np.abs(np.asarray(got, np.float64) - wanted) / most).max()


product = jax.jit(lambda weight, x: quantized_calls.quantized_dots((weight,), x)[0])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out, size", SHAPES)
def test_a_product_is_exact_to_rounding_for_every_number_of_columns(out, size, kind):
    weight, numbers = held(out, size, kind)
    np.testing.assert_allclose(quantized.widen(weight), numbers, rtol=1e-6)
    for columns in COLUMNS:
        x = normal(size, columns, seed=columns)
        got = product(weight, x)
        np.testing.assert_allclose(got, numbers @ x, rtol=0, atol=bound(numbers, x, kind))


@needs_kernels
@pytest.mark.parametrize("size", [1, 5, 129, 1100])
def test_rows_of_eight_bits_may_have_any_length(size):
    weight, numbers = held(61, size, "int8")
    for columns in (1, 4, 9):
        x = normal(size, columns)
        got = product(weight, x)
        np.testing.assert_allclose(got, numbers @ x, rtol=0, atol=bound(numbers, x, "int8"))


@needs_kernels
def test_a_column_in_sixteen_bits_has_a_scale_for_every_1024_inputs_and_says_what_is_not_finite():
    weight, numbers = held(30, 2304, "int8")
    x = normal(2304, 7)
    x[5, 1], x[1030, 2], x[7, 3], x[:, 4], x[:1024, 5] = 1e30, np.inf, np.nan, 0, 1e-38
    got = np.asarray(product(weight, x))
    assert np.isfinite(got).all(axis=0).tolist() == [True, True, False, False, True, True, True]
    assert not np.isfinite(got[:, 2:4]).any() and not got[:, 4].any()
    for column in (0, 5, 6):
        one = x[:, [column]]
        np.testing.assert_allclose(
            got[:, [column]], numbers @ one, rtol=0, atol=bound(numbers, one, "int8")
        )
    # the large number is in the first block: where its weights are zero, the others keep their bits
    quiet = dataclasses.replace(weight, qvalue=weight.qvalue.at[:, :1024].set(0))
    others = np.where(np.arange(2304)[:, None] < 1024, 0, x[:, [1]])
    np.testing.assert_array_equal(product(quiet, x[:, [1]]), product(quiet, others))


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("turned", [False, True])
def test_columns_beyond_those_that_are_packed_at_once_have_the_bits_of_few_columns(kind, turned):
    weight, x = held(50, 192, kind)[0], normal(192, 520)  # 512 at most are packed at once
    whole = np.asarray(quantized_calls.quantized_dots((weight,), x, turned)[0])
    few = np.asarray(product(weight, x[:, 510:515]))
    np.testing.assert_array_equal((whole.T if turned else whole)[:, 510:515], few)


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4 zeros"])
def test_numbers_that_are_not_finite_give_the_same_bits_beside_few_columns_and_many(kind):
    weight, x = held(30, 2304, kind)[0], normal(2304, 17)
    x[5, 1], x[1030, 2], x[7, 3], x[:, 4], x[:1024, 0] = 1e30, np.inf, np.nan, 0, 1e-38
    many = np.asarray(product(weight, x))
    assert np.isfinite(many).all(axis=0).tolist() == [True, True, False, False, *[True] * 13]
    for columns in (1, 5):
        few = np.asarray(product(weight, x[:, :columns]))
        np.testing.assert_array_equal(few, many[:, :columns])


@needs_kernels
def test_passes_of_any_length_and_long_chunks_are_for_weights_that_are_multiplied_as_bytes_alone():
    with_bytes, x = library.has_byte_dots(), jnp.zeros((192, 40))
    for kind in KINDS:
        weight = held(37, 192, kind)[0]
        taken = backend._call_for((weight,), x) is quantized_calls.quantized_dots
        assert taken == (with_bytes and kind in IN_BYTES), kind
        for others in ([], [held(37, 192, "int8")[0]]):
            held_and_floats = [*others, weight, x]
            chunk = CpuBackend().prefill_chunk(held_and_floats)
            long = with_bytes and kind in IN_BYTES
            by_size = XlaCpuBackend().prefill_chunk(held_and_floats)
            opened = library.has_tiles() and "int4" in kind
            assert chunk == ((256 if opened else PREFILL_CHUNK) if long else by_size), kind


def summed(values, x, tile):
    """Products of whole numbers ``values [out, 1024]`` and ``x [1024, M]`` in float32: the
    sums of ``tile`` inputs are exact, and every fourth tile adds to the same one of four sums."""
    parts = values.reshape(len(values), -1, tile).astype(np.int64)
    exact = np.einsum("otk,tkm->tom", parts, x.reshape(-1, tile, x.shape[1]).astype(np.int64))
    sums = np.zeros((4, *exact.shape[1:]), np.float32)
    for i, part in enumerate(exact):
        sums[i % 4] += part.astype(np.float32)
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@needs_kernels
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 40])
def test_whole_numbers_of_sixteen_bits_are_summed_exactly_and_rounded_once(columns):
    if not library.has_byte_dots():
        pytest.skip("this processor does not multiply bytes")
    rng = np.random.default_rng(columns)
    x = rng.integers(-32639, 32640, (1024, columns))
    x[3], x[:, -1] = 32639, 32639  # each column's scale is 1, and the last one's sums are greatest
    eight, four = rng.integers(-127, 128, (50, 1024)), rng.integers(-8, 8, (50, 1024))
    eight[0], eight[1], four[0] = 127, -128, -8
    ones = jnp.ones((50, 1), jnp.float32)
    held_eight = Quantized(jnp.asarray(eight, jnp.int8), ones)
    held_four = Quantized(quantized.pack(jnp.asarray(four + 8)), jnp.ones((50, 32), jnp.float32))
    got = [np.asarray(product(held, x.astype(np.float32))) for held in (held_eight, held_four)]
    np.testing.assert_array_equal(got[0], summed(eight, x, 1024))
    np.testing.assert_array_equal(got[1], summed(four, x, 32))
    # the planted faults: a sum of rounded halves, and one input that is a step of 16 bits off
    assert (got[0] != summed(eight, x, 512)).any()
    x[700, columns // 2] -= 1
    assert (got[0] != summed(eight, x, 1024)).any() and (got[1] != summed(four, x, 32)).any()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_has_the_same_bits_beside_any_others_and_at_any_hour(kind):
    for out in (64, 2047):
        weight, x = held(out, 1152, kind)[0], normal(1152, 50)
        whole = np.asarray(product(weight, x))
        for columns in (1, 2, 5, 6, 7, 8, 9, 11, 13, 16, 17, 19, 20, 25, 32, 32, 47):
            got = np.asarray(product(weight, x[:, :columns]))
            np.testing.assert_array_equal(got, whole[:, :columns])


@needs_kernels
@pytest.mark.parametrize("columns", [1, 3, 9, 40])
def test_products_of_one_call_are_those_of_a_call_each_and_turned_if_asked_for(columns):
    x = normal(192, columns)
    weights = tuple(held(37 + i, 192, kind)[0] for i, kind in enumerate(KINDS))
    for turned in (False, True):
        got = jax.jit(quantized_calls.quantized_dots, static_argnums=2)(weights, x, turned)
        for weight, y in zip(weights, got, strict=True):
            alone = np.asarray(product(weight, x))
            np.testing.assert_array_equal(y, alone.T if turned else alone)


@pytest.mark.parametrize("on", [CpuBackend(), XlaCpuBackend(), XlaBackend()])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 5, 40])
def test_every_backend_computes_the_same_law(on, kind, columns, monkeypatch):
    monkeypatch.setattr(quantized, "BLOCK", 20 * 192)  # blocks that overlap
    weight, numbers = held(61, 192, kind)
    x = normal(192, columns)
    in_bytes = kind if type(on) is CpuBackend else None
    got = jax.jit(on.dot)(weight, jnp.asarray(x))
    np.testing.assert_allclose(got, numbers @ x, rtol=0, atol=bound(numbers, x, in_bytes))
    half = jnp.asarray(x, jnp.bfloat16)
    got = jax.jit(on.dot)(weight, half)
    assert got.dtype == jnp.bfloat16
    assert beyond_bfloat16(got, numbers, half) < 1
    if weight.scale.shape[1] > 1:  # the planted fault: a scale one group off
        shifted = dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=1))
        assert beyond_bfloat16(jax.jit(on.dot)(shifted, half), numbers, half) > 3


@needs_kernels
@pytest.mark.parametrize("kind", ["int8 groups", "int4", "int4 zeros"])
def test_fault_a_scale_one_group_off_is_seen(kind):
    weight, numbers = held(61, 192, kind)
    shifted = dataclasses.replace(weight, scale=jnp.roll(weight.scale, 1, axis=1))
    x = normal(192, 4)
    for made in (product(shifted, x), quantized.dot(shifted, jnp.asarray(x), by_blocks=True)):
        assert np.abs(np.asarray(made) - numbers @ x).max() > 1000 * bound(numbers, x)


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["int8", "int4 zeros", "int8 groups"])
def test_narrow_activations_meet_few_bits_as_their_float32_and_are_rounded_once(kind, dtype):
    weight, _ = held(61, 192, kind)
    weight = dataclasses.replace(weight, scale=weight.scale / 64)  # float16 must hold the products
    for columns in (1, 5, 32, 40):
        x = jnp.asarray(normal(192, columns), dtype)
        for transpose_out in (False, True):
            (whole,) = CpuBackend().dots((weight,), x.astype(jnp.float32), transpose_out)
            (got,) = CpuBackend().dots((weight,), x, transpose_out)
            assert got.dtype == dtype
            if columns <= 32 or kind != "int8 groups" and library.has_byte_dots():
                np.testing.assert_array_equal(got, whole.astype(dtype))
            else:  # XLA multiplies, and rounds the weights as well
                few = 4 * float(jnp.finfo(dtype).eps) * jnp.abs(whole).max()
                np.testing.assert_allclose(got.astype(jnp.float32), whole, rtol=0, atol=few)


def test_without_the_kernels_xla_serves_and_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(library, "register", lambda name: "there is no compiler")
    backend._has.cache_clear()
    weight, numbers = held(61, 192, "int4")
    x = normal(192, 4)
    for _ in range(2):
        got = CpuBackend().dot(weight, jnp.asarray(x))
        np.testing.assert_allclose(got, numbers @ x, rtol=0, atol=bound(numbers, x))
    backend._has.cache_clear()
    (line,) = caplog.messages
    assert line.endswith("no CPU kernels (decoding will be slower): there is no compiler")


@needs_kernels
@pytest.mark.parametrize(
    "kind, dtype, line",
    [
        ("int8", "float32", backend.FEW_BITS_WIDENED),
        ("int4", "float32", backend.FEW_BITS_WIDENED),
        ("int8 zeros", "float32", None),  # which are widened by every processor
        (None, "float32", None),
        (None, "bfloat16", backend.HALF_WIDENED),
        ("int8", "bfloat16", backend.FEW_BITS_WIDENED),
        ("int4", "float16", backend.FEW_BITS_WIDENED),
    ],
)
def test_what_a_processor_without_the_instructions_does_is_said_in_one_line(
    kind, dtype, line, monkeypatch, caplog
):
    library.register("kernels" if dtype == "float32" else dtype)  # a line says if it compiles
    caplog.clear()
    monkeypatch.setattr(library, "has_byte_dots", lambda: False)
    monkeypatch.setattr(library, "has_half_dots", lambda: False)
    monkeypatch.setattr(library, "has_tiles", lambda: False)
    backend._warn.cache_clear()
    weight = jnp.ones((5, 192), dtype) if kind is None else held(5, 192, kind)[0]
    for columns in (1, 4, 40):
        CpuBackend().dots((weight, weight), jnp.ones((192, columns), dtype))
    backend._warn.cache_clear()
    assert caplog.messages == ([] if line is None else [line])


@needs_kernels
def test_with_the_instructions_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(library, "has_byte_dots", lambda: True)
    monkeypatch.setattr(library, "has_half_dots", lambda: True)
    backend._warn.cache_clear()
    library.register("bfloat16")  # a line says if it compiles
    caplog.clear()
    for weight, dtype in ((held(5, 192, "int4")[0], "float32"), (jnp.ones((5, 192)), "bfloat16")):
        weight = weight.astype(dtype) if dtype == "bfloat16" else weight
        backend._call_for((weight,), jnp.ones((192, 4), dtype))
    assert not caplog.messages


def test_four_bits_are_packed_as_the_documentation_says():
    values = np.arange(64).reshape(1, 64) % 16
    packed = np.asarray(quantized.pack(jnp.asarray(values)))
    assert packed.dtype == np.uint8 and packed.shape == (1, 32)
    assert [packed[0, 3] & 15, packed[0, 3] >> 4] == [values[0, 3], values[0, 19]]
    assert [packed[0, 16 + 5] & 15, packed[0, 16 + 5] >> 4] == [values[0, 37], values[0, 53]]
    np.testing.assert_array_equal(quantized.unpack(jnp.asarray(packed)), values)


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_product_has_the_derivatives_of_a_product(kind):
    weight, numbers = held(5, 192, kind)
    x = normal(192, 3) / 1000

    def gradient(product):
        return jax.grad(lambda x: jnp.sum(jnp.sin(product(x))))(x)

    wanted = gradient(lambda x: jnp.dot(jnp.asarray(numbers, jnp.float32), x))
    got = gradient(lambda x: quantized_calls.quantized_dots((weight,), x)[0])
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-2)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_read():
    weight, _ = held(5, 192, "int4")
    with pytest.raises(ValueError, match=r"weight \(5, 192\) and x \(64, 2\) do not fit"):
        quantized_calls.quantized_dots((weight,), jnp.ones((64, 2)))
    narrow = dataclasses.replace(weight, scale=jnp.ones((5, 12)))
    with pytest.raises(ValueError, match=r"scales \(5, 12\): groups must be multiples of 32"):
        quantized_calls.quantized_dots((narrow,), jnp.ones((192, 2)))
    with pytest.raises(ValueError, match="x is bfloat16: the kernels compute in float32"):
        quantized_calls.quantized_dots((weight,), jnp.ones((192, 2), jnp.bfloat16))
    for shape, what in (((0, 192), "rows"), ((5, 0), "inputs")):
        empty = jnp.ones(shape), jnp.ones((shape[1], 2))
        few = Quantized(jnp.ones(shape, jnp.int8), jnp.ones((shape[0], 1)))
        message = rf"weight \({shape[0]}, {shape[1]}\) has no {what}; it must have one at least"
        for call in (calls.dots, calls.many_dots):
            with pytest.raises(ValueError, match=f"dots: {message}"):
                call((empty[0],), empty[1])
        with pytest.raises(ValueError, match=f"half_dots: {message}"):
            calls.half_dots((empty[0].astype("bfloat16"),), empty[1].astype("bfloat16"))
        with pytest.raises(ValueError, match=f"quantized_dots: {message}"):
            quantized_calls.quantized_dots((few,), empty[1])
    with pytest.raises(ValueError, match="9 weights, it takes 1 to 8"):
        quantized_calls.quantized_dots((weight,) * 9, jnp.ones((192, 2)))


OTHER_WAYS = ("-DSPECJAX_WITHOUT_DOTS", "-mno-avx512f", "-mno-avx2", "-mno-avx")
TILES = {"amx_tile", "amx_int8"} <= compiler.processor_features()
WITHOUT_TILES = ("-DSPECJAX_WITHOUT_TILES",) if TILES else ()  # others never take tiles
NARROWER = (*WITHOUT_TILES, *OTHER_WAYS) if platform.machine() == "x86_64" else ()


@needs_kernels
@pytest.mark.parametrize("flag", NARROWER)
def test_kernels_for_narrower_vectors_compute_the_same(flag):
    code = """
import test_native_quantized as t
for kind in t.KINDS:
    t.test_a_product_is_exact_to_rounding_for_every_number_of_columns(61, 576, kind)
    t.test_a_column_has_the_same_bits_beside_any_others_and_at_any_hour(kind)
t.test_rows_of_eight_bits_may_have_any_length(129)
"""
    passes_with_narrower_vectors(flag, "quantized", code)


@needs_kernels
@pytest.mark.parametrize("level", compiler.LEVELS, ids=lambda level: level.name)
def test_the_kernels_compile_without_a_warning(tmp_path, level):
    compiler.compile_to(
        tmp_path / "quantized.so",
        compiler.find(),
        jax.ffi.include_dir(),
        (*level.flags, "-O0", "-Werror"),
        "quantized",
    )
