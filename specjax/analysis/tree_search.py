"""Finds the static tree of drafts that is expected to pay most.

From the shares of right choices by depth and rank (``rank_counts``) three functions grow trees:
``grow_greedy`` as Medusa does, ``grow_optimal`` by the dynamic programme of Sequoia, with limits on
depth and siblings, and ``grow_fastest`` also weighs the cost of a pass over N nodes.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Mapping

import numpy as np

from .. import trees
from .rank_counts import RankCounts


def expected_tokens(shape: trees.Tree, rates: np.ndarray) -> float:
    """Expected tokens per round of a static tree, the target's own token included: 1 plus the sum
    over nodes of the product of ``rates [D, R]`` on the path to the node."""
    return float(sum(_values(shape, np.asarray(rates, float))))


def _values(shape: trees.Tree, rates) -> list[float]:
    values = [1.0]
    for node in range(1, shape.num_nodes):
        depth, rank = shape.depths[node], shape.ranks[node]
        inside = depth <= rates.shape[0] and rank < rates.shape[1]
        here = rates[depth - 1, rank] if inside else 0.0
        values.append(values[shape.parents[node]] * here)
    return values


# ------------------------------------------------------------------------------------ growing


def grow_greedy(counts: RankCounts | np.ndarray, nodes: int) -> trees.Tree:
    """The static tree with ``nodes`` drafted nodes that is expected to give most tokens.

    The value of a node is the product of the shares on its path. The node of the greatest value is
    added again and again; as values fall along a path, and should fall with the rank, the result is
    the best tree of its size.

    Args:
      counts: counts, or shares float ``[D, R]``.
      nodes: number of drafted nodes.

    Raises:
      ValueError: the counts have too few depths and ranks for ``nodes``, or the tree would have a
        node at a place where no choice was ever right.

    References: Medusa, arXiv 2401.10774, section 2.3.3.
    """
    rates = _rates(counts)
    depths, ranks = rates.shape
    parents = [-1]
    heap = [(-rates[0, 0], 0, 0, 0, 1.0)]  # value, parent, depth of the node, rank, parent's value
    while heap and len(parents) <= nodes:
        value, parent, depth, rank, above = heapq.heappop(heap)
        parents.append(parent)
        if rank + 1 < ranks:
            heapq.heappush(heap, (-above * rates[depth, rank + 1], parent, depth, rank + 1, above))
        if depth + 1 < depths:
            below = value * rates[depth + 1, 0]
            heapq.heappush(heap, (below, len(parents) - 1, depth + 1, 0, -value))
    return _checked(trees.Tree(tuple(parents)), counts, nodes)


def grow_optimal(
    counts: RankCounts | np.ndarray,
    nodes: int,
    *,
    depth: int | None = None,
    siblings: int | None = None,
) -> trees.Tree:
    """The best static tree within limits, by a dynamic programme over (nodes, level, siblings).

    The best way to spend ``m`` nodes on the children from rank ``r`` on of a node at level ``d`` is
    to give some of them to the child of rank ``r``, itself included, and the rest to the later
    siblings.

    Args:
      counts: counts, or shares float ``[D, R]``.
      nodes: drafted nodes at most.
      depth: levels at most; None: as many as were counted.
      siblings: children of a node at most; None: as many as were counted.

    Raises:
      ValueError: as for ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.1 and algorithm 1; there the share of a sibling
    does not depend on the depth, here it may.
    """
    rates = _rates(counts)
    levels = min(rates.shape[0], depth or rates.shape[0])
    ranks = min(rates.shape[1], siblings or rates.shape[1])

    @functools.cache
    def best(m: int, d: int, r: int) -> tuple[float, int]:
        """Expected tokens of ``m`` nodes spent on the children ``r ...`` at level ``d``, and how
        many of them go to child ``r`` (0: nothing more is added)."""
        if not m or d == levels or r == ranks:
            return 0.0, 0
        result = (0.0, 0)
        for share in range(1, m + 1):
            below, beside = best(share - 1, d + 1, 0)[0], best(m - share, d, r + 1)[0]
            value = rates[d, r] * (1 + below) + beside
            if value > result[0]:
                result = value, share
        return result

    parents = [-1]

    def build(parent, m, d, r):
        _, share = best(m, d, r)
        if share:
            parents.append(parent)
            build(len(parents) - 1, share - 1, d + 1, 0)
            build(parent, m - share, d, r + 1)

    build(0, nodes, 0, 0)
    return _checked(trees.Tree(tuple(parents)), counts, None)


@dataclasses.dataclass(frozen=True)
class TreeChoice:
    """A tree and what to expect of it.

    Attributes:
      shape: the tree; None if plain decoding is faster than any tree.
      ratio: expected tokens per second over those of plain decoding.
      tokens: expected tokens per round.
    """

    shape: trees.Tree | None
    ratio: float
    tokens: float


def grow_fastest(
    counts: RankCounts | np.ndarray,
    passes: Mapping[int, float],
    level: float = 0.0,
    *,
    node: float = 0.0,
    rest: float = 0.0,
    siblings: int | None = None,
) -> TreeChoice:
    """The tree that is expected to give most tokens per second, among all sizes that were timed.

    Args:
      counts: counts, or shares float ``[D, R]``.
      passes: ``{N: seconds}`` of the target's pass over N nodes, the root included; 1 must be among
        them.
      level: seconds that a round takes beyond its pass for each level of the tree.
      node: seconds that a round takes beyond its pass for each drafted node.
      rest: other seconds of a round, which plain decoding takes too.
      siblings: children of a node at most; None: as many as were counted.

    Raises:
      ValueError: no time of a pass over 1 node; as for ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.3.
    """
    if 1 not in passes:
        raise ValueError(
            f"passes has sizes {sorted(passes)}: 1, plain decoding, must be among them"
        )
    plain = passes[1] + rest
    best = TreeChoice(None, 1.0, 1.0)
    rates = _rates(counts)
    for size, seconds in sorted(passes.items()):
        for depth in range(1, min(rates.shape[0], size - 1) + 1):
            shape = grow_optimal(rates, size - 1, depth=depth, siblings=siblings)
            tokens = expected_tokens(shape, rates)
            ratio = tokens * plain / (seconds + rest + depth * level + (size - 1) * node)
            if shape.depth == depth and ratio > best.ratio:
                best = TreeChoice(shape, ratio, tokens)
    if best.shape is not None:
        _checked(best.shape, counts, None)
    return best


def _rates(counts) -> np.ndarray:
    rates = counts.rates if isinstance(counts, RankCounts) else np.asarray(counts, float)
    if rates.ndim != 2 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"shares of shape {rates.shape}: give [D, R], each from 0 to 1")
    return rates


def _checked(shape: trees.Tree, counts, nodes: int | None) -> trees.Tree:
    """Raises ``ValueError`` where the tree is larger than the counts allow: there are fewer nodes
    to choose from, or a node stands where no choice was ever right."""
    if nodes is not None and shape.num_nodes - 1 < nodes:
        depths, ranks = _rates(counts).shape
        raise ValueError(
            f"nodes={nodes}: {depths} depths of {ranks} ranks have only {shape.num_nodes - 1}; "
            "measure more ranks, or ask for fewer nodes"
        )
    if isinstance(counts, RankCounts):
        for depth, rank in sorted({*zip(shape.depths[1:], shape.ranks[1:], strict=True)}):
            if not counts.hits[depth - 1, rank]:
                low, high = counts.interval(depth - 1, rank)
                raise ValueError(
                    f"the tree of {shape.num_nodes - 1} nodes has choices of rank {rank} at depth "
                    f"{depth}, of which none was right in {counts.trials[depth - 1]} trials: "
                    f"their share lies anywhere in [{low:.4f}, {high:.4f}] (95 %). Measure on more "
                    "text, or ask for fewer nodes"
                )
    return shape
