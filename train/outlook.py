"""What ``--dry-run`` prints, the same lines for every recipe."""

from __future__ import annotations

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
) -> None:
    """Prints the estimates of a run.

    Args:
      memory: bytes by what takes them.
      seconds: of the whole run; ``beside``: what they leave out.
    """
    parts = [f"{name} {_bytes(size)}" for name, size in memory.items() if size]
    print(f"model         {model}")
    print(f"shapes        {shapes}")
    print(f"parameters    {parameters}")
    print(f"memory        {_bytes(sum(memory.values()))}: {', '.join(parts)}")
    print(f"steps         {steps}")
    print(f"time          about {clock(seconds)}{beside and ', ' + beside}")


def num_bytes(values) -> int:
    """Of all arrays of a tree, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(values))


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
