"""Random choices by name, so that one of them can be taken back without changing the others."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


class Draws:
    """The choices of one case. Each has a generator of its own, by the seed, the case and its name.

    Attributes:
      seed, number: which case it is.
      dropped: names of choices that keep their default.
      taken: names of choices that differ from their default, in the order in which they were made.
    """

    def __init__(self, seed: int, number: int, dropped: tuple[str, ...] = ()):
        self.seed, self.number, self.dropped = seed, number, tuple(dropped)
        self.taken: list[str] = []

    def generator(self, name: str, *more: int) -> np.random.Generator:
        """The generator of a choice; ``more``: which of several of that name."""
        return np.random.default_rng([self.seed, self.number, zlib.crc32(name.encode()), *more])

    def option(self, name: str, default: Any, share: float, choose: Callable[..., Any]) -> Any:
        """``choose(generator)`` in a ``share`` of the cases, else ``default``."""
        generator = self.generator(name)
        if name in self.dropped or generator.random() >= share:
            return default
        self.taken.append(name)
        return choose(generator)


def pick(generator: np.random.Generator, options):
    """One of ``options``, of any type."""
    options = list(options)
    return options[int(generator.integers(len(options)))]


def between(generator: np.random.Generator, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, both included."""
    return int(generator.integers(low, high + 1))
