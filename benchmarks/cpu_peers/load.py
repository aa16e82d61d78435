"""How much of the processor others use while something is measured.

The system counts the time in which its processors work, and the time of each process, in ticks of
usually 10 ms. What the processors worked beyond the measured processes is the work of others; on
virtual machines that includes the time that the host gave to other machines.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

PROC = Path("/proc")
ALLOWED = 0.05  # cores that others may use: the system's own upkeep
TICKS = 2  # by which a reading may be wrong, whatever the time
PATIENCE, PAUSE = 300, 2.0  # how often, and how long, a quiet moment is waited for
DISTURBED = 10  # turns in which others ran, for each kept one, before a row is given up
IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are counted in user and nice
FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class DisturbedError(RuntimeError):
    """Others used the processor again and again."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Seconds on the clock, of work of all processors, and of work of the measured processes."""

    clock: float
    busy: float
    own: float


def read(pids: Iterable[int], proc: Path = PROC) -> Reading:
    """The times of the processors and of the processes ``pids``.

    Raises:
      OSError: the system has no ``/proc``, or a process has ended.
    """
    tick = os.sysconf("SC_CLK_TCK")
    line = (proc / "stat").read_text().splitlines()[0].split()[1:]
    busy = sum(int(n) for name, n in zip(FIELDS, line, strict=False) if name not in IDLE)
    own = 0
    for pid in pids:
        # after the name, which may hold spaces: state is field 3, utime and stime 14 and 15
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return Reading(time.perf_counter(), busy / tick, own / tick)


def others(before: Reading, after: Reading) -> float:
    """The cores that other processes used between two readings."""
    seconds = max(after.clock - before.clock, 1e-9)
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / seconds


def is_quiet(before: Reading, after: Reading) -> bool:
    """Whether nothing else ran, as far as ticks can tell."""
    seconds = after.clock - before.clock
    error = TICKS / os.sysconf("SC_CLK_TCK")
    return others(before, after) * seconds <= ALLOWED * seconds + error


def wait_until_quiet(
    reading: Callable[[], Reading], patience: int = PATIENCE, pause: float = PAUSE
) -> None:
    """Waits until nothing else runs for ``pause`` seconds.

    Raises:
      DisturbedError: that did not happen ``patience`` times.
    """
    seen = []
    for _ in range(patience):
        before = reading()
        time.sleep(pause)
        after = reading()
        if is_quiet(before, after):
            return
        seen.append(others(before, after))
    raise DisturbedError(
        f"others used {np.median(seen):.2f} cores in the median of {patience} times {pause:g} "
        "seconds: end other programs, and run the same command again"
    )


def in_turn(
    calls: Mapping[str, Callable[[], float]],
    *,
    repetitions: int,
    reading: Callable[[], Reading] | None,
    patience: int = PATIENCE,
    pause: float = PAUSE,
) -> tuple[dict[str, np.ndarray], int]:
    """Runs calls in turn and keeps the turns in which nothing else ran.

    The first call of a turn rotates, as in ``timing.alternate``.

    Args:
      calls: functions that return seconds.
      repetitions: the number of turns to keep.
      reading: makes a ``Reading`` of the measured processes; None: every turn is kept.
      patience, pause: see ``wait_until_quiet``, which follows every disturbed turn.

    Returns:
      the seconds by name, float64 ``[repetitions]``, and the number of disturbed turns.

    Raises:
      DisturbedError: others ran all the time, or in more than ``DISTURBED`` turns for each kept
        one.
    """
    names, kept, disturbed = list(calls), [], 0
    while len(kept) < repetitions:
        first = len(kept) % len(names)
        before = reading() if reading else None
        turn = {name: calls[name]() for name in names[first:] + names[:first]}
        if reading is None or before is None or is_quiet(before, after := reading()):
            kept.append(turn)
            continue
        disturbed += 1
        if disturbed > DISTURBED * repetitions:
            raise DisturbedError(
                f"others disturbed {disturbed} of {disturbed + len(kept)} turns, the last with "
                f"{others(before, after):.2f} cores: end other programs, and run the same command "
                "again"
            )
        wait_until_quiet(reading, patience, pause)
    return {name: np.asarray([turn[name] for turn in kept]) for name in names}, disturbed
