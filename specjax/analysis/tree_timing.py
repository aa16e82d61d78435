"""Times rounds with trees of a drafter in the loop, and chooses the fastest tree.

A pass over N nodes is timed alone, for every size. The other time of a round (drafting each level,
reading accepted tokens, the acceptance rule, the commit) is measured in whole runs of the loop, for
a few trees: a chain, the widest tree, and then each tree that is best by the times so far, until
the best tree is one that was run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import trees
from ..sampling.distribution import Sampling
from ..text.options import Drafting, Options
from ..text.prepare import prepare
from ..text.task import GenerationTask
from . import timing, tree_search
from .rank_counts import RankCounts

TURNS = 7  # runs of each tree; the fastest one counts
MOST_TREES = 6  # the most trees that are run


@dataclasses.dataclass(frozen=True)
class RunSeconds:
    """Seconds of the fastest runs.

    Attributes:
      start: seconds to read the prompt.
      round: seconds of a round.
    """

    start: float
    round: float

    def seconds(self, tokens: int, each: float) -> float:
        """Returns the seconds for ``tokens`` new tokens, with ``each`` tokens per round."""
        return self.start + self.round * (tokens - 1) / each  # reading emits the first


@dataclasses.dataclass(frozen=True)
class TreeTimings:
    """The best tree, and the times by which it was chosen.

    Attributes:
      choice: the best tree; its ratio is that of whole runs. Its shape is None if plain decoding is
        as fast.
      rounds: the ratio in rounds of the best tree.
      passes: ``{N: seconds}`` of the target's pass over N nodes.
      level: seconds that a round takes in addition to its pass for each level of the tree.
      node: seconds that a round takes in addition to its pass for each drafted node.
    """

    choice: tree_search.TreeChoice
    rounds: float
    passes: Mapping[int, float]
    level: float
    node: float


def time_trees(
    lm,
    drafter,
    counted: RankCounts,
    prompt,
    *,
    sizes,
    depth: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
) -> TreeTimings:
    """Times passes and rounds of one row, and chooses the best tree.

    Args:
      lm: the target.
      drafter: a draft model or heads, see ``specjax.generate``.
      counted: the result of ``rank_counts.count_ranks``.
      prompt: one prompt.
      sizes: the numbers of nodes of the timed passes, the root included.
      depth: the greatest depth of the trees.
      max_new_tokens: the number of tokens of each timed run.
      temperature: the temperature of the timed runs.
      tell: a function that is called with a line of text whenever a measurement begins.
    """
    tell("timing passes")
    seconds = timing.pass_seconds(lm, [*{1, *sizes}])
    passes = {n: float(np.min(s)) for n, s in seconds.items()}
    jobs: dict[trees.Tree | None, GenerationTask] = {}

    def timed(*shapes) -> dict[trees.Tree | None, RunSeconds]:
        """Runs all earlier trees and ``shapes`` in turn; returns the fastest seconds of each."""
        common: dict[str, Any] = dict(
            max_new_tokens=max_new_tokens, sampling=Sampling(temperature=temperature), stop=()
        )
        for shape in shapes:
            who = None if shape is None else drafter
            options = Options(drafter=who, drafting=Drafting(tree=shape), **common)
            jobs[shape] = prepare(lm, prompt, options)
            timing.timed_run(jobs[shape])  # compiles
        spent = {shape: [] for shape in jobs}
        for _ in range(TURNS):
            for shape, work in jobs.items():
                start, run, state = timing.timed_run(work)
                spent[shape].append((start, run / max(1, int(np.max(state.stats.rounds)))))
        return {shape: RunSeconds(*np.min(spent[shape], axis=0)) for shape in jobs}

    def beyond(runs) -> tuple[float, float]:
        """Returns the seconds for each level and for each node that best fit the rounds."""
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
        best = tree_search.grow_fastest(
            counted, passes, level, node=node, rest=max(runs[None].round - passes[1], 0.0)
        )
        if best.shape is None or best.shape in runs or len(runs) > MOST_TREES:
            break
        tell(f"timing rounds of {best.shape.num_nodes - 1} tokens, {best.shape.depth} deep")
        runs = timed(best.shape)

    def ratio(shape, start: bool) -> float:
        """Returns the tokens per second divided by those of plain decoding, by the timed runs."""
        each = tree_search.expected_tokens(shape, counted.rates)
        plain, run = (
            dataclasses.replace(runs[way], start=runs[way].start if start else 0.0)
            for way in (None, shape)
        )
        return plain.seconds(max_new_tokens, 1.0) / run.seconds(max_new_tokens, each)

    known = [shape for shape in runs if shape is not None]
    known = [shape for shape in known if not tree_search.never_right(shape, counted)]
    if not known:
        raise ValueError(
            "each tree of these sizes has a choice that was never right: give fewer nodes, or more "
            "prompts"
        )
    best = max(known, key=lambda shape: ratio(shape, True))
    choice, rounds = tree_search.TreeChoice(None, 1.0, 1.0), 1.0
    if (whole := ratio(best, True)) > 1:
        tokens = tree_search.expected_tokens(best, counted.rates)
        choice, rounds = tree_search.TreeChoice(best, whole, tokens), ratio(best, False)
    return TreeTimings(choice, rounds, passes, level, node)


def _pass(passes: Mapping[int, float], nodes: int) -> float:
    """Returns the seconds of a pass over ``nodes``, interpolated between two timed sizes."""
    known = sorted(passes)
    return float(np.interp(nodes, known, [passes[n] for n in known]))


def _nonnegative(parts: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Returns the least-squares solution ``x >= 0 [2]`` of ``parts [M, 2] @ x = more [M]``."""
    solution = np.linalg.lstsq(parts, more, rcond=None)[0]
    if (solution >= 0).all():
        return solution
    alone = np.maximum(parts.T @ more / np.sum(parts**2, axis=0), 0.0)
    ways = np.diag(alone)
    return min(ways, key=lambda x: float(np.sum((parts @ x - more) ** 2)))
