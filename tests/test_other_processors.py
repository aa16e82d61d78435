"""The C++ kernels compute on ARM's processors what they should; a program for these is emulated."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from specjax.kernels.cpu import compiler

CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
ROOT = "/usr/aarch64-linux-gnu"  # where Debian and Ubuntu have the libraries of such programs
pytestmark = pytest.mark.skipif(
    CROSS is None or EMULATOR is None or not Path(ROOT).exists(),
    reason="needs the packages g++-aarch64-linux-gnu and qemu-user of Debian or Ubuntu",
)


def test_kernels_for_arm_agree_with_double_precision_and_keep_a_columns_bits(tmp_path):
    libraries = [tmp_path / f"{name}.so" for name in compiler.LIBRARIES]
    for library in libraries:
        flags = ("-march=armv8-a",)
        compiler.compile_to(library, CROSS, jax.ffi.include_dir(), flags, library.stem)
    driver = tmp_path / "driver"
    source = Path(__file__).with_name("kernels_alone.cc")
    command = [CROSS, "-O1", "-std=gnu++17", "-isystem", jax.ffi.include_dir(), source]
    subprocess.run([*command, "-o", driver, "-ldl", "-lpthread"], check=True)
    command = [EMULATOR, "-cpu", "max", "-L", ROOT, driver, *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].endswith("comparisons, 0 wrong"), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
