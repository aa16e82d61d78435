"""What a draft length would have cost on a text that is known: the arithmetic of the planner.

A drafter that is asked for fewer tokens proposes the beginning of what it would propose anyway.
So if it is known, for every position of a text, how many tokens would be proposed there and how
many of them accepted, the rounds of every shorter length follow one by one: which positions
become roots, and how wide each pass is. No mean acceptance rate enters, and none could do: where
a round begins depends on the length, and easy stretches of text come together.

Exact at temperature 0 for a drafter that is a function of the text before the root. Where tokens
are drawn, what was accepted at a root is one draw, and the text behind it another.
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
    """What a drafter does at every position of the texts of one batch.

    Attributes:
      proposed: of each row, int ``[n]``: tokens proposed if generated token ``i`` were the next,
        for the ``n`` tokens generated.
      accepted: of each row, int ``[n]``: how many of them would be accepted.
    """

    proposed: list[np.ndarray]
    accepted: list[np.ndarray]

    @property
    def tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(map(len, self.proposed))

    def acceptance(self, num_draft: int) -> list[float]:
        """For each position of a draft: the share accepted of those proposed, given that all
        before were accepted; over all roots. NaN where nothing was proposed."""
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
      by_width: how many rounds had a pass of so many nodes.
      per_row: rounds in which a row still lived, summed over the rows.
      drafted, accepted: tokens, as ``Stats`` counts them but for the end of the budget.
    """

    by_width: Mapping[int, int]
    per_row: int
    drafted: int
    accepted: int

    @property
    def count(self) -> int:
        """Rounds of the loop: as many as its slowest row needs."""
        return sum(self.by_width.values())

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(
            Counter(self.by_width) + Counter(other.by_width),
            self.per_row + other.per_row,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def rounds(trace: AcceptanceRecord, num_draft: int) -> Rounds:
    """The rounds that the batch of ``trace`` takes with drafts of ``num_draft`` tokens.

    Rows go on in lockstep; the pass of a round is the narrowest compiled one that holds the
    widest draft of a row that still lives. ``num_draft=0`` is plain decoding.
    """
    sizes = np.asarray(widths(num_draft + 1))
    ends = np.asarray([len(row) for row in trace.proposed])
    at, by_width = np.zeros_like(ends), Counter()
    per_row = drafted = accepted = 0
    while (live := np.flatnonzero(at < ends)).size:
        wide = [min(num_draft, trace.proposed[row][at[row]]) for row in live]
        kept = [min(num_draft, trace.accepted[row][at[row]]) for row in live]
        by_width[int(sizes[np.sum(sizes <= max(wide))])] += 1
        per_row, drafted, accepted = per_row + len(live), drafted + sum(wide), accepted + sum(kept)
        at[live] = np.minimum(at[live] + np.asarray(kept) + 1, ends[live])
    return Rounds(by_width, per_row, int(drafted), int(accepted))


@dataclasses.dataclass(frozen=True)
class Costs:
    """What rounds cost at one batch size, in units of a round of plain decoding.

    Attributes:
      unit: seconds of a round of plain decoding.
      passes: ``{N: cost}`` of the target's pass over N nodes, alone.
      drafts: ``{drafter: {num_draft: cost}}``, what a round costs beyond its pass and beyond what
        plain decoding spends around its own: drafting, and judging more nodes. It may lie below
        zero where a drafter costs nothing and the clock is noisy.
    """

    unit: float
    passes: Mapping[int, float]
    drafts: Mapping[str, Mapping[int, float]]

    def drafting(self, drafter: str, num_draft: int) -> float:
        """Of drafts of this length: measured, or on the line between two lengths that were."""
        known = sorted(self.drafts[drafter].items())
        return float(np.interp(num_draft, [n for n, _ in known], [cost for _, cost in known]))

    def of(self, taken: Rounds, drafter: str, num_draft: int) -> float:
        """All rounds ``taken``: ``sum of T(N) + rounds * (1 - T(1) + drafting)``."""
        each = 1 - self.passes[1] + self.drafting(drafter, num_draft)
        return in_passes(taken, self.passes) + taken.count * each


def in_passes(taken: Rounds, passes: Mapping[int, Any]):
    """What the target's passes of rounds cost together; ``passes``: the cost by width."""
    return sum(count * passes[width] for width, count in taken.by_width.items())


def beyond_the_pass(spent, taken: Rounds, passes: Mapping[int, Any]):
    """The entry of ``Costs.drafts`` for rounds ``taken`` that were run and cost ``spent``."""
    return (spent - in_passes(taken, passes)) / taken.count - (1 - passes[1])
