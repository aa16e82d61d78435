"""A call that does not fit its kernel is refused before the kernel reads anything."""

import jax
import jax.numpy as jnp
import pytest
from test_native import needs_kernels

FLOATS = jnp.ones((16, 4), jnp.float32)
HALVES = FLOATS.astype(jnp.bfloat16)
WHOLE = jnp.zeros((2,), jnp.int32)
ONE = jax.ShapeDtypeStruct((16, 4), jnp.float32)


def refused(kernel, arguments, results=ONE, **attributes):
    """What XLA says of the call."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.ffi.ffi_call(kernel, results)(*arguments, **attributes))
    return str(caught.value)


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "arguments", "attributes", "said"),
    [
        ("swiglu", (FLOATS,), {}, "fewer buffers"),
        ("swiglu", (FLOATS, FLOATS, FLOATS), {}, "more buffers"),
        ("swiglu", (FLOATS, WHOLE), {}, "a buffer has another type"),
        ("swiglu_products", (FLOATS, FLOATS.T, HALVES.T), {}, "both float32 or both bfloat16"),
        ("swiglu_products", (FLOATS, WHOLE, WHOLE), {}, "both float32 or both bfloat16"),
        ("swiglu_products", (FLOATS, FLOATS.T, FLOATS.T[:3]), {}, "weights of one size"),
        ("swiglu_products", (FLOATS, FLOATS.T[:0], FLOATS.T[:0]), {}, "weights of one size"),
        ("products", (FLOATS, FLOATS.T), {}, "an attribute is missing"),
        ("products", (FLOATS, FLOATS.T), {"transpose_out": 1}, "an attribute is missing, or has"),
        ("products", (FLOATS, FLOATS.T, FLOATS.T), {"transpose_out": False}, "as many results"),
        ("products", (FLOATS, WHOLE), {"transpose_out": False}, "weights of one type"),
        ("many_products", (FLOATS, *[FLOATS.T] * 9), {"transpose_out": True}, "at most 8 weights"),
        ("write", (WHOLE[None], WHOLE[None], FLOATS), {}, "as many entries as caches"),
    ],
)
def test_a_call_that_does_not_fit_its_kernel_is_refused(kernel, arguments, attributes, said):
    assert said in refused(f"specjax_{kernel}", arguments, **attributes)


@needs_kernels
def test_weights_of_two_types_are_refused():
    weights, results = (FLOATS.T, HALVES.T), [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2
    for kernel in ("specjax_products", "specjax_many_products"):
        said = refused(kernel, (FLOATS, *weights), results, transpose_out=False)
        assert "weights of one type" in said
