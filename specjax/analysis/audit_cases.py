"""The drafts on which ``audit_rule`` audits a rule: small trees, whose law is exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .. import trees
from ..types import Rule
from . import exact_law

SHAPES = {
    "a chain of 3": (-1, 0, 1, 2),
    "2 siblings": (-1, 0, 0),
    "a tree of 5": (-1, 0, 0, 1, 1, 2),
    "a chain of 5": (-1, 0, 1, 2, 3, 4),
}
LONG = "a chain of 5"
MOST_NODES = 10  # of a further shape: its exact law has a cell for each text
WAYS, FIXED = ("iid", "distinct", "hub"), "fixed"


@dataclasses.dataclass(frozen=True)
class Case:
    """Drafts of one shape that a rule is audited on.

    Attributes:
      shape: a key of ``SHAPES``, or the words of a further tree.
      kind: how the tokens came about, one of ``WAYS`` and ``FIXED``.
      masked: whether each node in turn may not be accepted.
    """

    shape: str
    kind: str
    masked: bool = False

    def __str__(self) -> str:
        made = "point masses" if self.kind == FIXED else f"drawn {self.kind}"
        return f"{self.shape}, {made}" + (", with passengers" if self.masked else "")

    @property
    def topology(self) -> tuple[int, ...]:
        return SHAPES[self.shape] if self.shape in SHAPES else _parents(self.shape)

    @property
    def further(self) -> bool:
        """Whether the shape is one that the caller added, which is sampled alone."""
        return self.shape not in SHAPES

    @property
    def vocab(self) -> int:
        """The tokens of the toys: two where the draft is long."""
        return 2 if self.further or self.shape == LONG else 3

    @property
    def looped(self) -> bool:
        """Whether the whole loop can draw such drafts."""
        return self.kind != FIXED and not self.masked

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        return trees.as_topology(self.topology).depth

    def laws(self, seed: int) -> tuple[exact_law.Table, exact_law.Table]:
        """The laws p and q of random toys."""
        return exact_law.Table(seed, self.vocab), exact_law.Table(seed + 100, self.vocab)

    def drafts(self, q: exact_law.Table):
        """All drafts, with the probability of each: ``(Draft, [R])``."""
        if self.kind == FIXED:
            return exact_law.fixed_drafts(q, self.topology)
        made = exact_law.drafts(q, self.topology, self.kind)
        return exact_law.with_passengers(*made) if self.masked else made


def _parents(words: str) -> tuple[int, ...]:
    """Returns the parents of a tree such as ``chain:8``, small enough for an exact law."""
    try:
        shape = trees.as_topology(words)
    except ValueError:
        shape = None
    if not isinstance(shape, trees.Tree) or not 2 <= shape.num_nodes <= MOST_NODES + 1:
        raise ValueError(
            f"shapes={words!r}: give a tree of a fixed shape with 1 to {MOST_NODES} drafted "
            "tokens, such as 'chain:8' or '2x2x1'"
        )
    return shape.parents


def cases(rule: Rule, further: Sequence[str]) -> list[Case]:
    """All drafts on which a rule is audited, if it admits them.

    Raises:
      ValueError: a further shape is no small tree.
    """
    for words in further:
        _parents(words)
    found = [Case(words, WAYS[0]) for words in further]
    for shape, topology in SHAPES.items():
        most = max(map(topology.count, topology))
        ways = WAYS if rule.noise is None and most == 2 else WAYS[:1]
        found += [Case(shape, way) for way in ways]
        if shape != LONG:
            found.append(Case(shape, FIXED))
        if len(topology) < 5:
            found += [Case(shape, way, masked=True) for way in ways if way != "distinct"]
    if rule.noise is None:
        return found
    return [case for case in found if case.looped]
