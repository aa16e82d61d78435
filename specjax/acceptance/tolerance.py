"""SpecDec's verification, an approximate rule: it accepts tokens near the most probable one."""

from __future__ import annotations

import dataclasses

from .relaxed import Relaxed


@dataclasses.dataclass(frozen=True)
class Tolerance(Relaxed):
    """Accepts one of the ``top_k`` best tokens if its logit is at most ``gap`` below the greatest.

    Both bounds are tested with the target's logits after the token's parent.

    Lossless: no; every result carries the label ``approximate``. With ``top_k=1`` or ``gap=0`` the
    rule is ``greedy`` at temperature 0.

    Attributes:
      top_k: the number of most probable tokens that are admitted, at least 1 (SpecDec's β).
      gap: the greatest distance in nats below the greatest logit, at least 0 (SpecDec's τ). The
        paper uses ``top_k=5`` and ``gap=3.0`` for translation.

    References: Xia et al., Speculative Decoding: Exploiting Speculative Execution for Accelerating
    Seq2seq Generation, arXiv 2203.16487, section 3.2. As in the reference implementation, ``gap``
    is a difference of logits.

    Raises:
      ValueError: ``top_k`` or ``gap`` is out of range.
    """

    top_k: int = 5
    gap: float = 3.0

    name = "approximate-tolerance"

    def __post_init__(self):
        if not self.top_k >= 1 or not self.gap >= 0:
            raise ValueError(
                f"Tolerance(top_k={self.top_k}, gap={self.gap}): top_k (int) must be at least 1, "
                "gap at least 0"
            )

    def passes(self, draft, found):
        return (found.rank < self.top_k) & (found.gap <= self.gap)

    @property
    def strictest(self) -> bool:
        return self.top_k == 1 or self.gap == 0
