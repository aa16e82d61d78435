"""What most drafters share: they want no features, keep nothing, learn nothing; and what those do
that hold another one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChainDrafter:
    """Defaults of the ``types.Drafter`` protocol for a drafter of chains without state."""

    num_draft: int = 4

    name = "chain"
    features = ()

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft={self.num_draft} must be at least 0")

    @property
    def depth(self) -> int:
        """Depth of the deepest node that is ever proposed."""
        return self.num_draft

    def init(self, params, batch, capacity, inputs=None):
        return ()

    def readout(self, draft, scores):
        return None

    def observe(self, params, state, segment):
        return state

    def settle(self, params, state, context):
        return state


class Around:
    """What a drafter around another one, ``inner``, says of itself as that does."""

    @property
    def features(self) -> tuple[int, ...]:
        return self.inner.features

    @property
    def reads_last(self) -> bool:
        return getattr(self.inner, "reads_last", False)

    @property
    def vocab_size(self) -> int | None:
        return getattr(self.inner, "vocab_size", None)
