"""Trees that each row grows anew in each round by the drafter's probabilities, and one to measure.

``expand.py`` drafts them; ``topology.py`` reads them from texts, beside the static trees.
"""

from __future__ import annotations

import dataclasses
import math
import numbers

import numpy as np

from .ops import whole

# of a draft, and of the tree of extended paths while one is grown: masks are [N, N]
MOST_NODES = 1024
SHARPEST = 1000  # finite logits of up to 1e35 stay finite
SETTINGS = {"gain": float, "branch": float, "sharpness": float}  # of ``Expand``, as texts name them


def bounded(nodes: int, what: str) -> None:
    """Raises ``ValueError`` for more nodes than a draft may have."""
    if nodes > MOST_NODES:
        raise ValueError(f"{what} has {nodes} nodes; at most {MOST_NODES} are allowed")


def _keep_whole(shape, *names: str) -> None:
    """Turns fields of a shape into ints.

    Raises:
      ValueError: a field is no whole number.
    """
    for name in names:
        number = whole(getattr(shape, name), f"{type(shape).__name__}, {name}")
        object.__setattr__(shape, name, number)


def _check_number(shape, name: str) -> None:
    """Raises ``ValueError`` unless a field of a shape is a number that a float can hold."""
    value = getattr(shape, name)
    try:
        if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
            float(value)
            return
    except OverflowError:
        pass
    raise ValueError(f"{type(shape).__name__}, {name}: {value!r:.60} is no number, such as 0.5")


