"""The C++ kernels compute on ARM's processors what they should; a program for these is emulated.
The same program runs on this processor, too, so that it keeps to what the kernels take."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from specjax.kernels.cpu import compiler, library

CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
ROOT = "/usr/aarch64-linux-gnu"  # where Debian and Ubuntu have the libraries of such programs


def agrees(by, tmp_path, libraries, emulated=()):
    """Asserts that the program finds nothing wrong with the libraries, compiled by ``by``."""
    driver = tmp_path / "driver"
    source = Path(__file__).with_name("kernels_alone.cc")
    command = [by, "-O1", "-std=gnu++17", "-isystem", jax.ffi.include_dir(), source]
    subprocess.run([*command, "-o", driver, "-ldl", "-lpthread"], check=True)
    done = subprocess.run([*emulated, driver, *libraries], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].endswith("comparisons, 0 wrong"), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    CROSS is None or EMULATOR is None or not Path(ROOT).exists(),
    reason="needs the packages g++-aarch64-linux-gnu and qemu-user of Debian or Ubuntu",
)
def test_kernels_for_arm_agree_with_double_precision_and_keep_a_columns_bits(tmp_path):
    libraries = [tmp_path / f"{name}.so" for name in compiler.LIBRARIES]
    for made in libraries:
        flags = ("-march=armv8-a",)
        compiler.compile_to(made, CROSS, jax.ffi.include_dir(), flags, made.stem)
    agrees(CROSS, tmp_path, libraries, (EMULATOR, "-cpu", "max", "-L", ROOT))


@pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
def test_the_program_for_other_processors_finds_nothing_wrong_on_this_one(tmp_path):
    # where the processor multiplies bytes, columns of 16 bits are further from double precision
    without = {"quantized": ("-DSPECJAX_WITHOUT_DOTS",)}
    by = compiler.find()
    libraries = [
        library.build(by, *without.get(name, ()), name=name) for name in compiler.LIBRARIES
    ]
    agrees(by, tmp_path, libraries)
