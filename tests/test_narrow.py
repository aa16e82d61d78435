"""Products of bfloat16 arrays, and attention of whole causal sequences: values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.kernels import narrow
from specjax.kernels.attention import CAUSAL_BLOCK
from specjax.kernels.xla_cpu import XlaCpuBackend

TERMS = {"oi,im->om": ((8, 6), (6, 5)), "bmd,bsd->bms": ((2, 7, 4), (2, 5, 4))}


def numbers(shape, seed, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("subscripts", TERMS)
def test_a_product_and_its_derivatives_are_sums_in_float32(subscripts):
    """Each is rounded at most once to bfloat16, where XLA's own derivatives are in float32."""
    x, y = (numbers(shape, seed) for seed, shape in enumerate(TERMS[subscripts]))

    @jax.jit
    def both(x, y):
        wide = x.astype(jnp.float32), y.astype(jnp.float32)
        got, pull = jax.vjp(lambda x, y: narrow.einsum(subscripts, x, y), x, y)
        wanted, wide_pull = jax.vjp(lambda x, y: jnp.einsum(subscripts, x, y), *wide)
        slope = numbers(got.shape, 3).astype(jnp.float32)
        return (got, *pull(slope)), (wanted, *wide_pull(slope))

    (got, *slopes), (wanted, *wide_slopes) = both(x, y)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    for one, other in zip(slopes, wide_slopes, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2**-8, atol=1e-5)


def test_wide_products_of_bfloat16_are_rounded_once():
    weight, x = numbers((9, 40), 0), numbers((40, narrow.LEAST_COLUMNS), 1)
    got = XlaCpuBackend().dot(weight, x)
    wanted = weight.astype(jnp.float32) @ x.astype(jnp.float32)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_causal_sequence_attends_as_any_other_with_its_mask(dtype):
    """With packed documents, several blocks, the last of which is not full, and capped scores."""
    nodes, size = 2 * CAUSAL_BLOCK + 20, 4
    query = numbers((2, 2, size, 3, nodes), 0, dtype)
    key, value = (numbers((2, 2, nodes, size), seed, dtype) for seed in (1, 2))
    segments = jnp.asarray([[0] * 50 + [1] * (nodes - 50), [0] * nodes])
    mask = jnp.triu(jnp.ones((nodes, nodes), bool))
    mask = mask & (segments[:, :, None] == segments[:, None, :])

    @jax.jit
    def both(query, key, value):
        def run(*arrays, **special):
            out = XlaCpuBackend().attend(*arrays, mask, softcap=5.0, **special)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        sums = [
            jax.value_and_grad(lambda *a, c=c: run(*a, causal=c), (0, 1, 2), has_aux=True)
            for c in (True, False)
        ]
        return [one(query, key, value) for one in sums]

    (got, slopes), (wanted, wide_slopes) = both(query, key, value)
    close = dict(rtol=1e-4, atol=1e-5) if dtype == jnp.float32 else dict(rtol=0.05, atol=0.05)
    for one, other in zip((got[1], *slopes), (wanted[1], *wide_slopes), strict=True):
        one, other = (np.asarray(v.astype(jnp.float32)) for v in (one, other))
        np.testing.assert_allclose(one, other, **close)
