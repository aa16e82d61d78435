"""Gumbel coupling: drafter and target share their noise, so all drafters give the same text."""

from __future__ import annotations

import dataclasses

from ..sampling.noise import Noise, least
from ..types import Draft, Rule, Verdict
from .walk import depth_of, follow, verdict


@dataclasses.dataclass(frozen=True)
class Coupled(Rule):
    """At each node takes the token x with the least ``E_x / p(x)``; descends if a child has it.

    The exponential variables ``E`` depend only on the row's key and the absolute position, so a
    token is a function of the tokens before it, its law and the row's key. The text of a seed is
    THE SAME with every drafter, tree, width and policy, and in plain decoding under this rule.
    Logits that differ in their last bits between passes of different widths can change which of
    two nearly tied tokens is taken, as in greedy decoding.

    Drafters that draw receive the same noise, and propose the token with the least ``E_x / q(x)``;
    k siblings are the tokens with the k least values. On a chain the probability that a token is
    kept lies between ``(1 - TV) / (1 + TV)`` and ``1 - TV``, where TV is the total variation
    between p and q; ``rejection`` keeps a token with probability ``1 - TV``.

    Lossless: yes, for every draft.

    Cost: V random numbers at each visited node, and V random numbers at each drafted depth.

    References: Daliri, Musco and Suresh, Coupling without Communication and Drafter-Invariant
    Speculative Decoding, arXiv 2408.07978, section 3 (Gumbel sampling).
    """

    name = "coupled"
    lossless = True
    noise = "position"
    _other = "the shared noise and p select {said} here"
    why = {
        "accepted": "the shared noise and p select this very token",
        "rejected": _other,
        "later": _other,
    }

    def __call__(self, params, draft: Draft, target_law, draft_law, key: Noise) -> Verdict:
        def say(node):
            p = target_law(node)
            position = draft.start + 1 + depth_of(draft, node)
            return least(p, key.at(position, p.shape[-1]))

        return verdict(draft, *follow(draft, say))
