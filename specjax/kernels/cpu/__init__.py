"""CPU kernels in C++: products with a few columns, attention over a cache, and argmax.

XLA multiplies a matrix by 4 to 16 columns at half the speed at which it reads the matrix, because
reading and multiplying take turns; here they overlap, so that scoring 8 tokens costs little more
than scoring one. Its attention copies the part of the cache that it reads; this one reads it in
place, exactly as far as it is used. Its argmax is a dozen operations; this one is one.

The source is compiled by the system's C++ compiler, once a machine, when a model first needs it (a
few seconds), and kept in the user's cache directory. Without a compiler XLA's own operations serve:
slower, otherwise the same. ``SPECJAX_NATIVE`` may be ``auto`` (the default: used on a CPU that is
JAX's only device, since XLA cannot split these calls over a mesh), ``always`` or ``never``.

Each thread keeps what it packed last, which ``memory_analysis()`` does not see: 4 bytes times
inputs times columns (rounded up to 16) for products, twice head size times columns for attention.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from ..._internal import compile_cache

SOURCE = Path(__file__).with_name("kernels.cc")
FLAGS = (*("-O2", "-march=native", "-ffp-contract=fast", "-std=gnu++17", "-fPIC", "-shared", "-w"),)
MOST_COLUMNS = 32  # beyond, XLA's own product is as fast
MOST_WEIGHTS = 8  # kMost of the source
SYMBOLS = {
    "specjax_argmax": "SpecjaxArgmax",
    "specjax_attention": "SpecjaxAttention",
    "specjax_products": "SpecjaxProducts",
}

log = logging.getLogger("specjax")
_once = threading.Lock()


@functools.cache
def chosen() -> bool:
    """Whether models use the kernels in this process; compiles them if need be.

    Raises:
      ValueError: ``SPECJAX_NATIVE`` is none of its three values, or ``always`` where they cannot be
        had.
    """
    wish = os.environ.get("SPECJAX_NATIVE", "auto")
    if wish not in ("auto", "always", "never"):
        raise ValueError(f"SPECJAX_NATIVE={wish!r}: it must be auto, always or never")
    backend = jax.default_backend()
    if wish == "never" or wish == "auto" and (backend != "cpu" or jax.device_count() > 1):
        return False
    problem = _register() if backend == "cpu" else f"the backend is {backend}"
    if problem and wish == "always":
        raise ValueError(f"SPECJAX_NATIVE=always, but there are no kernels: {problem}")
    if problem:
        log.warning("CPU kernels are not used (decoding will be slower): %s", problem)
    return problem is None


def _register() -> str | None:
    """Compiles, loads and registers the kernels, once; returns what went wrong, or None."""
    with _once:  # two threads would register two copies, which XLA refuses
        return _load()


@functools.cache
def _load() -> str | None:
    """``_register``'s work."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "there is no C++ compiler (c++, g++ or clang++) on the path"
    try:
        library = ctypes.cdll.LoadLibrary(str(_build(compiler)))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:500]}"
    except OSError as error:
        return str(error)
    for name, symbol in SYMBOLS.items():
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu"
        )
    return None


