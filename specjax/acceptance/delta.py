"""The delta rule: the draft is a guess without a law; sample from the target, keep what agrees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .walk import at_node, eligible, next_child, verdict


@dataclasses.dataclass(frozen=True)
class Delta(Rule):
    """Draws ``y ~ p`` once at each visited node; descends if ``y`` is a child, else emits it.

    This is recursive rejection with point-mass proposals: a node with children ``C`` goes on with
    probability ``sum over C of p``. Only one draw a node: drawing once a path, or afresh after a
    mismatch, is biased.

    Lossless: yes, for every draft, also one that was sampled (where ``rejection`` accepts more).

    References: the T > 0 verification of EAGLE-2 (arXiv 2406.16858) and of Lookahead decoding
    (arXiv 2402.02057); the point-mass case of Leviathan et al., arXiv 2211.17192.
    """

    name = "delta"
    lossless = True
    _other = "the target drew {said} here"
    why = {"accepted": "the target drew this very token", "rejected": _other, "later": _other}

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        uniform = drawing.uniforms(key, draft.num_nodes)
        batch = draft.tokens.shape[0]

        def visit(state):
            node, token, going = state
            said = drawing.draw(target_law(node), at_node(uniform, node))
            token = jnp.where(going, said, token)
            child, found = next_child(draft, node, node, able & (draft.tokens == said[:, None]))
            going &= found
            return jnp.where(going, child, node), token, going

        start = jnp.full((batch,), ROOT, jnp.int32)
        state = (start, jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool))
        node, token, _ = jax.lax.while_loop(lambda s: jnp.any(s[2]), visit, state)
        return verdict(draft, node, token)
