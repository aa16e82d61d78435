"""Products with many columns, as of a prompt, on the C++ kernels."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_native import NARROWER, needs_kernels, normal, passes_with_narrower_vectors

from specjax.kernels.cpu import calls
from specjax.kernels.cpu.backend import CpuBackend

pytestmark = needs_kernels
# a tile, a vector, a task and a piece of the kernel, and one more or less of each
SIZES = [(1, 1), (7, 5), (95, 257), (98, 256), (530, 300)]
COLUMNS = (1, 15, 16, 17, 31, 32, 33, 65, 255, 256, 257, 300)
product = jax.jit(calls.many_dots, static_argnums=2)


@pytest.mark.parametrize("out, size", SIZES)
def test_products_are_exact_to_rounding_for_every_number_of_columns(out, size):
    floats = normal(out, size), normal(out + 3, size, seed=5)
    halves = tuple(jnp.asarray(weight, jnp.bfloat16) for weight in floats)
    for columns in COLUMNS:
        x = normal(size, columns, seed=columns)
        for weights, turned in itertools.product((floats, halves), (False, True)):
            for weight, got in zip(weights, product(weights, x, turned), strict=True):
                wanted = np.asarray(weight, np.float64) @ x
                np.testing.assert_allclose(
                    got, wanted.T if turned else wanted, rtol=0, atol=4e-6 * size**0.5
                )


def test_errors_are_those_of_float32_over_a_wide_range():
    """In units of 2^-24 of the sum of magnitudes; numbers of fewer bits are off by hundreds."""
    for size in (40, 768):
        weight, x = normal(64, size), normal(size, 64)
        for power in (0, 60, -50):
            given = weight * np.float32(2.0**power), x * np.float32(2.0 ** (power / 3))
            for kind in (jnp.float32, jnp.bfloat16):
                weights = jnp.asarray(given[0], kind)
                got = np.asarray(product((weights,), given[1])[0], np.float64)
                exact, sizes = (
                    f(np.asarray(weights, np.float64)) @ f(given[1].astype(np.float64))
                    for f in (np.asarray, np.abs)
                )
                error = (got - exact) / sizes * 2**24
                assert np.sqrt(np.mean(error**2)) < 0.6 and np.abs(error).max() < 4


def test_small_numbers_beside_others_change_no_more_than_their_size():
    """Also where tiles take them for zero."""
    weight, x = normal(40, 64), normal(64, 48)
    for size in (1e-30, 1e-35, 1e-40):
        mixed = x.copy()
        mixed[1::2] *= np.float32(size)
        for given in ((weight,), (jnp.asarray(weight, jnp.bfloat16),)):
            exact = np.asarray(given[0], np.float64) @ mixed
            np.testing.assert_allclose(product(given, mixed)[0], exact, rtol=0, atol=2e-5)
            small = np.asarray(product(given, np.float32(size) * x)[0], np.float64)
            assert np.abs(small).max() < 100 * size


def test_what_is_not_finite_stays_so():
    weight, x = normal(40, 64), normal(64, 48)
    weight[3, 5], x[7, 2], x[9, 4] = np.inf, np.nan, -np.inf
    for kind in (jnp.float32, jnp.bfloat16):
        got = np.isfinite(product((jnp.asarray(weight, kind),), x)[0])
        wanted = np.ones((40, 48), bool)
        wanted[3], wanted[:, [2, 4]] = False, False
        np.testing.assert_array_equal(got, wanted)


def test_a_column_has_the_same_bits_beside_any_others():
    weight, x = normal(100, 300), normal(300, max(COLUMNS))
    for kind in (jnp.float32, jnp.bfloat16):
        given = (jnp.asarray(weight, kind),)
        whole = product(given, x)[0]
        for columns in COLUMNS:
            for at in (slice(columns), slice(-columns, None)):
                np.testing.assert_array_equal(product(given, x[:, at])[0], whole[:, at])


def test_prompts_with_activations_in_float32_are_multiplied_that_way():
    weight, backend = normal(20, 40), CpuBackend()
    for kind in (jnp.float32, jnp.bfloat16):
        for columns in (calls.MOST_COLUMNS, calls.MOST_COLUMNS + 1):
            given = jnp.asarray(weight, kind), normal(40, columns)
            lowered = jax.jit(backend.dot).lower(*given).as_text()
            assert ("specjax_many_products" in lowered) == (columns > calls.MOST_COLUMNS)


def test_derivatives_are_those_of_a_product():
    weight, x = normal(5, 7), normal(7, 40)

    def slopes(multiply):
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(multiply(w, x))), argnums=(0, 1))(weight, x)

    ours = slopes(lambda w, x: calls.many_dots((w,), x)[0])
    for got, wanted in zip(ours, slopes(jnp.dot), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_other_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="many_dots: weight"):
        calls.many_dots((jnp.ones((4, 5)),), jnp.ones((4, 40)))
    with pytest.raises(ValueError, match="weight is float16"):
        calls.many_dots((jnp.ones((4, 5), jnp.float16),), jnp.ones((5, 40)))
    with pytest.raises(ValueError, match="x is bfloat16"):
        calls.many_dots((jnp.ones((4, 5)),), jnp.ones((5, 40), jnp.bfloat16))


@pytest.mark.parametrize("flag", (*NARROWER, "-DSPECJAX_WITHOUT_TILES"))
def test_kernels_for_narrower_vectors_compute_the_same(flag):
    code = """
import test_many_columns as t
t.test_products_are_exact_to_rounding_for_every_number_of_columns(95, 257)
t.test_a_column_has_the_same_bits_beside_any_others()
"""
    passes_with_narrower_vectors(flag, "kernels", code)
