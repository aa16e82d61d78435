"""What ``--dry-run`` prints, the same lines for every recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import jax

from .progress import clock


def show(
    *,
    model: str,
    shapes: str,
    parameters: str,
    memory: Mapping[str, float],
    steps: str,
    seconds: float,
    beside: str = "",
    devices: int = 1,
) -> None:
    """Prints the estimates of a run.

    Args:
      memory: bytes by what takes them; ``devices``: over how many the run is spread, each of which
        takes as much.
      seconds: of the whole run; ``beside``: what they leave out.
    """
    parts = [f"{name} {_bytes(size)}" for name, size in memory.items() if size]
    print(f"model         {model}")
    print(f"shapes        {shapes}")
    print(f"parameters    {parameters}")
    each = f" on each of {devices} devices" if devices > 1 else ""
    print(f"memory        {_bytes(sum(memory.values()))}{each}: {', '.join(parts)}")
    print(f"steps         {steps}")
    print(f"time          about {clock(seconds)}{beside and ', ' + beside}")


def num_bytes(values) -> int:
    """Of all arrays of a tree, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(values))


def bytes_a_device(values) -> int:
    """Of the parts of all arrays of a tree that one device holds."""
    held = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(values)]
    return sum(math.prod(shape) * size for shape, size in held)


def num_parameters(values) -> int:
    """Numbers in all arrays of a tree."""
    return sum(x.size for x in jax.tree.leaves(values))


def seconds_of(call: Callable[[], object], times: int = 3) -> float:
    """The fastest of a few calls, after one that compiles; waits for what they return."""
    jax.block_until_ready(call())
    spent = []
    for _ in range(times):
        begin = time.monotonic()
        jax.block_until_ready(call())
        spent.append(time.monotonic() - begin)
    return min(spent)


def _bytes(size: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
