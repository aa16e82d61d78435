"""The arithmetic of the planner: what a draft length would have cost on a known text.

A drafter that is asked for fewer tokens proposes the beginning of what it would propose anyway.
So if the number of proposed and of accepted tokens is known for every position of a text, the
rounds of every shorter length follow one by one: which positions become roots, and how wide each
pass is. A mean acceptance rate would not do: where a round begins depends on the draft length, and
easy stretches of text come together.

The result is exact at temperature 0 for a drafter that is a function of the text before the root.
Where tokens are drawn, the acceptance at a root is one draw, and the text after the root another.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...decoding.round import widths


@dataclasses.dataclass(frozen=True)
class AcceptanceRecord:
    """The numbers of proposed and accepted tokens at every position of a batch's texts.

    Attributes:
      proposed: for each row, int ``[n]``: number of tokens proposed if generated token ``i`` were
        the next, for the ``n`` generated tokens.
      accepted: for each row, int ``[n]``: how many of them would be accepted.
    """

    proposed: list[np.ndarray]
    accepted: list[np.ndarray]

    @property
    def tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(map(len, self.proposed))

    def acceptance(self, num_draft: int) -> list[float]:
        """For each position of a draft, over all roots: the share of proposed tokens that are
        accepted, given that all before were accepted. NaN where nothing was proposed."""
        proposed, accepted = np.concatenate(self.proposed), np.concatenate(self.accepted)
        rates = []
        for position in range(1, num_draft + 1):
            open_ = (proposed >= position) & (accepted >= position - 1)
            rates.append(float(np.mean(accepted[open_] >= position)) if open_.any() else np.nan)
        return rates


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The rounds of one batch at one draft length.

    Attributes:
      by_width: number of rounds by the nodes of their pass.
      per_row: number of rounds in which a row was still decoding, summed over the rows.
      drafted: number of drafted tokens, as ``Stats`` counts them except at the end of the budget.
      accepted: number of accepted tokens, likewise.
    """

    by_width: Mapping[int, int]
    per_row: int
    drafted: int
    accepted: int

    @property
    def count(self) -> int:
        """Rounds of the loop: as many as the slowest row needs."""
        return sum(self.by_width.values())

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(
            Counter(self.by_width) + Counter(other.by_width),
            self.per_row + other.per_row,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def rounds(record: AcceptanceRecord, num_draft: int) -> Rounds:
    """The rounds that a batch takes with drafts of ``num_draft`` tokens; 0 is plain decoding.

    All rows take part in each round; the pass of a round is the narrowest compiled pass that holds
    the widest draft of a row that is still decoding.
    """
    sizes = np.asarray(widths(num_draft + 1))
    ends = np.asarray([len(row) for row in record.proposed])
    at, by_width = np.zeros_like(ends), Counter()
    per_row = drafted = accepted = 0
    while (live := np.flatnonzero(at < ends)).size:
        wide = [min(num_draft, record.proposed[row][at[row]]) for row in live]
        kept = [min(num_draft, record.accepted[row][at[row]]) for row in live]
        by_width[int(sizes[np.sum(sizes <= max(wide))])] += 1
        per_row, drafted, accepted = per_row + len(live), drafted + sum(wide), accepted + sum(kept)
        at[live] = np.minimum(at[live] + np.asarray(kept) + 1, ends[live])
    return Rounds(by_width, per_row, int(drafted), int(accepted))


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of rounds at one batch size, in units of a round of plain decoding.

    Attributes:
      unit: seconds of a round of plain decoding.
      passes: ``{N: cost}`` of the target's pass over N nodes alone.
      drafts: ``{drafter: {num_draft: cost}}``: cost of a round beyond its pass and beyond the
        overhead of a plain round (drafting, and accepting among more nodes). It may be negative
        where a drafter costs nothing and the clock is noisy.
    """

    unit: float
    passes: Mapping[int, float]
    drafts: Mapping[str, Mapping[int, float]]

    def drafting(self, drafter: str, num_draft: int) -> float:
        """The cost of drafting ``num_draft`` tokens: measured, or interpolated."""
        known = sorted(self.drafts[drafter].items())
        return float(np.interp(num_draft, [n for n, _ in known], [cost for _, cost in known]))

    def of(self, taken: Rounds, drafter: str, num_draft: int) -> float:
        """The cost of all rounds ``taken``: ``sum of T(N) + rounds * (1 - T(1) + drafting)``."""
        each = 1 - self.passes[1] + self.drafting(drafter, num_draft)
        return in_passes(taken, self.passes) + taken.count * each


def in_passes(taken: Rounds, passes: Mapping[int, Any]):
    """The cost of the target's passes of all rounds together; ``passes``: the cost by width."""
    return sum(count * passes[width] for width, count in taken.by_width.items())


def beyond_the_pass(spent, taken: Rounds, passes: Mapping[int, Any]):
    """The entry of ``Costs.drafts`` for rounds ``taken`` whose measured cost is ``spent``."""
    return (spent - in_passes(taken, passes)) / taken.count - (1 - passes[1])
