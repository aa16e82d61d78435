"""The base class of drafters that draft chains, want no features and keep nothing."""

from __future__ import annotations

import dataclasses

from ..types import Drafter


@dataclasses.dataclass(frozen=True)
class ChainDrafter(Drafter):
    """A drafter of chains of ``num_draft`` tokens, with the defaults of ``Drafter``.

    A subclass implements ``draft_step``.

    Raises:
      ValueError: ``num_draft`` is negative.
    """

    num_draft: int = 4

    name = "chain"

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft={self.num_draft} must be at least 0")
