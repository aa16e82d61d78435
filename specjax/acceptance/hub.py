"""SpecHub: two siblings drawn together, one of them always the draft's most probable token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_draws
from .walk import at_node, descend, eligible, next_child, verdict


@dataclasses.dataclass(frozen=True)
class Hub(Rule):
    """Pairs of siblings that hold the hub ``a = argmax q``, drawn by ``drawing.draw_hub``.

    A pair is ``(i, a)`` with probability ``q(i)`` and ``(a, i)`` with ``q(a) q(i) / (1 - q(a))``,
    ``i ≠ a``. Each other token ``i`` takes of its pairs what ``p(i)`` needs, of the first kind
    before the second; of what they leave the hub takes up to ``p(a)``; and what is then left of
    ``p`` is drawn from. Where only one sibling may be accepted it is judged by ``rejection``.

    More than two siblings from ``q`` with replacement accept where ``q(a) ≥ 1/2``; where the draft
    spreads its mass, ``rejection`` of distinct siblings accepts more.

    Lossless: yes, for pairs drawn so (``draws="hub"``); other drafts are refused. (Such pairs may
    also be judged by ``rejection`` or ``traversal``, which know the second one's law.)

    Cost: p, q and a few ``O(V)`` at each visited node; one node a depth.

    References: Sun et al., SpecHub: Provable Acceleration to Multi-Draft Speculative Decoding,
    arXiv 2411.05289, algorithms 1 and 2.
    """

    name = "hub"
    lossless = True
    sibling_sampling = "hub"  # drafters are to draw
    _other = "judged with its sibling, as a pair: {said} follows here"
    why = {
        "accepted": "of the pair that was drawn, p keeps this one",
        "rejected": _other,
        "later": _other,
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        if greedy:
            return
        need_draws(self.name, draft, self.sibling_sampling)
        above = draft.topology or ()
        most = max((above.count(node) for node in above if node >= 0), default=0)
        if most > 2:
            raise ValueError(
                f"rule='hub' judges pairs of siblings; this tree has a node with {most} children"
            )

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        uniform = drawing.uniforms(key, draft.num_nodes)
        rows = jnp.arange(draft.tokens.shape[0])

        def visit(node):
            one, some = next_child(draft, node, node, able)
            two, pair = next_child(draft, node, one, able)
            pair &= some
            p, q = target_law(node), jnp.where(some[:, None], draft_law(one), 0.0)
            hub = draft_law.hub(one)
            others = jnp.arange(p.shape[-1]) != hub[:, None]
            beside = jnp.sum(jnp.where(others, q, 0.0), axis=-1)
            scale = q[rows, hub] / jnp.where(beside > 0, beside, 1.0)
            # the mass of drafts in which x comes first, and of those in which it follows the hub
            first = jnp.where(pair[:, None] & ~others, 0.0, q)
            second = jnp.where(pair[:, None] & others, q * scale[:, None], 0.0)
            of_first = jnp.minimum(p, first)
            of_second = jnp.minimum(p - of_first, second)
            spare = jnp.sum(first - of_first + second - of_second, axis=-1)

            behind = pair & (at_node(draft.tokens, one) == hub)
            other = jnp.where(behind, two, one)
            x = jnp.maximum(at_node(draft.tokens, other), 0)
            offered = jnp.where(behind, second[rows, x], first[rows, x])
            wanted = p[rows, x] - jnp.where(behind, of_first[rows, x], 0.0)
            kept = some & (at_node(uniform, other) * offered < wanted) & (offered > 0)
            at_hub = jnp.where(behind, one, two)
            kept_hub = pair & ~kept & (at_node(uniform, at_hub) * spare < p[rows, hub])

            left = p - of_first - of_second
            taken = jnp.where(pair[:, None] & ~others, spare[:, None], 0.0)
            left = jnp.maximum(left - taken, 0.0)
            left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p)
            return jnp.where(kept, other, at_hub), kept | kept_hub, left

        node, rest = descend(draft, visit)
        return verdict(draft, node, drawing.draw(rest, uniform[:, ROOT]))
