"""Finds, or compiles, the libraries of kernels and registers them with XLA."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
import threading
from pathlib import Path

import jax
import jaxlib.version

from ..._internal import compile_cache
from . import compiler as compilers

SYMBOLS = {
    "kernels": {
        "specjax_argmax": "SpecjaxArgmax",
        "specjax_attention": "SpecjaxAttention",
        "specjax_columns": "SpecjaxColumns",
        "specjax_copy": "SpecjaxCopy",
        "specjax_likeliest": "SpecjaxLikeliest",
        "specjax_many_products": "SpecjaxManyProducts",
        "specjax_norm": "SpecjaxNorm",
        "specjax_products": "SpecjaxProducts",
        "specjax_swiglu": "SpecjaxSwiglu",
        "specjax_swiglu_products": "SpecjaxSwigluProducts",
        "specjax_write": "SpecjaxWrite",
    },
    "quantized": {"specjax_quantized": "SpecjaxQuantized"},
    "bfloat16": {
        "specjax_attention_bfloat16": "SpecjaxAttentionBfloat16",
        "specjax_norm_bfloat16": "SpecjaxNormBfloat16",
        "specjax_products_bfloat16": "SpecjaxProductsBfloat16",
        "specjax_swiglu_bfloat16": "SpecjaxSwigluBfloat16",
    },
    "float16": {
        "specjax_attention_float16": "SpecjaxAttentionFloat16",
        "specjax_norm_float16": "SpecjaxNormFloat16",
        "specjax_products_float16": "SpecjaxProductsFloat16",
        "specjax_swiglu_float16": "SpecjaxSwigluFloat16",
    },
}

FOLDER = Path(__file__).parent  # where a wheel has its libraries
log = logging.getLogger("specjax")
_once = threading.Lock()
# what the library of each that was loaded last said
_tiles: list[bool] = []
_half_dots: list[bool] = []
_byte_dots: list[bool] = []


def register(name: str = "kernels") -> str | None:
    """Loads and registers one of ``compiler.LIBRARIES``, once a process; returns what went wrong,
    or None.

    The libraries that a wheel carries are tried first, the fastest before the others. Where none
    runs, the library is compiled for this processor, and a line of the log says so.
    """
    with _once:  # two threads would register two copies, which XLA refuses
        return _register(name)


def has_tiles() -> bool:
    """Whether the libraries multiply bfloat16 by tiles (AMX)."""
    return bool(_tiles and _tiles[-1])


def has_half_dots() -> bool:
    """Whether the library "bfloat16", if it is loaded, multiplies such numbers as they are (AMX,
    AVX-512 BF16)."""
    return bool(_half_dots and _half_dots[-1])


def has_byte_dots() -> bool:
    """Whether the library that is loaded multiplies bytes as such (AVX-512 VNNI)."""
    return bool(_byte_dots and _byte_dots[-1])


def prebuilt(name: str) -> list[Path]:
    """The libraries of the wheel that this processor runs, the fastest first; see
    wheels/backend.py."""
    levels = compilers.levels_that_run()
    files = [FOLDER / compilers.prebuilt_name(name, level) for level in levels]
    return [file for file in files if file.exists()]


@functools.cache
def _register(name: str) -> str | None:
    """``register``'s work."""
    for path in prebuilt(name):
        problem = _load(path, name)
        if problem is None:
            return None
        log.warning("the prebuilt %s cannot be loaded: %s", path.name, problem)
    path, problem = _native(name)
    return problem if path is None else _load(path, name)


def _load(path: Path, name: str) -> str | None:
    """Registers the calls of a library with XLA; returns what went wrong, or None."""
    try:
        loaded = ctypes.cdll.LoadLibrary(str(path))
        # all of them before the first is registered: XLA takes none back for the next library
        symbols = {call: getattr(loaded, symbol) for call, symbol in SYMBOLS[name].items()}
        if name == "kernels":
            _tiles.append(bool(loaded.SpecjaxHasTiles()))
        if name == "bfloat16":
            _half_dots.append(bool(loaded.SpecjaxHasHalfDots()))
        if name == "quantized":
            _byte_dots.append(bool(loaded.SpecjaxHasByteDots()))
        for call, symbol in symbols.items():
            jax.ffi.register_ffi_target(call, jax.ffi.pycapsule(symbol), platform="cpu")
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return str(error)
    return None


def _native(name: str) -> tuple[Path | None, str | None]:
    """The library for this processor, or None and the reason why there is none."""
    compiler = compilers.find()
    if compiler is None:
        return None, "there is no C++ compiler (c++, g++ or clang++) on the path"
    reason = ""
    for flags in ((), compilers.PLAIN):  # an old compiler knows neither tiles nor dot products
        try:
            return build(compiler, *flags, name=name), None
        except subprocess.CalledProcessError as error:
            reason = reason or error.stderr.decode(errors="replace").strip()[:500]
        except OSError as error:
            return None, str(error)
    return None, f"{compiler} failed: {reason}"


def build(compiler: str, *flags: str, name: str = "kernels") -> Path:
    """The library ``name`` for this processor, from the cache if source, compiler, jaxlib and
    processor are the same.

    It appears in one step: processes that compile at the same time do no harm.

    Args:
      flags: added to those that the library is usually compiled with.

    Raises:
      subprocess.CalledProcessError: the compiler failed.
      OSError: the cache cannot be written; the message names the variable that moves it.
    """
    flags = (*compilers.NATIVE, *flags)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    jaxlib_version = jaxlib.version.__version__.encode()
    options = " ".join((*compilers.FLAGS, *flags)).encode()
    parts = (compilers.contents(name), version, jaxlib_version, options)
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = compile_cache.cache_folder("kernels")
    library = folder / f"{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            what = "kernels" if name == "kernels" else f"kernels ({name})"
            log.warning("compiling the CPU %s for this processor (once; some seconds)", what)
            made = Path(scratch) / library.name
            compilers.compile_to(made, compiler, jax.ffi.include_dir(), flags, name)
            with made.open("rb") as whole:  # else a power cut may leave it short, which crashes
                os.fsync(whole.fileno())
            os.replace(made, library)
    except OSError as error:
        raise OSError(
            f"the cache of compiled kernels, {folder}, cannot be written "
            f"({error.strerror or error}); set XDG_CACHE_HOME to a folder that can"
        ) from None
    return library
