"""SpecTr's k-SEQ: it judges several siblings that were drawn independently from one law."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_draws
from .walk import at_node, descend, eligible, verdict

HALVINGS = 20  # steps of the bisection of the interval [1, k]


@dataclasses.dataclass(frozen=True)
class KSeq(Rule):
    """Accepts the first of ``k`` siblings drawn from ``q`` with ``u < p(x) / (ρ q(x))``.

    ``β(ρ) = Σ min(q, p / ρ)`` is the probability that one sibling passes its test, and
    ``1 - (1 - β)^k`` the probability that any of them passes. ``ρ`` is the least number in
    ``[1, k]`` for which the latter is at most ``ρ β(ρ)``; then no token is emitted with more than
    its probability. If no sibling is accepted, the next token is drawn from
    ``norm(p - min(q, p / ρ) (1 - (1 - β)^k) / β)``. With one child for each node, ``k = 1``, this
    is speculative sampling. The probability that any sibling is accepted is at least
    ``1 - (1 - 1/k)^k`` times, so more than 63 % of, that of the best rule for such draws.

    ``ρ`` is found by bisection in 20 steps. The upper end of the last interval is used: the rule is
    exact with it, however wide the interval still is.

    The children of equal siblings are judged together, as one family. So ``k`` chains side by side
    continue with all chains that agree with the text so far, which is SpecTr, whether the chains
    were merged or not.

    Lossless: yes, for siblings drawn ``iid`` from one law. Drafts without laws and drafts drawn
    ``distinct`` or ``mixed`` are refused; a merged draft is ``mixed`` unless all its siblings have
    one law.

    Cost: p, q and ``20 V`` operations for ``ρ`` at each visited node; one node is visited per
    depth. The search for equal paths takes ``D N^2`` operations.

    References: Sun et al., SpecTr: Fast Speculative Decoding via Optimal Transport,
    arXiv 2310.15141, algorithms 2 and 3.
    """

    name = "kseq"
    lossless = True
    sibling_sampling = "iid"  # the way in which drafters must draw siblings
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
        """Returns ``u`` of each node and ``rho`` of its siblings: float32 ``[B, N]`` each."""
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
    """Returns bool ``[B, N, N]``: entry ``[b, n, m]`` tells whether candidate ``m`` is a child of
    ``n``, or of another candidate with the same tokens from the root down."""
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), able.shape)
    tokens, real = draft.tokens, able | (jnp.arange(able.shape[1]) == ROOT)
    equal = (tokens[:, :, None] == tokens[:, None, :]) & real[:, :, None] & real[:, None, :]
    roots = jnp.arange(able.shape[1]) == ROOT
    equal &= roots[:, None] == roots

    def up(_, same):  # two paths are equal only if the paths of their parents are
        return equal & _below(_below(same, parent).swapaxes(1, 2), parent).swapaxes(1, 2)

    same = jax.lax.fori_loop(0, trees.max_depth(draft), up, equal)
    return able[:, None, :] & _below(same.swapaxes(1, 2), parent).swapaxes(1, 2)


def _below(x: jax.Array, parent: jax.Array) -> jax.Array:
    """Returns ``x[b, parent[b, n], m]``, of shape ``[B, N, N]``."""
    return jnp.take_along_axis(x, parent[:, :, None], axis=1)


def _draws(beta: jax.Array, count: jax.Array) -> jax.Array:
    """Returns ``(1 - (1 - β)^k) / β``, the expected number of tested siblings: float32 ``[B]``."""
    some = jnp.where(beta > 0, jnp.minimum(beta, 1.0), 1.0)
    return jnp.where(beta > 0, -jnp.expm1(count * jnp.log1p(-some)) / some, count)


def _rho(p: jax.Array, q: jax.Array, count: jax.Array) -> jax.Array:
    """Returns float32 ``[B]``: a ρ with which the rule is exact, at most ``(k - 1) / 2^20`` above
    the least such ρ; ``count`` is k."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        beta = jnp.sum(jnp.minimum(q, p / middle[:, None]), axis=-1)
        lawful = _draws(beta, count) <= middle
        return jnp.where(lawful, low, middle), jnp.where(lawful, middle, high)

    bounds = jnp.ones(count.shape), count.astype(jnp.float32)
    return jax.lax.fori_loop(0, HALVINGS, halve, bounds)[1]
