"""A part of a decoder over a small cache as a target of its own, for which another model drafts.

Its cache is taken from that of the whole decoder (``SubNetwork.own_cache``). What it writes there
is a text of its own, which the whole never sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from ..types import Draft, Scores, Target, Verdict
from .config import DecoderConfig


class RunsInPart(Protocol):
    """A decoder that can leave sublayers out: ``CausalLM``."""

    @property
    def num_layers(self) -> int: ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None: ...

    def init(self, params, batch: int, capacity: int, inputs=None): ...

    def recent(self, cache, length, chosen=None): ...

    def commit(self, cache, entries, start, verdict: Verdict): ...

    def run(
        self,
        params,
        cache,
        draft: Draft,
        *,
        features: tuple[int, ...],
        since: int,
        entries,
        logits: bool,
        without: tuple[frozenset[str], ...] | None = None,
        gates=None,
    ) -> Scores: ...


@dataclasses.dataclass(frozen=True)
class PartModel(Target):
    """A part over a small cache as a target of its own; ``params`` are those of the whole.

    Attributes:
      small: the whole with a small cache.
      without: for each layer the sublayers that are left out.
    """

    small: RunsInPart
    without: tuple[frozenset[str], ...]

    @property
    def vocab_size(self) -> int:
        return self.small.vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.small.max_positions

    def init(self, params, batch, capacity, inputs=None):
        return self.small.init(params, batch, capacity, inputs)

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        given: dict[str, Any] = dict(features=features, since=since, entries=entries, logits=logits)
        return self.small.run(params, cache, draft, **given, without=self.without)

    def commit(self, cache, entries, start, verdict: Verdict):
        return self.small.commit(cache, entries, start, verdict)
