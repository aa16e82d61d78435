"""No program holds a whole weight of few bits as floats: copies and memory, as a user's compile."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import SMALL, encoded, random_params

from specjax import Sampling, kernels
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Plain
from specjax.kernels import quantized
from specjax.kernels.xla_cpu import XlaCpuBackend
from specjax.models import quantize as q
from specjax.models.causal_lm import CausalLM

SCHEMES = sorted(q.SCHEMES)


@pytest.fixture
def on_xla(monkeypatch):
    """Products by XLA on a CPU instead of the kernels."""
    monkeypatch.setattr(kernels, "_backend", lambda platform: XlaCpuBackend())
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_a_loop_that_takes_rows_of_an_embedding_in_bfloat16_copies_no_table():
    table = jnp.ones((4096, 64), jnp.bfloat16)

    def run(table, index, take):
        step = lambda i, index: (index + take(table, index)[:, 0].astype(jnp.int32)) % 4096  # noqa: E731
        return jax.lax.fori_loop(0, 9, step, index)

    index = jnp.arange(3, dtype=jnp.int32)
    for take in (
        lambda t, i: quantized.take(t, i, jnp.float32),
        lambda t, i: quantized.take(t, i, jnp.bfloat16),
    ):
        compiled = jax.jit(run, static_argnums=2).lower(table, index, take).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes / 8
        assert compiled(table, index).tolist() == [9, 10, 11]


# wide enough for its weights to outweigh all else that a round needs
WIDE = dataclasses.replace(
    SMALL,
    vocab_size=640,
    hidden_size=128,
    intermediate_size=512,
    num_layers=4,
    num_kv_heads=4,
    head_dim=32,
)


def compiled_burst(params, config=WIDE):
    """The loop of plain decoding, compiled: one row, 64 slots."""
    target = CausalLM(config)
    request, capacity = prepare_inputs(
        target,
        Plain(),
        np.ones((1, 8), np.int32),
        np.asarray([8], np.int32),
        jax.random.key(0),
        50,
        Sampling(),
        64,
        (),
    )
    params = {"target": params}
    objects = target, Plain(), "auto"
    state = loop.jit_start.eval_shape(*objects, capacity, params, request)
    return loop.jit_burst.lower(*objects, 10, params, state).compile()


def sizes(compiled, params):
    """Bytes that the loop needs beside its arguments; bytes of the weights as floats; and how
    often the program holds a whole weight as floats."""
    held = jax.tree.leaves(params, is_leaf=q.is_quantized)
    shapes = [weight.shape for weight in held if weight.ndim == 2]
    whole = "|".join(rf"{rows},{columns}" for rows, columns in set(shapes))
    copies = re.findall(rf"\b(?:f32|f16|bf16)\[(?:{whole})\]", compiled.as_text())
    floats = 4 * sum(rows * columns for rows, columns in shapes)
    return compiled.memory_analysis().temp_size_in_bytes, floats, len(copies)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loop_never_holds_a_whole_weight_as_floats(scheme):
    params = encoded(random_params(WIDE), scheme)
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(params) if leaf.size > 16384} == {1}
    temp, floats, copies = sizes(compiled_burst(params), params)
    assert copies == 0
    assert temp < floats / 8 + (floats / 4 if scheme == "fp8" else 0)  # fp8: a copy of its bits


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_xla_holds_no_whole_weight_as_floats_either(scheme, on_xla):
    params = encoded(random_params(WIDE), scheme)
    temp, floats, copies = sizes(compiled_burst(params), params)
    assert copies == 0 and temp < floats / 4


def test_fault_a_conversion_before_the_product_is_seen_as_a_copy_of_the_weights(
    monkeypatch, on_xla
):
    monkeypatch.setattr(
        quantized, "dot", lambda w, x, **_: (w.qvalue.astype(x.dtype) @ x) * w.scale
    )
    params = encoded(random_params(WIDE), "int8")
    temp, floats, copies = sizes(compiled_burst(params), params)
    assert copies > 0 and temp > floats / 2
