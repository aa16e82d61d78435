"""The call of the C++ compiler. Only the standard library is imported: building a wheel runs this
file by its path."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

LIBRARIES = ("kernels", "quantized")  # each of one source; the second is for weights in few bits
FLAGS = (
    *("-O2", "-ffp-contract=fast", "-std=gnu++17", "-fPIC", "-shared"),
    *("-Wall", "-Wextra", "-Wno-psabi"),  # psabi: no vector crosses the library's boundary
)
NATIVE = "-march=native"
# What a wheel's library asks of a processor: vectors of 8 floats on x86 (Haswell of 2013 and later,
# Zen), what every 64-bit processor has elsewhere.
PORTABLE = {"x86_64": "-march=x86-64-v3", "AMD64": "-march=x86-64-v3"}
NEEDED = {
    "x86_64": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
}  # as /proc/cpuinfo spells them


def find() -> str | None:
    """The system's C++ compiler, or None."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def source_of(name: str) -> Path:
    """The source of one of ``LIBRARIES``."""
    return Path(__file__).with_name(f"{name}.cc")


def contents(name: str) -> bytes:
    """What the compiler reads of this folder for one of ``LIBRARIES``: its source, all headers."""
    headers = sorted(Path(__file__).parent.glob("*.h"))
    return b"".join(file.read_bytes() for file in (source_of(name), *headers))


def prebuilt_name(name: str) -> str:
    """What a wheel calls one of ``LIBRARIES``."""
    return f"libspecjax_{name}.so"


def compile_to(
    target: Path, compiler: str, include: str, flags: tuple[str, ...], name: str = "kernels"
) -> None:
    """Compiles one of ``LIBRARIES`` into the shared library ``target``.

    Args:
      include: the folder of the headers of XLA's foreign function interface, part of jaxlib.
      flags: all of the compiler's flags.

    Raises:
      subprocess.CalledProcessError: with what the compiler wrote, as ``stderr``.
    """
    command = [compiler, *flags, "-isystem", include, str(source_of(name)), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)


def portable_flags() -> tuple[str, ...]:
    """Flags for a library that other machines of this architecture can run."""
    march = PORTABLE.get(platform.machine())
    return (*FLAGS, march) if march else FLAGS


def runs_portable() -> bool:
    """Whether this processor runs a library made with ``portable_flags``."""
    needed = NEEDED.get(platform.machine(), set())
    if not needed:
        return True
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: unknown
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return needed <= set(flags.partition(":")[2].split())
