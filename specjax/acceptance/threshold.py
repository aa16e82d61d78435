"""BiLD's rollback, an approximate rule: it keeps a draft up to the first improbable token."""

from __future__ import annotations

import dataclasses

from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class Threshold(Relaxed):
    """Accepts tokens with ``-log p(x)`` of at most ``loss``, up to the first token above it.

    The first token above ``loss`` is replaced by the target's most probable token, and the tokens
    after it are dropped. A token above ``loss`` that is the target's most probable one is kept. p
    is taken at temperature 1.

    Lossless: no; every result carries the label ``approximate``. With ``loss=0`` the rule is
    ``greedy`` at temperature 0. This rule is one half of BiLD, the rollback. The other half, the
    fallback (the small model stops where it is unsure), would be a setting of the drafter's length.
    The reference implementation also lets the target continue for one pass after a rollback; this
    rule does not.

    Attributes:
      loss: the threshold in nats, at least 0 (BiLD's rollback threshold, 2 to 5 in the paper).

    References: Kim et al., Speculative Decoding with Big Little Decoder, arXiv 2302.07863,
    section 3.4 (rollback policy).

    Raises:
      ValueError: ``loss`` is out of range.
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
