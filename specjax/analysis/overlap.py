"""What drafting ahead would gain with the drafter on devices of its own: modelled, not measured.

On one device the drafter's passes and the target's share it, and nothing is gained. With devices of
their own both run at once, and a round takes as long as the longer of the two::

    max(verify, (K + 1) ahead_pass)                       a draft was ready
    max(verify, (K + 1) ahead_pass) + K draft_pass        none was (SSD draws one first)

How often a draft was ready is counted by the run itself (``Stats.hidden``); the seconds of the
parts are measured alone. The hand-over of tokens and laws between the devices is left out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..decoding.stats import Stats
from ..drafters.draft_ahead import DraftAhead


@dataclasses.dataclass(frozen=True)
class ModelledOverlap:
    """The modelled time of a run.

    Attributes:
      seconds: of all its rounds.
      seconds_per_token: the same, for each emitted token.
      waits: ``"drafter"`` or ``"target"``: which of the two waits for the other where a draft was
        ready.
      hidden: the share of rounds in which drafting is hidden, in [0, 1].
    """

    seconds: float
    seconds_per_token: float
    waits: str
    hidden: float

    def __str__(self) -> str:
        return (
            f"{1e3 * self.seconds_per_token:.3g} ms a token, modelled for separate devices · "
            f"drafting hidden in {100 * self.hidden:.0f} % of the rounds · the {self.waits} waits"
        )


def modelled_overlap(
    drafter: DraftAhead, stats: Stats, *, verify: float, draft_pass: float, ahead_pass: float
) -> ModelledOverlap:
    """Returns the modelled time of a run of one row, with the drafter on devices of its own.

    Args:
      drafter: a ``PEARL`` or ``SSD``.
      stats: the counters of a run with this drafter on any devices.
      verify: seconds of a pass of the target over K + 1 nodes, its draws included.
      draft_pass: seconds of a pass of the draft model over one token.
      ahead_pass: seconds of a pass of the draft model over one token of each expected outcome;
        ``PEARL`` expects one, so that it is ``draft_pass``.

    Raises:
      ValueError: a time is not above 0, or nothing was emitted.
    """
    for name, value in (
        ("verify", verify),
        ("draft_pass", draft_pass),
        ("ahead_pass", ahead_pass),
    ):
        if not value > 0:
            raise ValueError(f"{name}={value}: seconds of a pass are above 0; measure it first")
    rounds, hidden, emitted = (int(np.sum(x)) for x in (stats.rounds, stats.hidden, stats.emitted))
    if not emitted:
        raise ValueError("stats: nothing was emitted; give the statistics of a run")
    ahead = (drafter.num_draft + 1) * ahead_pass
    late = (rounds - hidden) * drafter.num_draft * draft_pass
    seconds = rounds * max(verify, ahead) + late
    return ModelledOverlap(
        seconds=seconds,
        seconds_per_token=seconds / emitted,
        waits="target" if ahead > verify else "drafter",
        hidden=hidden / max(1, rounds),
    )
