"""The C++ kernels read and write nothing but their arrays, and do nothing undefined."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="no g++, whose sanitizers are loaded first")

PREPARE = f"""
import sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, {str(TESTS)!r})
from specjax.kernels.cpu import library
# -O0: with optimizations the compiler takes ten times as long over the sanitizers' checks
flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0"
library.prebuilt = lambda name: []
library._native = lambda name: (library.build({GXX!r}, *flags, name=name), None)
assert library.register() is None
"""
USE = """
import test_native as t
from specjax.kernels.cpu import calls
for out, size in ((1, 1), (7, 5), (61, 129), (70, 2200)):
    for dtype in (jnp.float32, jnp.bfloat16):
        weight = jnp.asarray(t.normal(out, size), dtype)
        for columns in (1, 3, 8, 9, 13, 17, 32):  # both ways to write the product, in turn
            calls.dot(weight, jnp.asarray(t.normal(size, columns)), bool(columns % 2))
            calls.swiglu_dots(weight, weight, jnp.asarray(t.normal(size, columns)), None)
        for columns in (1, 17, 64, 257):
            x = jnp.asarray(t.normal(size, columns))
            calls.many_dots((weight, weight[:1]), x, bool(columns % 2))
halves = jnp.asarray(t.normal(70, 9), jnp.bfloat16)
calls.dots((halves[:5], halves), jnp.asarray(t.normal(9, 4)))
for size in (1, 5, 16, 33, 50_000):
    calls.argmax(jnp.asarray(t.normal(3, size)))
    calls.likeliest(jnp.asarray(t.normal(3, size)), min(size, 7))
for case in t.CASES + t.WIDE_CASES[:5]:
    query, key, value, mask, prefix, length = t.attention_case(*case)
    t.kernel_attention(query, *prefix, key, value, mask, length)
    floats = [jnp.asarray(x, jnp.bfloat16) for x in (query, *prefix, key, value)]
    t.kernel_attention(*floats, mask, length)
for out, size in ((1, 1), (7, 5), (61, 129), (70, 2200)):
    weight = jnp.asarray(t.normal(out, size), jnp.bfloat16)
    for columns in (1, 3, 13, 17, 32, 33, 70):
        x = jnp.asarray(t.normal(size, columns), jnp.bfloat16)
        calls.half_dots((weight,), x, bool(columns % 2))
for size, columns in ((1, 1), (5, 3), (100, 1), (100, 17)):
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight = jnp.asarray(t.normal(size, columns), dtype), jnp.ones(size, dtype)
        for bias in (None, weight):
            calls.norm(x, weight, bias, 1e-5, bias is not None, False, None)
print("sound", flush=True)
"""
USE_QUANTIZED = """
assert library.register("quantized") is None
import test_native as t, test_native_quantized as q
from specjax.kernels.cpu import quantized_calls
for kind in q.KINDS:
    for out, size in ((1, 192), (61, 576), (26, 1344)):
        weight = q.held(out, size, kind)[0]
        for columns in (1, 2, 3, 5, 8, 9, 13, 35):
            q.product(weight, jnp.asarray(t.normal(size, columns)))
        for columns in (33, 48, 257):
            x = jnp.asarray(t.normal(size, columns))
            quantized_calls.quantized_words((weight,), x, bool(columns % 2))
for size in (1, 5, 129, 1100):
    for columns in (5, 17):
        q.product(q.held(61, size, "int8")[0], jnp.asarray(t.normal(size, columns)))
print("sound", flush=True)
"""
USE_FLOAT16 = """
assert library.register("float16") is None
import test_native as t
from specjax.kernels.cpu import calls
for out, size in ((1, 1), (7, 5), (61, 129), (70, 2200)):
    weight = jnp.asarray(t.normal(out, size), jnp.float16)
    for columns in (1, 3, 13, 17, 32):
        x = jnp.asarray(t.normal(size, columns), jnp.float16)
        calls.half_dots((weight,), x, bool(columns % 2))
for case in t.CASES + t.WIDE_CASES[:4]:
    query, key, value, mask, prefix, length = t.attention_case(*case)
    floats = [jnp.asarray(x, jnp.float16) for x in (query, *prefix, key, value)]
    t.kernel_attention(*floats, mask, length)
for size, columns in ((1, 1), (5, 3), (100, 1), (100, 17)):
    x, weight = jnp.asarray(t.normal(size, columns), jnp.float16), jnp.ones(size, jnp.float16)
    for bias in (None, weight):
        calls.norm(x, weight, bias, 1e-5, bias is not None, False, None)
print("sound", flush=True)
"""
FAULT = """
five = jax.ShapeDtypeStruct((5,), jnp.int32)  # of two rows
jax.block_until_ready(jax.ffi.ffi_call("specjax_argmax", five)(jnp.ones((2, 300))))
print("sound")
"""
SHORT = """
assert library.register("quantized") is None
import test_native_quantized as q
weight = q.held(40, 576, "int4")[0]  # of whose values a row is missing
done = jax.ShapeDtypeStruct((41, 1), jnp.float32)
values = jnp.zeros((41, 288), jnp.uint8)
call = jax.ffi.ffi_call("specjax_quantized", [done])
x, none = jnp.ones((576, 1)), jnp.zeros((0,), jnp.int8)
how = dict(transpose_out=np.bool_(False), words=np.bool_(False))
jax.block_until_ready(call(x, values, weight.scale, none, **how))
print("sound")
"""


def run(code):
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        command = [GXX, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"g++ comes without {name}")
        libraries.append(path)
    # what the interpreter never gives back is no concern of the kernels
    options = {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, "-c", PREPARE + code],
        env=os.environ | options,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("use", "fault"),
    [(USE, FAULT), (USE_QUANTIZED, SHORT), (USE_FLOAT16, FAULT)],
    ids=["kernels", "quantized", "float16"],
)
def test_the_sanitizers_see_no_fault_but_the_one_that_is_planted_last(use, fault):
    done = run(use + fault)
    assert done.stdout.strip() == "sound", done.stderr[-3000:]  # and not a second time
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
