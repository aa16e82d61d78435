"""What tree to draft: static trees, and trees that a drafter grows anew in each round.

A topology is a small hashable object, static under jit. ``trees.expand.expand`` drafts any of
them with any method that can say logits below a node.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .ops import chain_parents, check_parents

MOST_NODES = 1024  # of a draft, and looked at while one is grown: each sees all others


def _bounded(nodes: int, what: str) -> None:
    """Raises ValueError for more nodes than a draft may have."""
    if nodes > MOST_NODES:
        raise ValueError(f"{what} has {nodes} nodes; at most {MOST_NODES}")


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree: the r-th child of a node gets the drafter's r-th choice below it.

    ``parents``: of each node, the root's is -1; any order in which parents come first. They are
    renumbered level by level, the children of a node side by side.

    Raises:
      ValueError: no root, a parent that does not come before its child (so: a cycle), or out of
        range.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        _bounded(len(self.parents), "the tree")
        parents = check_parents(self.parents)
        children = [[] for _ in parents]
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)
        order = [0]
        for node in order:  # grows while it is read: level by level
            order += children[node]
        rank = {node: i for i, node in enumerate(order)}
        ordered = (-1, *(rank[parents[node]] for node in order[1:]))
        object.__setattr__(self, "parents", ordered)

    @property
    def num_nodes(self) -> int:
        """Nodes, the root counted."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; the root has 0."""
        found = [0]
        for parent in self.parents[1:]:
            found.append(found[parent] + 1)
        return tuple(found)

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return self.depths[-1]

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The index of each node among its siblings, from 0."""
        return tuple(n - self.parents.index(p) for n, p in enumerate(self.parents))

    @property
    def is_chain(self) -> bool:
        return self.parents == chain_parents(self.num_nodes - 1)

    def cut(self, depth: int) -> Tree:
        """The nodes no deeper than ``depth``."""
        return Tree(tuple(p for p, d in zip(self.parents, self.depths, strict=True) if d <= depth))

    def __repr__(self) -> str:
        return f"chain({self.depth})" if self.is_chain else f"Tree({self.parents})"


@dataclasses.dataclass(frozen=True)
class Expand:
    """Grown by the drafter's own probabilities, for each row anew.

    At each depth the ``width`` most probable paths are gone on with, ``width`` choices each; of
    all paths looked at, the ``nodes`` most probable become the draft. A path's value is the
    product of the drafter's probabilities, so what is kept is always a tree. With ``gain`` above
    0 growth ends, for a row, where one more level raises the sum of the values kept, which is the
    expected number of accepted tokens as the drafter sees it, by less than ``gain``.

    The draft is a function of the context (``greedy`` and ``delta`` judge it); its values never
    depend on sampled tokens, which would bias every rule that trusts q.

    References: EAGLE-2, arXiv 2406.16858 (``gain=0``); OPT-Tree, arXiv 2406.17276 (``gain > 0``).
    """

    width: int
    depth: int
    nodes: int
    gain: float = 0.0

    def __post_init__(self):
        if min(self.width, self.depth, self.nodes) < 1 or self.gain < 0:
            raise ValueError(f"{self}: width, depth and nodes must be at least 1, gain at least 0")
        _bounded(1 + self.width * self.depth, f"what {self} goes on with")
        most = self.width + (self.depth - 1) * self.width**2
        if not self.depth <= self.nodes <= most:
            raise ValueError(
                f"{self}: nodes must be from depth to width + (depth - 1) * width^2 = {most}, "
                "all that is looked at"
            )

    @property
    def num_nodes(self) -> int:
        """Nodes, the root counted."""
        return self.nodes + 1


@dataclasses.dataclass(frozen=True)
class Beams:
    """A beam search by the drafter's own probabilities, for each row anew: of all paths of a
    length, the ``width`` most probable are gone on with. The draft is the tree of all of them, each
    prefix once; like ``Expand``'s it is a function of the context.

    References: ReDrafter, arXiv 2403.09919 (there, beams that the search gave up are left out; in a
    draft of fixed size they cost nothing).
    """

    width: int
    depth: int

    def __post_init__(self):
        if min(self.width, self.depth) < 1:
            raise ValueError(f"{self}: width and depth must be at least 1")
        _bounded(self.num_nodes, str(self))

    @property
    def num_nodes(self) -> int:
        """Nodes, the root counted."""
        return 1 + self.width * self.depth


@dataclasses.dataclass(frozen=True)
class Follow:
    """A topology for measuring (``analysis.rank_counts``), which is never verified.

    It has the ``ranks`` best choices at each depth after the tokens that follow the root in
    ``context.tokens``. Nodes are listed depth by depth, best first.
    """

    depth: int
    ranks: int

    def __post_init__(self):
        if min(self.depth, self.ranks) < 1:
            raise ValueError(f"{self}: depth and ranks must be at least 1")

    @property
    def num_nodes(self) -> int:
        """Nodes, the root counted."""
        return 1 + self.depth * self.ranks


Topology = Tree | Expand | Beams | Follow


def chain(num_draft: int) -> Tree:
    """``num_draft`` tokens, each below the one before."""
    if num_draft < 1:
        raise ValueError(f"chain({num_draft}): at least one token")
    _bounded(num_draft + 1, f"chain({num_draft})")
    return Tree(chain_parents(num_draft))


def branching(*counts: int) -> Tree:
    """Every node at depth ``d`` has ``counts[d]`` children: ``branching(3, 2)`` has 9 below the
    root, ``branching(4)`` four siblings."""
    if not counts or min(counts) < 1:
        raise ValueError(f"branching{counts}: give at least one number, each at least 1")
    parents, level = [-1], [0]
    for count in counts:
        first = len(parents)
        _bounded(first + count * len(level), f"branching{counts}")
        parents += [node for node in level for _ in range(count)]
        level = range(first, len(parents))
    return Tree(tuple(parents))


def chains(count: int, num_draft: int) -> Tree:
    """``count`` chains of ``num_draft`` tokens side by side (SpecTr's k drafts)."""
    if count < 1:
        raise ValueError(f"chains({count}, {num_draft}): at least one")
    return branching(count, *(1,) * (num_draft - 1))


def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
    """A static tree given by paths of ranks, as Medusa writes them: ``[[0], [1], [0, 0]]``.

    Raises:
      ValueError: a path whose beginning is not among them, or that leaves out an earlier sibling.
    """
    known: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for path in sorted({tuple(int(r) for r in path) for path in paths}, key=lambda p: (len(p), p)):
        if not path:
            continue
        earlier = (*path[:-1], path[-1] - 1)
        if path[:-1] not in known or (path[-1] > 0 and earlier not in known) or path[-1] < 0:
            lacking = path[:-1] if path[:-1] not in known else earlier
            raise ValueError(f"paths: {list(path)} is there without {list(lacking)}")
        known[path] = len(parents)
        parents.append(known[path[:-1]])
    return Tree(tuple(parents))


def parse(text: str) -> Topology:
    """A topology from words: ``chain:4``, ``3x2x1`` (``branching``), ``expand:WIDTHxDEPTHxNODES``,
    ``beams:WIDTHxDEPTH``, or a JSON file that holds parents ``[-1, 0, 0, 1]`` or paths
    ``[[0], [1], [0, 0]]``.

    Raises:
      ValueError: none of these.
    """
    kind, _, numbers = text.rpartition(":")
    try:
        if Path(text).suffix == ".json":
            given = json.loads(Path(text).read_text())
            if not isinstance(given, list):
                raise ValueError("it holds no list")
            return from_paths(given) if given and isinstance(given[0], list) else Tree(tuple(given))
        words = numbers.split("x")
        if not all(word.isdigit() for word in words):
            raise ValueError("its sizes are whole numbers with one x between two of them")
        sizes = [int(word) for word in words]
        if kind == "chain":
            (count,) = sizes
            return chain(count)
        if kind == "expand":
            width, depth, nodes = sizes
            return Expand(width, depth, nodes)
        if kind == "beams":
            width, depth = sizes
            return Beams(width, depth)
        if kind == "":
            return branching(*sizes)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"tree={text!r}: {error}. {_ACCEPTED}") from None
    raise ValueError(f"tree={text!r} is unknown. {_ACCEPTED}")


_ACCEPTED = (
    "Accepted: 'chain:4'; '3x2x1', children of the nodes at each depth; 'expand:8x4x24', width, "
    "depth and nodes of a tree that the drafter grows; 'beams:4x5', width and depth of a beam "
    "search; a .json file of parents [-1, 0, 0, 1] or of paths of ranks [[0], [1], [0, 0]]"
)


def as_topology(given) -> Topology:
    """A topology from one, from ``parse``'s words, or from parents.

    Raises:
      ValueError: ``given`` is no tree.
      TypeError: it is something else altogether.
    """
    if isinstance(given, Topology):
        return given
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Sequence | np.ndarray):
        return Tree(tuple(int(p) for p in given))
    raise TypeError(f"tree={given!r}. {_ACCEPTED}")
