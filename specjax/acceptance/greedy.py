"""Greedy acceptance: the rule keeps drafted tokens that are the target's argmax."""

from __future__ import annotations

import dataclasses

from ..sampling import drawing
from ..types import Draft, Rule, Verdict
from .walk import match


@dataclasses.dataclass(frozen=True)
class Greedy(Rule):
    """Accepts a node if its token is the target's most probable one; then emits the next argmax.

    Lossless: yes for greedy decoding (temperature 0), for every draft; token for token in
    float32. In lower precision, two nearly tied tokens may be ordered otherwise than in a pass over
    one token.

    References: Stern et al., Blockwise Parallel Decoding, arXiv 1811.03115; Leviathan et al.,
    arXiv 2211.17192, at temperature 0.
    """

    name = "greedy"
    lossless = True
    _other = "the target's most probable token here is {said}"
    why = {
        "accepted": "it is the target's most probable token",
        "rejected": _other,
        "later": _other,
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        if not greedy:
            raise ValueError(
                "rule='greedy' with a temperature above 0 (or an array of temperatures) would not "
                "sample the target's law; use rule='auto', or temperature=0"
            )

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        return match(draft, drawing.argmax(target_law.adjusted()))
