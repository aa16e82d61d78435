"""Compiled programs kept on disk, so that the second start of the command is fast."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax


def enable(folder: str | os.PathLike | None = None) -> Path | None:
    """Keeps every program that compiles from now on in ``folder``; returns it, or None.

    Default: ``$JAX_COMPILATION_CACHE_DIR``, else ``specjax`` below the user's cache directory. A
    folder that cannot be written is no error: programs are then compiled each time. The library
    never calls this by itself, the command line does.
    """
    if folder is None and jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    try:
        place = Path(folder) if folder is not None else cache_folder("programs")
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(place, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place


def cache_folder(kind: str) -> Path:
    """The folder of programs compiled for this user and processor, which may not exist yet.

    Raises:
      OSError: the user has no home.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(f"{error}: set XDG_CACHE_HOME to a folder for what is compiled") from None
    return Path(caches) / "specjax" / f"{kind}-{_processor()}"


def _processor() -> str:
    """Tells processors that share a home directory apart: each needs programs of its own."""
    features = [platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    except OSError:  # not Linux
        features.append(platform.processor())
    return hashlib.sha256("\n".join(features).encode()).hexdigest()[:8]
