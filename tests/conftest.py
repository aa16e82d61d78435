import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def quick_compilation():
    """Without most of XLA's optimizations, whose time exceeds that of a tiny model's run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
