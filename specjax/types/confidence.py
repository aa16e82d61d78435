"""Where a row stops drafting within a round: by the laws of its draft, never by what was drawn."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Confidence:
    """A threshold for the drafter's most probable token, below which a row drafts nothing deeper.

    At each node the drafter's own softmax, before temperature and filters, has a greatest
    probability ``c``. Nothing deeper is drafted below a node for which ``c``, or the product of
    ``c`` along the path to the node, is less than ``least``.

    Lossless: what is compared is known before the node's children are drawn, so a token that is
    left out was never looked at. A threshold for the probability of the drawn token keeps the law
    only if that token stays in the draft (``keeps_last``, as in ``drafters.confidence_stop``): if
    it were dropped, a target (.7, .3) with a uniform drafter would become (.85, .15).

    Attributes:
      least: in [0, 1]; 0: no row stops.
      along: ``"token"``: ``c`` of the node alone; ``"path"``: the product of ``c`` along its path.
      keeps_last: whether the children of the node that falls below ``least`` are still drafted.

    Raises:
      ValueError: ``least`` is out of range, or ``along`` is unknown.

    References: the bias is that of DSpark, arXiv 2607.05147, appendix A.
    """

    least: float
    along: Literal["token", "path"] = "token"
    keeps_last: bool = True

    def __post_init__(self):
        if not 0 <= self.least <= 1:
            raise ValueError(f"Confidence(least={self.least}): it must be from 0 to 1")
        if self.along not in ("token", "path"):
            raise ValueError(f"Confidence(along={self.along!r}): give 'token' or 'path'")
