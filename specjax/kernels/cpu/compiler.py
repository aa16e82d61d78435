"""The call of the C++ compiler, and the processors for which a wheel has libraries. Only the
standard library is imported: building a wheel runs this file by its path."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

# Each library with its sources. The first is for activations in float32, the second for weights in
# few bits, the others for activations in narrow types. All but the first are loaded, or compiled,
# when the first such array comes.
LIBRARIES = {
    "kernels": ("kernels", "attention"),
    "quantized": ("quantized",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
}
FLAGS = (
    *("-O2", "-ffp-contract=fast", "-std=gnu++17", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi"),  # psabi: no vector crosses the library's boundary
)
X86 = platform.machine() in ("x86_64", "AMD64")
# GCC and Clang split vectors of 16 floats in two for many processors that have them, since most
# programs run faster that way. The kernels do not: on the machine of the benchmarks, with GCC 12,
# products with 8 columns take a third longer that way, attention with up to 4 columns two thirds.
WIDE = ("-mprefer-vector-width=512",) if X86 else ()
NATIVE = ("-march=native", *WIDE)
PLAIN = ("-DSPECJAX_WITHOUT_TILES", "-DSPECJAX_WITHOUT_DOTS")  # for GCC before 11


class Level(NamedTuple):
    """Processors that run a library of a wheel.

    Attributes:
      name: stands in the name of the library's file.
      flags: the compiler's flags.
      needed: the features that a processor must have, as /proc/cpuinfo spells them.
    """

    name: str
    flags: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()


_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# What a wheel has libraries for, the fastest first. Vectors hold 16 floats at x86-64-v4 (servers
# from Skylake-X of 2017 on, Zen 4) and 8 at x86-64-v3 (Haswell of 2013 and later, Zen). On other
# architectures every processor runs the same library.
LEVELS = (
    (
        Level("x86-64-v4", ("-march=x86-64-v4", *WIDE), _V4),
        Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
    )
    if X86
    else (Level(platform.machine()),)
)


def find() -> str | None:
    """The system's C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def sources_of(name: str) -> list[Path]:
    """The sources of one of ``LIBRARIES``."""
    return [Path(__file__).with_name(f"{source}.cc") for source in LIBRARIES[name]]


def contents(name: str) -> bytes:
    """What the compiler reads of this folder for one of ``LIBRARIES``: its sources, all headers."""
    headers = sorted(Path(__file__).parent.glob("*.h"))
    return b"".join(file.read_bytes() for file in (*sources_of(name), *headers))


def prebuilt_name(name: str, level: Level) -> str:
    """What a wheel calls one of ``LIBRARIES`` for one of ``LEVELS``."""
    return f"libspecjax_{name}_{level.name}.so"


def compile_to(
    target: Path, compiler: str, include: str, flags: tuple[str, ...], name: str = "kernels"
) -> None:
    """Compiles one of ``LIBRARIES`` into the shared library ``target``, its sources side by side.
    Nothing is written but in the folder of ``target``.

    Args:
      include: the folder of the headers of XLA's foreign function interface, part of jaxlib.
      flags: the compiler's flags, beside ``FLAGS``.

    Raises:
      subprocess.CalledProcessError: with what the compiler wrote, as ``stderr``.
    """
    command = [compiler, *FLAGS, *flags]

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, ThreadPoolExecutor() as threads:
        environment = os.environ | {"TMPDIR": scratch}

        def run(*words):
            subprocess.run([*command, *words], check=True, capture_output=True, env=environment)

        def compiled(source: Path) -> str:
            made = str(Path(scratch) / f"{source.stem}.o")
            run("-isystem", include, "-c", str(source), "-o", made)
            return made

        run("-shared", *threads.map(compiled, sources_of(name)), "-o", str(target))


def levels_that_run() -> tuple[Level, ...]:
    """Those of ``LEVELS`` that this processor runs, the fastest first."""
    features = processor_features()
    return tuple(level for level in LEVELS if level.needed <= features)


def processor_features() -> frozenset[str]:
    """The features of an x86 processor under Linux; none where they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
