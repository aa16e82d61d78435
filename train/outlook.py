"""Prints the estimates of ``--dry-run``, in the same lines for every recipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping

import jax

from .progress import clock
from .scale import is_first

ENOUGH = 5.0  # seconds of timed calls
BEGUN = time.monotonic()  # the command imports this module when it begins


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
      model: a description of what is trained.
      shapes: the shapes of a step.
      parameters: the number of parameters.
      memory: bytes by the kind of their contents, on each device.
      steps: the number of steps, with their rate.
      seconds: the time of the whole run.
      beside: what ``seconds`` does not include.
      devices: the number of devices that the run is spread over.
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
    """The bytes of all arrays of a tree, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(values))


def bytes_a_device(values) -> int:
    """The bytes of a tree of arrays that one device holds."""
    held = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(values)]
    return sum(math.prod(shape) * size for shape, size in held)


def num_parameters(values) -> int:
    """The number of elements of all arrays of a tree."""
    return sum(x.size for x in jax.tree.leaves(values))


def note(what: str) -> None:
    """Prints on stderr what a dry run does next, and how long it has run.

    Reading, compiling and timing may take minutes, in which nothing else is printed.
    """
    if is_first():
        spent = clock(time.monotonic() - BEGUN)
        print(f"dry run, {spent}: {what} ...", file=sys.stderr, flush=True)


def seconds_of(call: Callable[[], object], times: int = 3, compiled: bool = False) -> float:
    """The time in seconds of the fastest of several calls, after a first call that is not timed.

    Calls that take long vary little in proportion: none is begun after ``ENOUGH`` seconds of timed
    calls.

    Args:
      call: what is timed.
      times: the number of timed calls at most.
      compiled: whether the first call compiles nothing.
    """
    note("running once" if compiled else "compiling, and running once")
    jax.block_until_ready(call())
    note("timing")
    spent = []
    while len(spent) < times and sum(spent) < ENOUGH:
        begin = time.monotonic()
        jax.block_until_ready(call())
        spent.append(time.monotonic() - begin)
    return min(spent)


def _bytes(size: float) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
