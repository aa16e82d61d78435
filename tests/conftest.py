import gc
import itertools
import os
import pathlib

import jax
import pytest

from specjax import sharding
from specjax._internal import compile_cache

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NPROC", str(8 * sharding.CPU_THREADS))
# most of the tests' time is compilation: both workers share it, and so does the next run
compile_cache.enable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
MANY, OFTEN = 20_000, 16  # mappings of memory; tests between two looks at them
ended = itertools.count()


@pytest.fixture(autouse=True)
def room_for_programs():
    """Drops compiled programs when there are thousands: each maps memory a few times, and Linux
    lets a process do so 65,530 times; the next compilation then fails or ends the process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(ended) % OFTEN == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def quick_compilation():
    """Without most of XLA's optimizations, whose time exceeds that of a tiny model's run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