@dataclasses.dataclass(frozen=True)
class Expand:
    """A tree that each row grows anew in each round by the drafter's own probabilities.

    At each depth the ``width`` most probable paths are extended by ``width`` tokens each. Of all
    paths found, the ``nodes`` most probable become the draft. The value of a path is the product of
    the drafter's probabilities, so the kept paths always form a tree.

    The draft is a function of the context (``greedy`` and ``delta`` judge it). Its values never
    depend on drawn tokens, which would bias every rule that uses q.

    Example::

        Expand(8, 5, 24)  # written "expand:8x5x24"

    Attributes:
      width: the number of paths that are extended at each depth, and of tokens that extend a path.
      depth: the greatest depth.
      nodes: the number of drafted tokens, the root excluded.
      gain: tokens. With ``gain`` above 0, a row stops growing when one more level would raise the
        sum of the kept values (the drafter's estimate of the number of accepted tokens) by less
        than ``gain``.
      branch: in [0, 1]; a token beside the most probable one extends a path only if the drafter
        gives it at least this probability; 0: whatever it gives it.
      siblings: K; above 0, a path is extended by its K best tokens instead of ``width``, and the
        value by which a path is kept is that of the path without its last token; see
        ``whole_families``. 0: it is the path's own value.
      sharpness: from 1 to ``SHARPEST``; in rows at temperature 0, logits are multiplied by it
        before they give the probabilities that ``branch`` is about and of which values are
        products, unless the rule shares its noise. There a token is accepted if the target finds
        it most probable, which happens more often than the drafter's law gives it;
        ``docs/concepts/trees.md`` says how much more is accepted. 1, the default: values are
        those of the papers.

    References: EAGLE-2, arXiv 2406.16858 (``gain=0``); OPT-Tree, arXiv 2406.17276 (``gain > 0``);
    LLMCad, arXiv 2309.04255, section 3 (``branch=0.3``); JetSpec, arXiv 2606.18394 (``siblings``);
    none for ``sharpness``.

    Raises:
      ValueError: a size is no whole number, a setting is no number, a number is out of range,
        ``nodes`` is more than all paths that can be found, the draft or the tree of extended paths
        has more than ``MOST_NODES`` nodes, a path is extended by as many tokens, or ``gain`` and
        ``siblings`` are both given.
    """

    width: int
    depth: int
    nodes: int
    gain: float = 0.0
    branch: float = 0.0
    siblings: int = 0
    sharpness: float = 1.0

    def __post_init__(self):
        _keep_whole(self, "width", "depth", "nodes", "siblings")
        for name in SETTINGS:
            _check_number(self, name)
        if min(self.width, self.depth, self.nodes) < 1 or not 0 <= self.gain < math.inf:
            raise ValueError(f"{self}: width, depth and nodes must be at least 1, gain at least 0")
        if not 1 <= self.sharpness <= SHARPEST:
            raise ValueError(f"{self}: sharpness is a number from 1 to {SHARPEST}")
        if not 0 <= self.branch <= 1:
            raise ValueError(f"{self}: branch is a probability, from 0 to 1")
        if self.siblings < 0 or (self.siblings and self.gain):
            raise ValueError(f"{self}: siblings must be at least 0, and 0 where gain is above 0")
        bounded(self.num_nodes, f"a draft of {self}")
        bounded(1 + self.width * (self.depth - 1), f"the tree of extended paths of {self}")
        # so the paths that are found, of which the draft is chosen, are at most MOST_NODES squared
        bounded(1 + max(self.width, self.children), f"a depth of {self}")
        most, extended = 0, 1
        for _ in range(self.depth):
            most += extended * self.children
            extended = min(self.width, extended * self.children)
        if not self.depth <= self.nodes <= most:
            raise ValueError(
                f"{self}: nodes must be from {self.depth}, the depth, to {most}, the number of "
                "paths that are found"
            )

    @property
    def children(self) -> int:
        """The number of tokens by which a path is extended."""
        return self.siblings or self.width

    def __str__(self) -> str:
        """As ``parse`` reads it, where it can be written so."""
        given = {name: value for name, value in self.settings.items() if name in SETTINGS}
        words = [f"{name}={value!r}".removesuffix(".0") for name, value in given.items()]
        settings = f":{','.join(words)}" if words else ""
        if not self.siblings:
            return f"expand:{self.width}x{self.depth}x{self.nodes}{settings}"
        families = -(-self.nodes // self.siblings)
        if self.width != max(1, families - 1) or self.depth > families:
            return repr(self)
        return f"jetspec:{self.siblings}x{self.depth}x{self.nodes}{settings}"

    @property
    def settings(self) -> dict[str, float]:
        """The fields beside the sizes that are not as they are by default, by their names."""
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        given = {name: kind(getattr(self, name)) for name, kind in SETTINGS.items()}
        given["siblings"] = int(self.siblings)
        return {name: value for name, value in given.items() if value != usual[name]}

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return self.nodes + 1


def whole_families(siblings: int, depth: int, nodes: int) -> Expand:
    """The tree of JetSpec: below the most probable nodes hang their ``siblings`` best tokens each.

    The node with the greatest value gets its children, then the one with the next greatest value,
    until there are ``nodes``; the last one may get fewer. ``Expand`` looks at as many paths of a
    depth as can have children then, and no deeper than so many nodes can reach. Values are sums in
    float32, and equal ones fall to the node that was found at the lesser depth; the authors sum in
    float64, and there equal ones fall to the node that was added first.

    Example::

        whole_families(7, 15, 62)  # written "jetspec:7x15x62"

    References: JetSpec, arXiv 2606.18394; ``accum_logp`` of the authors' code, whose ``budget``
    counts the root too.

    Raises:
      ValueError: a number is no whole number or less than 1, ``nodes`` is more than all paths that
        can be found, or there are more than ``MOST_NODES`` nodes, see ``Expand``.
    """
    siblings = whole(siblings, "whole_families, siblings")
    depth, nodes = whole(depth, "whole_families, depth"), whole(nodes, "whole_families, nodes")
    if min(siblings, depth, nodes) < 1:
        raise ValueError(
            f"jetspec:{siblings}x{depth}x{nodes}: children, depth and nodes must be at least 1"
        )
    families = -(-nodes // siblings)
    return Expand(max(1, families - 1), min(depth, families), nodes, siblings=siblings)


@dataclasses.dataclass(frozen=True)
class Beams:
    """The tree of a beam search that each row makes anew by the drafter's own probabilities.

    At each depth the ``width`` most probable paths are extended. The draft is the tree of all
    extended paths, in which each prefix occurs once. Like the draft of ``Expand``, it is a function
    of the context.

    Attributes:
      width: the number of beams.
      depth: the number of tokens of a beam.

    References: ReDrafter, arXiv 2403.09919. The paper leaves out beams that the search dropped; a
    draft of fixed size keeps them, which costs nothing.

    Raises:
      ValueError: ``width`` or ``depth`` is no whole number or less than 1, or the nodes are more
        than ``MOST_NODES``.
    """

    width: int
    depth: int

    def __post_init__(self):
        _keep_whole(self, "width", "depth")
        if min(self.width, self.depth) < 1:
            raise ValueError(f"{self}: width and depth must be at least 1")
        bounded(self.num_nodes, str(self))

    @property
    def children(self) -> int:
        """The number of tokens by which a path is extended."""
        return self.width

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return 1 + self.width * self.depth


@dataclasses.dataclass(frozen=True)
class Follow:
    """A topology for measuring (``analysis.rank_counts``), which is never verified.

    At each depth the tree has the ``ranks`` most probable tokens after the true tokens before it,
    which are those that follow the root in ``context.tokens``. Nodes are listed depth by depth, the
    most probable first.

    Attributes:
      depth: the greatest depth.
      ranks: the number of tokens at each depth.

    Raises:
      ValueError: ``depth`` or ``ranks`` is no whole number or less than 1.
    """

    depth: int
    ranks: int

    def __post_init__(self):
        _keep_whole(self, "depth", "ranks")
        if min(self.depth, self.ranks) < 1:
            raise ValueError(f"{self}: depth and ranks must be at least 1")

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return 1 + self.depth * self.ranks
