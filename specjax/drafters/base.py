"""The base classes of drafters of chains, and of drafters that are made of several others."""

from __future__ import annotations

import abc
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


class CombinedDrafter(ChainDrafter):
    """A drafter made of others, ``parts``, whose wishes are its own.

    A flag that is not here has the default of ``Drafter``, unless a subclass overrides it.
    """

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that it is made of."""

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(i for part in self.parts for i in part.features)

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary that all parts share; None: any.

        Raises:
          ValueError: two parts have vocabularies of different sizes.
        """
        sized = [part for part in self.parts if part.vocab_size is not None]
        for part in sized[1:]:
            if part.vocab_size != sized[0].vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: the vocabulary of its part {sized[0].name!r} has "
                    f"{sized[0].vocab_size} tokens and that of its part {part.name!r} "
                    f"{part.vocab_size}; all parts draft for one target, so give parts with the "
                    "vocabulary of the target"
                )
        return sized[0].vocab_size if sized else None

    @property
    def num_passengers(self) -> int:
        return sum(part.num_passengers for part in self.parts)

    @property
    def reads_nodes(self) -> bool:
        return any(part.reads_nodes for part in self.parts)

    @property
    def can_rewind(self) -> bool:
        return all(part.can_rewind for part in self.parts)
