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
        "specjax_products": "SpecjaxProducts",
    },
    "quantized": {"specjax_quantized": "SpecjaxQuantized"},
}

log = logging.getLogger("specjax")
_once = threading.Lock()


def register(name: str = "kernels") -> str | None:
    """Loads and registers one of ``compiler.LIBRARIES``, once a process; returns what went wrong,
    or None.

    The library built for this processor comes first, then the wheel's portable one.
    """
    with _once:  # two threads would register two copies, which XLA refuses
        return _register(name)


def prebuilt(name: str) -> Path:
    """Where a wheel has the library; see wheels/backend.py."""
    return Path(__file__).with_name(compilers.prebuilt_name(name))


@functools.cache
def _register(name: str) -> str | None:
    """``register``'s work."""
    path, problem = _native(name)
    if path is None and prebuilt(name).exists() and compilers.runs_portable():
        path = prebuilt(name)
    if path is None:
        return problem
    try:
        loaded = ctypes.cdll.LoadLibrary(str(path))
        for call, symbol in SYMBOLS[name].items():
            handler = jax.ffi.pycapsule(getattr(loaded, symbol))
            jax.ffi.register_ffi_target(call, handler, platform="cpu")
    except (OSError, jax.errors.JaxRuntimeError) as error:
        return str(error)
    return None


def _native(name: str) -> tuple[Path | None, str | None]:
    """The library for this processor, or None and the reason why there is none."""
    compiler = compilers.find()
    if compiler is None:
        return None, "there is no C++ compiler (c++, g++ or clang++) on the path"
    try:
        return build(compiler, name=name), None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[:500]
        return None, f"{compiler} failed: {reason}"
    except OSError as error:
        return None, str(error)


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
    flags = (*compilers.FLAGS, compilers.NATIVE, *flags)
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    jaxlib_version = jaxlib.version.__version__.encode()
    parts = (compilers.contents(name), version, jaxlib_version, " ".join(flags).encode())
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
            os.replace(made, library)
    except OSError as error:
        raise OSError(
            f"the cache of compiled kernels, {folder}, cannot be written "
            f"({error.strerror or error}); set XDG_CACHE_HOME to a folder that can"
        ) from None
    return library
