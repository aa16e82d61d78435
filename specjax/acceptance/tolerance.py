"""SpecDec's verification: a token among the target's best, near the best. Approximate."""

from __future__ import annotations

import dataclasses

from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class Tolerance(Relaxed):
    """Accepts one of the target's ``top_k`` best tokens, its logit at most ``gap`` below the best.

    Lossless: no; every result says ``approximate``. With ``top_k=1`` or ``gap=0`` it is ``greedy``
    at temperature 0. Each kept token is within both bounds by the target's own scores.

    Attributes:
      top_k: at least 1 (SpecDec's β).
      gap: at least 0, nats (SpecDec's τ). SpecDec ran translation with 5 and 3.0.

    References: Xia et al., Speculative Decoding: Exploiting Speculative Execution for Accelerating
    Seq2seq Generation, arXiv 2203.16487, section 3.2; the difference is of logits as in their code.

    Raises:
      ValueError: a setting out of range.
    """

    top_k: int = 5
    gap: float = 3.0

    name = "approximate-tolerance"

    def __post_init__(self):
        if not self.top_k >= 1 or not self.gap >= 0:
            raise ValueError(
                f"Tolerance(top_k={self.top_k}, gap={self.gap}): top_k must be at least 1, gap at "
                "least 0"
            )

    def passes(self, draft, found):
        return (found.rank < self.top_k) & (found.gap <= self.gap)

    @property
    def strictest(self) -> bool:
        return self.top_k == 1 or self.gap == 0
