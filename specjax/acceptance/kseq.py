"""SpecTr's k-SEQ: several independent draws from one law, each accepted a little less often."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import sampling as law
from .. import tree
from ..types import ROOT, Draft, Verdict
from .lawful import need_draws
from .walk import at_node, descend, eligible, has_children, next_child, verdict

HALVINGS = 20  # of the interval [1, k]


@dataclasses.dataclass(frozen=True)
class KSeq:
    """Of ``k`` siblings drawn from ``q`` the first ``x`` with ``u < p(x) / (ρ q(x))`` is accepted.

    ``β(ρ) = Σ min(q, p / ρ)`` is the chance of each, ``1 - (1 - β)^k`` that of any. ``ρ`` in
    ``[1, k]`` is the least for which that is at most ``ρ β(ρ)``; then no token is said too often,
    and if none is accepted one is drawn from ``norm(p - min(q, p / ρ) (1 - (1 - β)^k) / β)``.
    With one child a node, ``k = 1``, this is speculative sampling. The chance of any is at least
    ``1 - (1 - 1/k)^k`` times, so more than 63 % of, that of the best rule for such draws.

    ``ρ`` is found by halving, 20 times, and its upper end is taken, with which the rule is exact
    however wide the interval still is.

    Of several equal siblings that one's children come next which has any: ``tree.merge`` gives
    those of all to the first. So ``k`` chains of one drafter, merged with ``one_law=True``, go on
    with all the chains that begin as the text does, which is SpecTr.

    Lossless: yes, for siblings drawn ``iid`` from one law. Drafts without laws, ``distinct`` or
    ``mixed`` ones are refused; merged ones are ``mixed`` unless they are of one law.

    Cost: at each visited node p, q and ``20 V`` for ``ρ``; one node a depth.

    References: Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport,
    arXiv 2310.15141, algorithms 2 and 3.
    """

    name = "kseq"
    lossless = True
    how = "iid"  # drafters are to draw
    why = {
        "accepted": "u ρ q = {u:.3g} × {rho:.3g} × {q:.3g} is below p, {p:.3g}",
        "rejected": "u ρ q = {u:.3g} × {rho:.3g} × {q:.3g} is not below p, {p:.3g}",
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        if not greedy:
            need_draws(self.name, draft, self.how)

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        bearing = has_children(draft, able)
        uniform = law.uniforms(key, draft.num_nodes)
        tokens = jnp.maximum(draft.tokens, 0)

        def visit(node):
            child, _ = next_child(draft, node, node, able)
            p, q = target_law(node), draft_law(child)
            siblings = able & (tree.parents(draft) == node[:, None])
            count = jnp.sum(siblings, axis=1)
            rho = _rho(p, q, jnp.maximum(count, 1))[:, None]
            said, drawn = (jnp.take_along_axis(x, tokens, axis=1) for x in (p, q))
            kept = siblings & (uniform * drawn * rho < said) & (drawn > 0)
            first = jnp.argmax(kept, axis=1)
            equal = siblings & (tokens == at_node(tokens, first)[:, None]) & bearing
            first = jnp.where(jnp.any(equal, axis=1), jnp.argmax(equal, axis=1), first)

            each = jnp.minimum(q, p / rho)
            drafted = each * _draws(jnp.sum(each, axis=-1), count)[:, None]
            left = jnp.maximum(p - drafted, 0.0)
            left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p)
            return first.astype(jnp.int32), jnp.any(kept, axis=1), left

        node, rest = descend(draft, visit)
        return verdict(draft, node, law.draw(rest, uniform[:, ROOT]))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """``u``, and ``rho`` of each node's siblings: float32 ``[B, N]`` each."""
        batch, nodes = draft.tokens.shape
        parents, able = jnp.broadcast_to(tree.parents(draft), (batch, nodes)), eligible(draft)

        def at(node):
            above = jnp.maximum(parents[:, node], ROOT)
            count = jnp.sum(able & (parents == above[:, None]), axis=1)
            q = draft_law(jnp.full((batch,), node))
            return _rho(target_law(above), q, jnp.maximum(count, 1))

        rho = jax.lax.map(at, jnp.arange(nodes)).T
        return {"u": law.uniforms(key, nodes), "rho": rho}


def _draws(beta: jax.Array, count: jax.Array) -> jax.Array:
    """``(1 - (1 - β)^k) / β``, the expected number of siblings that are looked at: ``[B]``."""
    some = jnp.where(beta > 0, jnp.minimum(beta, 1.0), 1.0)
    return jnp.where(beta > 0, -jnp.expm1(count * jnp.log1p(-some)) / some, count)


def _rho(p: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
    """float32 ``[B]``: a lawful ρ, at most ``(k - 1) / 2^20`` above the least; ``count`` is k."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        beta = jnp.sum(jnp.minimum(q, p / middle[:, None]), axis=-1)
        lawful = _draws(beta, count) <= middle
        return jnp.where(lawful, low, middle), jnp.where(lawful, middle, high)

    bounds = jnp.ones(count.shape), count.astype(jnp.float32)
    return jax.lax.fori_loop(0, HALVINGS, halve, bounds)[1]
