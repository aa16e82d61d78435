"""SpecTr's k-SEQ: several independent draws from one law, each accepted a little less often."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_draws
from .walk import at_node, descend, eligible, verdict

HALVINGS = 20  # of the interval [1, k]


@dataclasses.dataclass(frozen=True)
class KSeq(Rule):
    """Accepts the first of ``k`` siblings drawn from ``q`` with ``u < p(x) / (ρ q(x))``.

    ``β(ρ) = Σ min(q, p / ρ)`` is the chance of each, ``1 - (1 - β)^k`` that of any. ``ρ`` in
    ``[1, k]`` is the least for which that is at most ``ρ β(ρ)``; then no token is said too often,
    and if none is accepted one is drawn from ``norm(p - min(q, p / ρ) (1 - (1 - β)^k) / β)``.
    With one child a node, ``k = 1``, this is speculative sampling. The chance of any is at least
    ``1 - (1 - 1/k)^k`` times, so more than 63 % of, that of the best rule for such draws.

    ``ρ`` is found by halving, 20 times, and its upper end is taken, with which the rule is exact
    however wide the interval still is.

    Of equal siblings the children of all come next, one family: ``k`` chains side by side go on
    with all those that begin as the text does, which is SpecTr, be they merged or not.

    Lossless: yes, for siblings drawn ``iid`` from one law. Drafts without laws, ``distinct`` or
    ``mixed`` ones are refused; merged ones are ``mixed`` unless they are of one law.

    Cost: at each visited node p, q and ``20 V`` for ``ρ``; one node a depth. To see which paths
    are equal, ``D N^2``.

    References: Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport,
    arXiv 2310.15141, algorithms 2 and 3.
    """

    name = "kseq"
    lossless = True
    sibling_sampling = "iid"  # drafters are to draw
    why = {
        "accepted": "u ρ q = {u:.3g} × {rho:.3g} × {q:.3g} is below p, {p:.3g}",
        "rejected": "u ρ q = {u:.3g} × {rho:.3g} × {q:.3g} is not below p, {p:.3g}",
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        if not greedy:
            need_draws(self.name, draft, self.sibling_sampling)

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        families = _families(draft, eligible(draft))
        uniform = drawing.uniforms(key, draft.num_nodes)
        tokens = jnp.maximum(draft.tokens, 0)

        def visit(node):
            siblings = at_node(families, node)
            p, q = target_law(node), draft_law(jnp.argmax(siblings, axis=1))
            count = jnp.sum(siblings, axis=1)
            rho = _rho(p, q, jnp.maximum(count, 1))[:, None]
            said, drawn = (jnp.take_along_axis(x, tokens, axis=1) for x in (p, q))
            kept = siblings & (uniform * drawn * rho < said) & (drawn > 0)
            first = jnp.argmax(kept, axis=1)

            each = jnp.minimum(q, p / rho)
            drafted = each * _draws(jnp.sum(each, axis=-1), count)[:, None]
            left = jnp.maximum(p - drafted, 0.0)
            left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, p)
            return first.astype(jnp.int32), jnp.any(kept, axis=1), left

        node, rest = descend(draft, visit)
        return verdict(draft, node, drawing.draw(rest, uniform[:, ROOT]))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """``u``, and ``rho`` of each node's siblings: float32 ``[B, N]`` each."""
        batch, nodes = draft.tokens.shape
        parents = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), (batch, nodes))
        families = _families(draft, eligible(draft))

        def at(node):
            above = parents[:, node]
            count = jnp.sum(at_node(families, above), axis=1)
            q = draft_law(jnp.full((batch,), node))
            return _rho(target_law(above), q, jnp.maximum(count, 1))

        rho = jax.lax.map(at, jnp.arange(nodes)).T
        return {"u": drawing.uniforms(key, nodes), "rho": rho}


def _families(draft: Draft, able: jax.Array) -> jax.Array:
    """bool ``[B, N, N]``: ``[b, n, m]`` is whether the candidate ``m`` stands below ``n``, or below
    another candidate with the same tokens from the root down."""
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), able.shape)
    tokens, real = draft.tokens, able | (jnp.arange(able.shape[1]) == ROOT)
    equal = (tokens[:, :, None] == tokens[:, None, :]) & real[:, :, None] & real[:, None, :]
    roots = jnp.arange(able.shape[1]) == ROOT
    equal &= roots[:, None] == roots

    def up(_, same):  # and so are their parents'
        return equal & _below(_below(same, parent).swapaxes(1, 2), parent).swapaxes(1, 2)

    same = jax.lax.fori_loop(0, trees.max_depth(draft), up, equal)
    return able[:, None, :] & _below(same.swapaxes(1, 2), parent).swapaxes(1, 2)


def _below(x: jax.Array, parent: jax.Array) -> jax.Array:
    """``x[b, parent[b, n], m]``."""
    return jnp.take_along_axis(x, parent[:, :, None], axis=1)


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
