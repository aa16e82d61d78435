"""The shapes of drafts: static trees, and those of ``grown.py``, which a drafter grows anew.

A topology is a small hashable object, static under jit. ``trees.expand.expand`` drafts every
topology for every method that can compute logits below a node.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._internal.keywords import counted
from .._internal.named_settings import parse_settings
from .grown import SETTINGS, Beams, Expand, Follow, bounded, whole_families
from .ops import chain_parents, check_parents, whole

GROWN = ("expand", "jetspec")  # settings may follow the sizes of these, for ``parse``
# numbers after the colon, for ``parse``
SIZES = {"chain": 1, "expand": 3, "jetspec": 3, "beams": 2, "comb": 2}


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree: the r-th child of a node gets the drafter's r-th choice below that node.

    Example::

        Tree((-1, 0, 0, 1))  # two children of the root, one child of the first of them

    Attributes:
      parents: the parent of each node, N ints; the root's is -1. Parents must come before their
        children; the nodes are renumbered level by level, the children of a node side by side.

    Raises:
      ValueError: there is no root, a parent does not come before its child, or there are more than
        ``MOST_NODES`` nodes.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        bounded(len(self.parents), "the tree")
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
        """The number of nodes, the root included."""
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node; the root has depth 0."""
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
        """The index of each node among its siblings, counted from 0."""
        return tuple(n - self.parents.index(p) for n, p in enumerate(self.parents))

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == chain_parents(self.num_nodes - 1)

    def cut(self, depth: int) -> Tree:
        """Returns the tree of the nodes that are no deeper than ``depth``."""
        return Tree(tuple(p for p, d in zip(self.parents, self.depths, strict=True) if d <= depth))

    def __repr__(self) -> str:
        return f"chain({self.depth})" if self.is_chain else f"Tree({self.parents})"

    def __str__(self) -> str:
        """In words such as ``3x2``, where all nodes of each depth have as many children."""
        if self.is_chain:
            return repr(self)
        wide = collections.Counter(self.depths)
        counts = [max(1, wide[d + 1] // wide[d]) for d in range(self.depth)]
        return "x".join(map(str, counts)) if branching(*counts) == self else repr(self)


Topology = Tree | Expand | Beams | Follow


def chain(num_draft: int) -> Tree:
    """Returns the chain of ``num_draft`` tokens below the root.

    Raises:
      ValueError: ``num_draft`` is less than 1 or too large.
    """
    if num_draft < 1:
        raise ValueError(f"chain({num_draft}): a chain has at least one token")
    bounded(num_draft + 1, f"chain({num_draft})")
    return Tree(chain_parents(num_draft))


def branching(*counts: int) -> Tree:
    """Returns the static tree in which every node at depth ``d`` has ``counts[d]`` children.

    Example::

        branching(3, 2)  # three children of the root, two of each: 9 tokens; written "3x2"

    Raises:
      ValueError: there is no number, one is less than 1, or there are more than ``MOST_NODES``
        nodes.
    """
    if not counts or min(counts) < 1:
        raise ValueError(f"branching{counts}: give at least one number, each at least 1")
    counts = tuple(whole(count, "branching") for count in counts)
    nodes = itertools.accumulate(counts, operator.mul, initial=1)
    bounded(sum(nodes), f"branching{counts}")
    parents, level = [-1], [0]
    for count in counts:
        first = len(parents)
        parents += [node for node in level for _ in range(count)]
        level = range(first, len(parents))
    return Tree(tuple(parents))


def chains(count: int, num_draft: int) -> Tree:
    """Returns the tree of ``count`` chains of ``num_draft`` tokens below the root (SpecTr).

    Raises:
      ValueError: ``count`` is less than 1, or there are more than ``MOST_NODES`` nodes.
    """
    if count < 1:
        raise ValueError(f"chains({count}, {num_draft}): give at least one chain")
    return branching(count, *(1,) * (num_draft - 1))


def comb(width: int, depth: int) -> Tree:
    """Returns the chain of ``depth`` tokens with further tokens beside each of them: each node of
    the chain has ``width`` children, the first of which is the next one of the chain.

    Example::

        comb(3, 6)  # 18 tokens; written "comb:3x6"

    Raises:
      ValueError: ``width`` or ``depth`` is less than 1, or there are more than ``MOST_NODES``
        nodes.
    """
    if min(width, depth) < 1:
        raise ValueError(f"comb({width}, {depth}): both must be at least 1")
    bounded(1 + width * depth, f"comb({width}, {depth})")
    return Tree((-1, *(max(1 + (d - 1) * width, 0) for d in range(depth) for _ in range(width))))


def from_paths(paths: Sequence[Sequence[int]]) -> Tree:
    """Returns a static tree from paths of ranks in Medusa's notation: ``[[0], [1], [0, 0]]``.

    Args:
      paths: for each node its path from the root, as ranks among siblings, counted from 0.

    Raises:
      ValueError: a path is given twice, without its beginning, or without an earlier sibling, or
        a rank is no whole number.
    """
    known: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    given = [tuple(whole(rank, "paths") for rank in path) for path in paths]
    number = collections.Counter(given)
    if twice := next((path for path in given if path and number[path] > 1), None):
        raise ValueError(f"paths: {list(twice)} is given twice")
    for path in sorted(given, key=lambda p: (len(p), p)):
        if not path:
            continue
        earlier = (*path[:-1], path[-1] - 1)
        if path[:-1] not in known or (path[-1] > 0 and earlier not in known) or path[-1] < 0:
            lacking = path[:-1] if path[:-1] not in known else earlier
            raise ValueError(f"paths: {list(path)} is given without {list(lacking)}")
        known[path] = len(parents)
        parents.append(known[path[:-1]])
    return Tree(tuple(parents))


def parse(text: str, argument: str = "tree") -> Topology:
    """Returns the topology that a text describes.

    Args:
      text: ``chain:4``, ``3x2x1`` (see ``branching``), ``expand:WIDTHxDEPTHxNODES``,
        ``jetspec:SIBLINGSxDEPTHxNODES``, ``beams:WIDTHxDEPTH``, ``comb:WIDTHxDEPTH``, or the name
        of a JSON file that holds parents ``[-1, 0, 0, 1]`` or paths ``[[0], [1], [0, 0]]`` (see
        ``from_paths``). After ``expand`` and ``jetspec`` settings of ``Expand`` may follow, as in
        ``expand:8x5x24:sharpness=2,gain=0.1``.
      argument: the name of the argument in errors.

    Raises:
      ValueError: the text or the file describes no tree.
    """
    kind, _, numbers = text.rpartition(":")
    settings, after = {}, []
    if kind.startswith(GROWN):
        kind, numbers, *after = text.split(":", 2)
    try:
        if names_file(text):
            given = json.loads(Path(text).read_text())
            if not isinstance(given, list):
                raise ValueError("the file holds no list")
            return from_paths(given) if given and isinstance(given[0], list) else Tree(tuple(given))
        words = numbers.split("x")
        if "=" in numbers:
            raise ValueError(
                f"settings may follow the sizes of {' and '.join(GROWN)} alone, after a colon"
            )
        if not all(word.isdigit() for word in words):
            raise ValueError("sizes must be whole numbers with one x between two of them")
        sizes = [int(word) for word in words]
        if after:
            settings = parse_settings("settings", after[0], kind, SETTINGS)
        if len(sizes) != SIZES.get(kind, len(sizes)):
            raise ValueError(f"{kind}: takes {counted(SIZES[kind], 'size')}, and not {len(sizes)}")
        if kind == "chain":
            (count,) = sizes
            return chain(count)
        if kind == "expand":
            width, depth, nodes = sizes
            return Expand(width, depth, nodes, **settings)
        if kind == "jetspec":
            siblings, depth, nodes = sizes
            return dataclasses.replace(whole_families(siblings, depth, nodes), **settings)
        if kind == "beams":
            width, depth = sizes
            return Beams(width, depth)
        if kind == "comb":
            width, depth = sizes
            return comb(width, depth)
        if kind == "":
            return branching(*sizes)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{argument}={text!r}: {error}. {_ACCEPTED}") from None
    raise ValueError(f"{argument}={text!r} is unknown. {_ACCEPTED}")


_ACCEPTED = (
    "Accepted: 'chain:4', a chain of 4 tokens; '3x2x1', the number of children at each depth; "
    "'expand:8x4x24', width, depth and nodes of a tree that the drafter grows, with settings as in "
    "'expand:8x4x24:sharpness=2'; "
    "'jetspec:4x6x24', children, depth and nodes of one whose most probable nodes have 4 children; "
    "'beams:4x5', width and depth of a beam search; 'comb:3x6', a chain of 6 tokens with 2 more "
    "beside each; parents [-1, 0, 0, 1], or paths of ranks [[0], [1], [0, 0]], or a .json file "
    "of such a list"
)


def names_file(text: str) -> bool:
    """Returns whether a text names a file that holds a tree, for ``parse``."""
    return Path(text).suffix == ".json"


def as_topology(given, argument: str = "tree") -> Topology:
    """Returns a topology from a topology, a text (see ``parse``), parents, or paths of ranks.

    Args:
      given: one of these.
      argument: the name of the argument in errors.

    Raises:
      ValueError: ``given`` is a text or a sequence that describes no tree.
      TypeError: ``given`` is of another type.
    """
    if isinstance(given, Topology):
        return given
    if isinstance(given, str):
        return parse(given, argument)
    if isinstance(given, Sequence | np.ndarray):
        rows = list(given)
        try:
            if rows and isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
                return from_paths(rows)
            return Tree(tuple(rows))
        except (ValueError, TypeError) as error:
            told = str(error).removeprefix(f"topology={tuple(rows)}: ").removeprefix("topology: ")
            raise type(error)(f"{argument}={given!r}: {told}. {_ACCEPTED}") from None
    raise TypeError(f"{argument}={given!r}. {_ACCEPTED}")
