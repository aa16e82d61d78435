"""What most drafters share: they draft chains, want no features and keep nothing."""

from __future__ import annotations

import dataclasses

from ..types import Drafter


@dataclasses.dataclass(frozen=True)
class ChainDrafter(Drafter):
    """A drafter of chains of ``num_draft`` tokens, with the defaults of ``Drafter``."""

    num_draft: int = 4

    name = "chain"

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft={self.num_draft} must be at least 0")


class Around:
    """What a drafter around another one, ``inner``, says of itself as that does."""

    @property
    def features(self) -> tuple[int, ...]:
        return self.inner.features

    @property
    def reads_last(self) -> bool:
        return self.inner.reads_last

    @property
    def vocab_size(self) -> int | None:
        return self.inner.vocab_size