def _build(compiler: str, *flags: str) -> Path:
    """The compiled library, from the cache if source, compiler, jaxlib and processor are the same.

    It appears in one step: processes that compile at the same time do no harm. ``flags`` are added
    to ``FLAGS``.
    """
    flags = (*FLAGS, *flags)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    parts = (SOURCE.read_bytes(), version, jaxlib.__version__.encode(), " ".join(flags).encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = compile_cache.cache_folder("kernels")
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *flags, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            os.replace(made, library)
    return library


def product(weight: jax.Array, x: jax.Array, turned: bool = False) -> jax.Array:
    """``products`` of one weight."""
    return products((weight,), x, turned)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def products(weights: tuple, x: jax.Array, turned: bool = False) -> tuple:
    """``weight [out, in] @ x [in, M] -> [out, M]`` of up to 8 weights, float32, in one call.

    Args:
      weights: each ``[out, in]``, float32, or bfloat16: half of the bytes, and, to rounding,
        the results of the same numbers in float32. ``out`` may differ.
      x: ``[in, M]``, float32.
      turned: the results are ``[M, out]``.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"products: {len(weights)} weights, it takes 1 to {MOST_WEIGHTS}")
    for weight in weights:
        fits = weight.ndim == 2 and x.ndim == 2 and weight.shape[1] == x.shape[0]
        if not fits or x.shape[1] < 1:
            raise ValueError(f"product: weight {weight.shape} and x {x.shape} do not fit")
        if weight.dtype != jnp.bfloat16:
            _check_types(weight=weight)
    _check_types(x=x)
    sizes = [(weight.shape[0], x.shape[1]) for weight in weights]
    shapes = [jax.ShapeDtypeStruct(s[::-1] if turned else s, jnp.float32) for s in sizes]
    call = jax.ffi.ffi_call("specjax_products", shapes, vmap_method="sequential")
    return tuple(call(x, *weights, turned=np.bool_(turned)))


@products.defjvp
def _products_jvp(turned, primals, tangents):
    (weights, x), (d_weights, d_x) = primals, tangents
    pairs = zip(weights, d_weights, strict=True)
    changes = [jnp.dot(d_weight, x) + jnp.dot(weight, d_x) for weight, d_weight in pairs]
    return products(weights, x, turned), tuple(y.T if turned else y for y in changes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(7,))
def attention(query, keys, values, own_keys, own_values, own_mask, length, otherwise) -> jax.Array:
    """Softmax attention over ``length`` slots of a cache and a draft's own entries, float32.

    Args:
      query: ``[B, K, E, G, N]``, not scaled.
      keys, values: ``[B, K, S, E]``.
      own_keys, own_values: ``[B, K, M, E]``.
      own_mask: bool ``[B or 1, M, N]``: node ``n`` sees entry ``m``.
      length: int32 ``[B]``.
      otherwise: a function of these seven by XLA, for derivatives.

    Returns:
      ``[B, K, E, G, N]``.

    Raises:
      ValueError: other shapes or types; the kernel itself checks nothing.
    """
    batch, heads, size, _, nodes = query.shape
    slots, own = keys.shape[2], own_keys.shape[2]
    shapes = {
        "keys": (keys, (batch, heads, slots, size)),
        "values": (values, (batch, heads, slots, size)),
        "own_keys": (own_keys, (batch, heads, own, size)),
        "own_values": (own_values, (batch, heads, own, size)),
        "own_mask": (own_mask, (own_mask.shape[0], own, nodes)),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape or name == "own_mask" and shape[0] not in (1, batch):
            raise ValueError(f"attention: {name} is {array.shape}, query {query.shape}: no fit")
    _check_types(query=query, keys=keys, values=values, own_keys=own_keys, own_values=own_values)
    if own_mask.dtype != jnp.bool or length.dtype != jnp.int32:
        raise ValueError(f"attention: own_mask is {own_mask.dtype}, length {length.dtype}")
    shape = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call("specjax_attention", shape, vmap_method="sequential")
    return call(query, keys, values, own_keys, own_values, own_mask, length)


@attention.defjvp
def _attention_jvp(otherwise, primals, tangents):
    return jax.jvp(otherwise, primals, tangents)


def argmax(x: jax.Array) -> jax.Array:
    """The first index of the greatest over the last axis of ``x`` float32, int32; -1 where that is
    not finite, or one of the numbers is NaN.

    Raises:
      ValueError: another type.
    """
    _check_types(x=x)
    shape = jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32)
    call = jax.ffi.ffi_call("specjax_argmax", shape, vmap_method="broadcast_all")
    return call(jax.lax.stop_gradient(x))


def _check_types(**arrays) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}: the kernels compute in float32")
