"""Finds the static tree of drafts with the highest expected speed.

From the shares of right choices by depth and rank (``rank_counts``), ``grow_greedy`` grows a tree
by Medusa's method, ``grow_optimal`` by Sequoia's dynamic program with limits of depth and siblings,
and ``grow_fastest`` also takes the time of a pass over N nodes into account.
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
    """Returns the expected number of tokens per round of a static tree.

    The number is 1, for the target's own token, plus the sum over all nodes of the product of the
    rates on the path to the node.

    Args:
      shape: the tree.
      rates: float ``[D, R]``, the shares of right choices by depth and rank.
    """
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
    """Returns the static tree of a given size with the most expected tokens, by a greedy method.

    The value of a node is the product of the shares on its path. The method adds the node with the
    greatest value, again and again. Values fall along a path and usually with the rank; then the
    result is the best tree of its size.

    Args:
      counts: counts, or shares float ``[D, R]``.
      nodes: the number of drafted nodes.

    Raises:
      ValueError: the counts have too few depths and ranks for ``nodes``, or the tree would have a
        node at a depth and rank where no choice was ever right.

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
    """Returns the best static tree within limits, by dynamic programming.

    The program is over (nodes, level, siblings). The best way to distribute ``m`` nodes over the
    children from rank ``r`` on of a node at level ``d`` is to give some of them to the child of
    rank ``r`` and its descendants, and the rest to the later siblings.

    Args:
      counts: counts, or shares float ``[D, R]``.
      nodes: the most drafted nodes.
      depth: the greatest depth; None: all counted depths.
      siblings: the most children of a node; None: all counted ranks.

    Raises:
      ValueError: see ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.1 and algorithm 1. In the paper the share of a
    sibling does not depend on the depth; here it may.
    """
    rates = _rates(counts)
    levels = min(rates.shape[0], depth or rates.shape[0])
    ranks = min(rates.shape[1], siblings or rates.shape[1])

    @functools.cache
    def best(m: int, d: int, r: int) -> tuple[float, int]:
        """Returns the expected tokens of ``m`` nodes that are distributed over the children from
        rank ``r`` on at level ``d``, and how many of them child ``r`` gets (0: none is added)."""
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
    """A tree and its expected speed.

    Attributes:
      shape: the tree; None if plain decoding is faster than every tree.
      ratio: expected tokens per second divided by those of plain decoding.
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
    """Returns the tree with the most expected tokens per second, among all timed sizes.

    No tree has a choice that was never right by ``RankCounts``.

    Args:
      counts: counts, or shares float ``[D, R]``.
      passes: ``{N: seconds}`` of the target's pass over N nodes, the root included, with N = 1.
      level: seconds that a round takes in addition to its pass for each level of the tree.
      node: seconds that a round takes in addition to its pass for each drafted node.
      rest: other seconds of a round, which plain decoding takes too.
      siblings: the most children of a node; None: all counted ranks.

    Raises:
      ValueError: ``passes`` has no time for one node, or as for ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.3.
    """
    if 1 not in passes:
        raise ValueError(
            f"passes has sizes {sorted(passes)}: size 1, plain decoding, must be among them"
        )
    plain = passes[1] + rest
    best = TreeChoice(None, 1.0, 1.0)
    rates = _rates(counts)
    for size, seconds in sorted(passes.items()):
        for depth in range(1, min(rates.shape[0], size - 1) + 1):
            shape = grow_optimal(rates, size - 1, depth=depth, siblings=siblings)
            tokens = expected_tokens(shape, rates)
            ratio = tokens * plain / (seconds + rest + depth * level + (size - 1) * node)
            if shape.depth == depth and ratio > best.ratio and not never_right(shape, counts):
                best = TreeChoice(shape, ratio, tokens)
    return best


def never_right(shape: trees.Tree, counts: RankCounts | np.ndarray) -> list[tuple[int, int]]:
    """The depths (from 1) and ranks (from 0) of choices in a tree of which none was ever right, by
    ``counts``; none where these are shares."""
    if not isinstance(counts, RankCounts):
        return []
    held = sorted({*zip(shape.depths[1:], shape.ranks[1:], strict=True)})
    return [(depth, rank) for depth, rank in held if not counts.hits[depth - 1, rank]]


def _rates(counts) -> np.ndarray:
    rates = counts.rates if isinstance(counts, RankCounts) else np.asarray(counts, float)
    if rates.ndim != 2 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"shares of shape {rates.shape}: give [D, R], each from 0 to 1")
    return rates


def _checked(shape: trees.Tree, counts, nodes: int | None) -> trees.Tree:
    """Returns ``shape``.

    Raises:
      ValueError: the counts have fewer depths and ranks than the tree needs, or the tree has a node
        at a depth and rank where no choice was ever right.
    """
    if nodes is not None and shape.num_nodes - 1 < nodes:
        depths, ranks = _rates(counts).shape
        raise ValueError(
            f"nodes={nodes}: {depths} depths of {ranks} ranks have only {shape.num_nodes - 1} "
            "nodes; measure more ranks, or ask for fewer nodes"
        )
    for depth, rank in never_right(shape, counts):
        low, high = counts.interval(depth - 1, rank)
        raise ValueError(
            f"the tree of {shape.num_nodes - 1} nodes has choices of rank {rank} at depth {depth}, "
            f"and none of these choices was right in {counts.trials[depth - 1]} trials: their "
            f"share lies in [{low:.4f}, {high:.4f}] (95 %). Measure on more text, or ask for fewer "
            "nodes"
        )
    return shape
