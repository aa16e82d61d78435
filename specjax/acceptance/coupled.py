"""Gumbel coupling: drafts and target share their noise, and no drafter changes the text."""

from __future__ import annotations

import dataclasses

from ..sampling.noise import Noise, least
from ..types import Draft, Rule, Verdict
from .walk import depth_of, follow, verdict


@dataclasses.dataclass(frozen=True)
class Coupled(Rule):
    """The target says the token with the least ``E_x / p(x)``; descends while a child has it.

    ``E`` are exponential variables by row and absolute position alone, so a token is a function of
    the tokens before it, its law and the row's key. The text of a seed is THE SAME with every
    drafter, tree, width and policy, and in plain decoding under this rule; logits that differ in
    their last bits between passes of different widths can tip a near-tie, as in greedy decoding.

    Drafters that draw are given the same noise, and propose the tokens with the least
    ``E_x / q(x)`` (k siblings: the k least). On a chain the chance that a token is kept lies
    between ``(1 - TV) / (1 + TV)`` and ``1 - TV``, where TV is the total variation between p and q
    and ``1 - TV`` is what ``rejection`` keeps: sameness costs some acceptance.

    Lossless: yes, for every draft.

    Cost: V random numbers at each visited node, and V at each drafted depth.

    References: Daliri, Musco and Suresh, Coupling without Communication and Drafter-Invariant
    Speculative Decoding, arXiv 2408.07978, section 3 (Gumbel sampling).
    """

    name = "coupled"
    lossless = True
    noise = "position"
    _other = "the shared noise and p say {said} here"
    why = {
        "accepted": "the shared noise and p say this very token",
        "rejected": _other,
        "later": _other,
    }

    def __call__(self, params, draft: Draft, target_law, draft_law, key: Noise) -> Verdict:
        def say(node):
            p = target_law(node)
            position = draft.start + 1 + depth_of(draft, node)
            return least(p, key.at(position, p.shape[-1]))

        return verdict(draft, *follow(draft, say))
