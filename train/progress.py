"""Shows a run while it goes on: its loss, tokens per second, utilisation and time left."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque

from .config import RunConfig

RECENT = 50  # steps whose median time is the pace; single steps may be delayed
LINE_SECONDS = 30  # seconds between lines if the output is not a terminal


def clock(seconds: float) -> str:
    """A duration in seconds as words: ``41 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Pace:
    """Times the steps of a run, and apart from them the evaluations between the steps.

    The first step is left out, since it waits for the compiler. ``apart`` is a context whose time
    does not count towards the steps.
    """

    def __init__(self):
        self._last, self._lost = None, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._apart: list[float] = []

    def tick(self) -> None:
        """Records that a step has ended."""
        now = time.monotonic()
        if self._last is not None:
            self._recent.append(now - self._last - self._lost)
        self._last, self._lost = now, 0.0

    @contextlib.contextmanager
    def apart(self):
        begin = time.monotonic()
        yield
        self._apart.append(time.monotonic() - begin)
        self._lost += self._apart[-1]

    @property
    def seconds(self) -> float | None:
        """The median time of the last steps; None before two steps have ended."""
        return statistics.median(self._recent) if self._recent else None

    def left(self, steps: int, measures: int) -> float | None:
        """The seconds that so many steps and evaluations will take; None where not yet known."""
        if self.seconds is None:
            return None
        each = sum(self._apart) / len(self._apart) if self._apart else 0.0
        return steps * self.seconds + measures * each


class Watch:
    """The progress bar of a run, used as a context.

    Attributes:
      pace: the times of the steps.
      tokens: the tokens of a step, set by the loop.
      ideal: the seconds of a step's matrix products at the device's best rate (see ``flops``).
      loss: the last training loss that is known.
    """

    def __init__(self, name: str, run: RunConfig, first: int):
        from rich import progress

        columns = progress.TextColumn("{task.description}"), progress.BarColumn()
        columns += progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[note]}")
        self.pace, self._run = Pace(), run
        self.tokens, self.ideal, self.loss = 0, None, None
        self._bar = progress.Progress(*columns)
        self._task = self._bar.add_task(name, total=run.steps, completed=first, note="")
        self._first, self._said = first, time.monotonic()

    def __enter__(self):
        self._bar.__enter__()
        if self._first:
            self._print(f"resumed from step {self._first:,} of {self._run.steps:,}")
        return self

    def _print(self, line: str) -> None:
        self._bar.console.print(line, soft_wrap=True)
        self._said = time.monotonic()

    def __exit__(self, *error):
        self._bar.__exit__(*error)

    def rates(self) -> dict[str, float]:
        """``tokens_per_second`` and ``utilisation``, for the log; nothing before step 2."""
        if not self.pace.seconds:
            return {}
        found = {"tokens_per_second": round(self.tokens / self.pace.seconds, 1)}
        if self.ideal is not None:
            found["utilisation"] = round(self.ideal / self.pace.seconds, 4)
        return found

    def step(self, number: int) -> None:
        """Tells the bar that a step has begun, and that the step before it has ended.

        Where the output is no terminal, no bar moves, and a line is printed every
        ``LINE_SECONDS``.
        """
        self.pace.tick()
        note = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        note = " · ".join(note + self.words(number))
        self._bar.update(self._task, completed=number, note=note)
        silent = not self._bar.console.is_terminal
        if silent and time.monotonic() - self._said >= LINE_SECONDS:
            self._print(f"step {number:,} of {self._run.steps:,}: {note}")

    def words(self, number: int) -> list[str]:
        """The rate, the utilisation and the time left, as far as they are known."""
        rates = self.rates()
        if not rates:
            return []
        words = [f"{rates['tokens_per_second']:,.0f} tokens/s"]
        if "utilisation" in rates:
            words.append(f"{100 * rates['utilisation']:.0f} % of peak")
        steps = self._run.steps - number
        left = self.pace.left(steps, -(-steps // self._run.eval_every))
        return words + [f"{clock(left)} left"] * (steps > 0)

    def say(self, number: int, measured: dict[str, float]) -> None:
        """Prints the held-out measures. Those of single positions stand in the log alone."""
        words = [f"{n} {value:.4f}" for n, value in measured.items() if "_kept_" not in n]
        self._print(f"step {number}: " + " · ".join(words + self.words(number)))
