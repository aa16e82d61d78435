"""What rounds with trees of a drafter cost in the loop, and the tree that pays most.

A pass over N nodes is timed alone, for every size. What a round takes beyond it (drafting each
depth, reading what was accepted, judging, committing) is timed in the loop, of whole runs, for a
few trees: a chain, the widest tree, and then each tree that these make look best, until the best
is one that was run. Times of parts alone would miss what no part shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from .. import trees
from ..text import task
from . import timing, tree_search
from .plan.measure import run_once
from .tree_search import Acceptance

TURNS, MOST_TREES = 7, 6  # readings of the clock for each tree, of which the fastest counts; trees


@dataclasses.dataclass(frozen=True)
class Run:
    """Seconds of reading the prompt, and of a round; the fastest of several runs."""

    start: float
    round: float

    def seconds(self, tokens: int, each: float) -> float:
        """Of ``tokens`` new tokens, ``each`` a round."""
        return self.start + self.round * tokens / each


@dataclasses.dataclass(frozen=True)
class Surveyed:
    """Attributes:
    choice: the best tree, None if plain decoding is as fast; its ratio is that of whole runs.
    passes: ``{N: seconds}`` of the target's pass over N nodes.
    rounds: ratio of rounds alone.
    level, node: seconds that a round takes for each depth and for each drafted node, beyond its
      pass.
    """

    choice: tree_search.Choice
    rounds: float
    passes: Mapping[int, float]
    level: float
    node: float


def survey(
    lm,
    drafter,
    counted: Acceptance,
    prompt,
    *,
    sizes,
    depth: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Surveyed:
    """Times passes and rounds, and chooses.

    Args:
      counted: of ``calibration.measure``.
      prompt: one; a row's time is what is asked about.
      sizes: nodes of the passes that are timed, the root counted.
      tell: is told what goes on.
    """
    tell("timing passes")
    seconds = timing.pass_seconds(lm, [*{1, *sizes}])
    passes = {n: float(np.min(s)) for n, s in seconds.items()}
    jobs: dict[trees.Tree | None, task.GenerationTask] = {}

    def timed(*shapes) -> dict[trees.Tree | None, Run]:
        """Runs of all trees until now and of ``shapes``, in turn."""
        common = dict(max_new_tokens=max_new_tokens, temperature=temperature, stop=())
        for shape in shapes:
            who = None if shape is None else drafter
            jobs[shape] = task.prepare(lm, prompt, drafter=who, tree=shape, **common)
            run_once(jobs[shape])  # compiles
        spent = {shape: [] for shape in jobs}
        for _ in range(TURNS):
            for shape, work in jobs.items():
                start, run, state = run_once(work)
                spent[shape].append((start, run / int(np.max(state.stats.rounds))))
        return {shape: Run(*np.min(spent[shape], axis=0)) for shape in jobs}

    def beyond(runs) -> tuple[float, float]:
        """Seconds for each depth and for each node that explain the rounds best."""
        shapes = [shape for shape in runs if shape is not None]
        parts = np.asarray([(shape.depth, shape.num_nodes - 1) for shape in shapes], float)
        more = [
            runs[shape].round - runs[None].round - (_pass(passes, shape.num_nodes) - passes[1])
            for shape in shapes
        ]
        return tuple(_nonnegative(parts, np.asarray(more)))

    tell("timing rounds of a chain and of the widest tree")
    widest = tree_search.grow_optimal(counted.rates, max(sizes) - 1, depth=depth)
    runs = timed(None, *{trees.chain(min(depth, max(sizes) - 1)), widest} - {trees.Tree((-1,))})
    while True:
        level, node = beyond(runs)
        found = tree_search.grow_fastest(
            counted, passes, level, node=node, rest=max(runs[None].round - passes[1], 0.0)
        )
        if found.shape is None or found.shape in runs or len(runs) > MOST_TREES:
            break
        tell(f"timing rounds of {found.shape.num_nodes - 1} tokens, {found.shape.depth} deep")
        runs = timed(found.shape)

    def ratio(shape, start: bool) -> float:
        """Of tokens a second over plain decoding's, by the runs."""
        each = tree_search.expected_tokens(shape, counted.rates)
        plain, run = (
            dataclasses.replace(runs[way], start=runs[way].start if start else 0.0)
            for way in (None, shape)
        )
        return plain.seconds(max_new_tokens, 1.0) / run.seconds(max_new_tokens, each)

    best = max((shape for shape in runs if shape is not None), key=lambda s: ratio(s, True))
    choice, rounds = tree_search.Choice(None, 1.0, 1.0), 1.0
    if (whole := ratio(best, True)) > 1:
        tokens = tree_search.expected_tokens(best, counted.rates)
        choice, rounds = tree_search.Choice(best, whole, tokens), ratio(best, False)
    return Surveyed(choice, rounds, passes, level, node)


def _pass(passes: Mapping[int, float], nodes: int) -> float:
    """Seconds of a pass over ``nodes``, on the line between two sizes that were timed."""
    known = sorted(passes)
    return float(np.interp(nodes, known, [passes[n] for n in known]))


def _nonnegative(parts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """The least squares solution ``x >= 0 [2]`` of ``parts [M, 2] @ x = more [M]``."""
    found = np.linalg.lstsq(parts, more, rcond=None)[0]
    if (found >= 0).all():
        return found
    alone = np.maximum(parts.T @ more / np.sum(parts**2, axis=0), 0.0)
    ways = np.diag(alone)
    return min(ways, key=lambda x: float(np.sum((parts @ x - more) ** 2)))
