"""Block verification: the rule judges a chain as a whole instead of token by token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_chain
from .walk import eligible, verdict


@dataclasses.dataclass(frozen=True)
class BlockVerification(Rule):
    """Accepts the longest prefix of a chain that passes its test.

    The expected number of accepted tokens is never less than with the test of one token after the
    other (``rejection``). With ``P_0 = 1`` and ``P_i = min(1, P_{i-1} p(d_i) / q(d_i))``, the
    prefix of ``i < γ`` tokens passes its test with probability ``h_i = S_i / (S_i + 1 - P_i)``,
    where ``S_i = Σ_x (P_i p(x | d_≤i) - q(x | d_≤i))+``, and the whole chain with ``h_γ = P_γ``.
    The token after an accepted prefix is drawn from ``norm((P_i p - q)+)``, and after the whole
    chain from ``p``.

    Lossless: yes, for chains drawn from the laws that the draft states.

    References: Sun et al., Block Verification Accelerates Speculative Decoding, arXiv 2403.10444,
    algorithm 2.
    """

    name = "block"
    lossless = True
    _no = "neither the chain up to this token nor any longer one passed its test"
    why = {
        "accepted": "the chain up to this token, or a longer one, passed its test",
        "rejected": _no,
        "beyond": _no,
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        need_chain(self.name, draft)

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        batch, nodes = draft.tokens.shape
        rows = jnp.arange(batch)
        uniform = drawing.uniforms(key, nodes)
        # a chain ends before its first node that is no candidate
        size = jnp.sum(jnp.cumprod(eligible(draft)[:, 1:].astype(jnp.int32), axis=1), axis=1)
        node = lambda i: jnp.full((batch,), i, jnp.int32)  # noqa: E731

        joint = jnp.ones((batch,))  # P_i
        count = jnp.zeros((batch,), jnp.int32)
        p = q = rest = target_law(node(ROOT))
        for i in range(nodes):
            before_p, before_q = p, q
            if i > 0:
                p = target_law(node(i))
                x = draft.tokens[:, i]
                ahead, drawn = joint * before_p[rows, x], before_q[rows, x]
                ratio = jnp.where(drawn > 0, ahead / jnp.where(drawn > 0, drawn, 1.0), 0.0)
                joint = jnp.minimum(1.0, ratio)
            if i + 1 < nodes:
                q = draft_law(node(i + 1))
                left = jnp.maximum(joint[:, None] * p - q, 0.0)
                mass = jnp.sum(left, axis=-1)
                room = mass + (1.0 - joint)
                inner = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
                # where no token has any probability the text can only end: all of p is beside q
                inner = jnp.where(jnp.max(p, axis=-1) > 0, inner, joint)
            else:
                left, inner = p, joint
            last = size == i
            here = jnp.where(last[:, None], p, left)
            here = jnp.where(jnp.sum(here, axis=-1, keepdims=True) > 0, here, p)
            passes = (i == ROOT) | (uniform[:, i] < jnp.where(last, joint, inner))
            taken = (i <= size) & passes
            count = jnp.where(taken, i, count)
            rest = here if i == 0 else jnp.where(taken[:, None], here, rest)
        # the root needs no test, so its uniform is free for the draw
        return verdict(draft, count, drawing.draw(rest, uniform[:, ROOT]))
