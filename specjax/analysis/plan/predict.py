"""The predictions of the planner: the cost of a draft length on a known text.

A drafter that is asked for fewer tokens proposes the first tokens of its longer proposal. So if the
numbers of proposed and of accepted tokens are known for every position of a text, the rounds of
every shorter length follow one after the other: the positions that become roots, and the width of
each pass. A mean acceptance rate would not suffice, because the beginning of a round depends on the
draft length, and because stretches of text differ in how predictable they are.

The result is exact at temperature 0 for a drafter that is a function of the text before the root.
Above temperature 0, the acceptance at a root is one draw and the text after the root is another.
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
      proposed: for each row, int ``[n]``: the number of tokens that a round just before generated
        token ``i`` proposes, for each of the ``n`` generated tokens.
      accepted: for each row, int ``[n]``: the number of these tokens that are accepted.
    """

    proposed: list[np.ndarray]
    accepted: list[np.ndarray]

    @property
    def tokens(self) -> int:
        """The number of generated tokens in all rows."""
        return sum(map(len, self.proposed))

    def acceptance(self, num_draft: int) -> list[float]:
        """Returns the acceptance rate at each position of a draft, over all roots.

        Args:
          num_draft: the number of positions.

        Returns:
          for each position the share of proposed tokens that are accepted, given that all tokens
          before were accepted; NaN where nothing was proposed.
        """
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
      by_width: the number of rounds for each number of nodes of their pass.
      per_row: the number of rounds in which a row was still decoding, summed over the rows.
      drafted: the number of drafted tokens, as in ``Stats`` except at the end of the budget.
      accepted: the number of accepted tokens, as in ``Stats`` except at the end of the budget.
    """

    by_width: Mapping[int, int]
    per_row: int
    drafted: int
    accepted: int

    @property
    def count(self) -> int:
        """The number of rounds of the loop, which is that of the slowest row."""
        return sum(self.by_width.values())

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(
            Counter(self.by_width) + Counter(other.by_width),
            self.per_row + other.per_row,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


def rounds(record: AcceptanceRecord, num_draft: int) -> Rounds:
    """Returns the rounds of a batch at one draft length.

    All rows take part in each round; the pass of a round is the narrowest compiled pass that holds
    the widest draft of a row that is still decoding.

    Args:
      record: the proposed and accepted tokens at every position of the batch's texts.
      num_draft: the number of drafts; 0 is plain decoding.
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
      drafts: ``{drafter: {num_draft: cost}}``: cost of a round without its pass and without the
        overhead of a plain round: that of drafting, and of accepting among more nodes. It may be
        negative where a drafter costs nothing and the clock is noisy.
    """

    unit: float
    passes: Mapping[int, float]
    drafts: Mapping[str, Mapping[int, float]]

    def drafting(self, drafter: str, num_draft: int) -> float:
        """Returns the cost of drafting ``num_draft`` tokens, measured or interpolated."""
        known = sorted(self.drafts[drafter].items())
        return float(np.interp(num_draft, [n for n, _ in known], [cost for _, cost in known]))

    def of(self, taken: Rounds, drafter: str, num_draft: int) -> float:
        """Returns the cost of rounds: ``sum of T(N) + rounds * (1 - T(1) + drafting)``.

        Args:
          taken: the rounds.
          drafter: the name of the drafter.
          num_draft: the number of drafts.
        """
        each = 1 - self.passes[1] + self.drafting(drafter, num_draft)
        return in_passes(taken, self.passes) + taken.count * each


def in_passes(taken: Rounds, passes: Mapping[int, Any]):
    """Returns the cost of the target's passes in all rounds.

    Args:
      taken: the rounds.
      passes: the cost of a pass by the number of its nodes.
    """
    return sum(count * passes[width] for width, count in taken.by_width.items())


def beyond_the_pass(spent, taken: Rounds, passes: Mapping[int, Any]):
    """Returns the entry of ``Costs.drafts`` for rounds with a measured cost.

    Args:
      spent: the measured cost of the rounds.
      taken: the rounds.
      passes: the cost of a pass by the number of its nodes.
    """
    return (spent - in_passes(taken, passes)) / taken.count - (1 - passes[1])
