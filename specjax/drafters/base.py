"""The base class of drafters that draft chains, want no features and keep nothing."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from ..types import Drafter, Target


@dataclasses.dataclass(frozen=True)
class ChainDrafter(Drafter):
    """A drafter of chains of ``num_draft`` tokens, with the defaults of ``Drafter``.

    A subclass implements ``draft_step``.

    Attributes:
      takes_number: whether the drafter is made with a number of drafts (``Drafting(num=...)``);
        False where that follows from other settings.

    Raises:
      ValueError: ``num_draft`` is negative.
    """

    num_draft: int = 4

    name = "chain"
    takes_number: ClassVar[bool] = True

    @classmethod
    def for_target(cls, target: Target, **settings) -> Self:
        """The drafter with these settings for a target. Default: the same for every target."""
        return cls(**settings)

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft={self.num_draft} must be at least 0")
