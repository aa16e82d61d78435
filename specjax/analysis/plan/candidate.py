"""A candidate of ``plan``: a drafter, a number of drafts and a batch size, with their rates."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A drafter, a number of drafts and a batch size, with predicted rates.

    Rates are emitted tokens per second, summed over all rows.

    Attributes:
      drafter: name of the drafter; ``plain`` is plain decoding.
      num_draft: number of tokens drafted in a round; 0 for plain decoding, and for drafters whose
        other settings determine the number.
      batch: number of rows.
      tau: acceptance length: tokens that a row emits per round.
      acceptance: acceptance rate, the share of drafted tokens that are accepted, in [0, 1]; NaN
        where none are drafted.
      by_position: acceptance rate for each position of a draft, given that all positions before
        were accepted.
      rate: rate of whole requests, including the time to read the prompts.
      rounds_rate: rate of the rounds alone.
      ratio: ``rate`` divided by the rate of plain decoding at the same batch size.
      interval: limits of about 95 % of the ratios for other prompts of this kind (bootstrap); None
        with only one group of prompts.
      predicted: whether the rates are predicted from costs; False: they are measured.
      measured: the measured rate of whole requests; None where ``verify`` did not measure it.
      measured_rounds: the measured rate of the rounds alone, or None.
      measured_ratio: the measured ratio, or None.
    """

    drafter: str
    num_draft: int
    batch: int
    tau: float
    acceptance: float
    by_position: list[float]
    rate: float
    rounds_rate: float
    ratio: float
    interval: tuple[float, float] | None
    predicted: bool = True
    measured: float | None = None
    measured_rounds: float | None = None
    measured_ratio: float | None = None

    def __str__(self) -> str:
        return spell(self.drafter, self.num_draft)


def spell(name: str, length: int) -> str:
    """Returns the displayed name of a drafter with its number of drafts (0: none is shown)."""
    return f"{name}, {length} a round" if length else name
