"""SpecHub: it judges pairs of siblings, one of which is always the draft's most probable token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_draws
from .walk import at_node, descend, eligible, next_child, verdict


@dataclasses.dataclass(frozen=True)
class Hub(Rule):
    """Judges pairs of siblings that contain the hub ``a = argmax q`` (see ``drawing.draw_hub``).

    A pair is ``(i, a)`` with probability ``q(i)`` and ``(a, i)`` with ``q(a) q(i) / (1 - q(a))``,
    for ``i ≠ a``. The rule accepts each token ``i ≠ a`` from its pairs with total probability at
    most ``p(i)``, and uses pairs ``(i, a)`` before pairs ``(a, i)``. From the pairs in which ``i``
    is not accepted, it accepts the hub with total probability at most ``p(a)``. If neither token
    is accepted, the next token is drawn from the remaining part of ``p``, normalized. Where only
    one sibling may be accepted, the rule judges it as ``rejection`` does.

    Where ``q(a) ≥ 1/2``, a pair accepts more than two siblings drawn from ``q`` with replacement;
    where ``q`` is spread over many tokens, ``rejection`` of distinct siblings accepts more.

    Lossless: yes, for pairs drawn in this way (``draws="hub"``); other drafts are refused. The
    rules ``rejection`` and ``traversal`` can judge such pairs as well, since they know the law of
    the second sibling.

    Cost: p, q and a few operations ``O(V)`` at each visited node; one node is visited per depth.

    References: Sun et al., SpecHub: Provable Acceleration to Multi-Draft Speculative Decoding,
    arXiv 2411.05289, algorithms 1 and 2.
    """

    name = "hub"
    lossless = True
    sibling_sampling = "hub"  # the way in which drafters must draw siblings
    _other = "judged with its sibling, as a pair: {said} follows here"
    why = {
        "accepted": "the test of the drawn pair keeps this token",
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
