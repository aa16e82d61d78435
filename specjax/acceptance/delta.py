"""The delta rule: it draws from the target's law and keeps drafted tokens that equal the draws."""

from __future__ import annotations

import dataclasses

from ..sampling import drawing
from ..types import Draft, Rule, Verdict
from .walk import at_node, follow, verdict


@dataclasses.dataclass(frozen=True)
class Delta(Rule):
    """Draws ``y ~ p`` once at each visited node; descends if a child has ``y``, else emits ``y``.

    This is recursive rejection with point masses as proposal laws: the rule descends from a node
    with children ``C`` with probability ``sum over C of p``. It draws exactly once at each node; a
    single draw for a whole path, or a second draw after a mismatch, would be biased.

    Lossless: yes, for every draft. If the draft has laws, ``rejection`` accepts more.

    References: the T > 0 verification of EAGLE-2 (arXiv 2406.16858) and of Lookahead decoding
    (arXiv 2402.02057); the point-mass case of Leviathan et al., arXiv 2211.17192.
    """

    name = "delta"
    lossless = True
    _other = "the target drew {said} here"
    why = {"accepted": "the target drew this very token", "rejected": _other, "later": _other}

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        uniform = drawing.uniforms(key, draft.num_nodes)
        say = lambda node: drawing.draw(target_law(node), at_node(uniform, node))  # noqa: E731
        return verdict(draft, *follow(draft, say))
