"""Leviathan's lenience, an approximate rule: rejection with a test that is easier to pass."""

from __future__ import annotations

import dataclasses

from .rejection import Rejection


@dataclasses.dataclass(frozen=True)
class Lenient(Rejection):
    """Accepts ``x`` with probability ``min(1, p(x) / (scale q(x)))``, otherwise as ``rejection``.

    On a chain a token with ``p < q`` is emitted with probability ``min(q, p / scale)``. So the
    total variation to p is the sum of ``min(q, p / scale) - p`` over such tokens, and no token is
    emitted with a probability above ``p / scale``, given the tokens before it.

    Lossless: only with ``scale=1``, which is ``rejection``, and at temperature 0. Other results
    carry the label ``approximate``.

    Attributes:
      scale: the factor of q in the test, in (0, 1] (the paper's l).

    References: Leviathan et al., arXiv 2211.17192, appendix A.5.

    Raises:
      ValueError: ``scale`` is out of range.
    """

    scale: float = 0.5

    name = "approximate-lenience"
    exact_at_zero = True

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise ValueError(f"Lenient(scale={self.scale}): scale must be in (0, 1]")

    @property
    def lossless(self) -> bool:
        return self.scale == 1

    def compared(self, q):
        return self.scale * q
