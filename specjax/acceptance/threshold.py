"""BiLD's rollback: a draft is kept up to the first token that surprises the target. Approximate."""

from __future__ import annotations

import dataclasses

from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class Threshold(Relaxed):
    """Accepts a token with ``-log p(x)`` of at most ``loss``; rolls back to the first one above it.

    That token is replaced by the target's most probable one, and what follows it is dropped. A
    token above ``loss`` that is the most probable one is kept. p is taken at temperature 1.

    Lossless: no; every result says ``approximate``. With ``loss=0`` it is ``greedy`` at
    temperature 0. Fallback, the other half of BiLD (the small model stops where it is unsure), is
    a matter of the drafter's length; nor is the target left in control for a pass after a rollback,
    as in their code.

    Attributes:
      loss: at least 0, nats (BiLD's rollback threshold, 2 to 5 in the paper).

    References: Kim et al., Speculative Decoding with Big Little Decoder, arXiv 2302.07863,
    section 3.4 (rollback policy).

    Raises:
      ValueError: a setting out of range.
    """

    loss: float = 3.0

    name = "approximate-threshold"

    def __post_init__(self):
        if not self.loss >= 0:
            raise ValueError(f"Threshold(loss={self.loss}): loss must be at least 0")

    def passes(self, draft, found):
        return found.loss <= self.loss

    @property
    def strictest(self) -> bool:
        return self.loss == 0
