"""Rejection sampling with the law of the draft, for one or several siblings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .walk import at_node, eligible, next_child, verdict


@dataclasses.dataclass(frozen=True)
class Rejection(Rule):
    """Recursive rejection: tests siblings in draw order, each against the residual before it.

    At a node with target law ``p``, for each child ``x`` drawn from ``q``::

        accept x with probability min(1, p(x) / q(x));  else  p <- norm((p - q)+)

    If no child is left, a token is drawn from the current ``p``. With one child for each node, this
    is speculative sampling. A child that was not drawn (``law = -1``) has a point mass for ``q``.
    With ``draws="distinct"`` the ``q`` of a child is its law without the earlier siblings that were
    drawn from the same law; a child that could not have been drawn, because no token was left in
    its law, is rejected. With ``draws="mixed"`` each sibling may have the law of another drafter.

    Lossless: yes, if each node was drawn from the law that the draft states.

    References: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318,
    algorithm 2; several siblings: SpecInfer, arXiv 2305.09781; without replacement: Jeon et al.,
    arXiv 2402.14160, Sequoia, arXiv 2402.12374.
    """

    name = "rejection"
    lossless = True
    why = {
        "accepted": "u q = {u:.3g} × {q:.3g} is below {share}, {left:.3g}",
        "rejected": "u q = {u:.3g} × {q:.3g} is not below {share}, {left:.3g}",
    }

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        uniform = drawing.uniforms(key, draft.num_nodes)
        batch = draft.tokens.shape[0]
        rows = jnp.arange(batch)

        def test(state):
            node, child, p, going = state
            x = at_node(draft.tokens, child)
            q = draft_law(child)
            drawn = self.compared(q[rows, x])
            # u q(x) < p(x) with u in [0, 1): a token of probability 0 is never accepted. A token
            # with q(x) = 0 was not drawn (there were more siblings than tokens in the law)
            accept = (at_node(uniform, child) * drawn < p[rows, x]) & (drawn > 0)
            after = jnp.where(accept[:, None], target_law(child), residual(p, q))
            node = jnp.where(going & accept, child, node)
            following, found = next_child(draft, node, child, able)
            p = jnp.where(going[:, None], after, p)
            return node, jnp.where(going, following, child), p, going & found

        start = jnp.full((batch,), ROOT, jnp.int32)
        child, found = next_child(draft, start, start, able)
        state = (start, child, target_law(start), found)
        if draft.num_nodes > 1:
            state = jax.lax.while_loop(lambda s: jnp.any(s[3]), test, state)
        node, _, p, _ = state
        return verdict(draft, node, drawing.draw(p, uniform[:, ROOT]))

    def compared(self, q: jax.Array) -> jax.Array:
        """Returns the number with which p of a child's token is compared; here q itself.

        Args:
          q: float32 ``[B]``, the draft's probability of the child's token.
        """
        return q

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """Returns ``u``, and ``left``, the probability of each node's token when the node is
        tested after all its earlier siblings were rejected; float32 ``[B, N]`` each."""
        batch, nodes = draft.tokens.shape
        rows, able = jnp.arange(batch), eligible(draft)
        parents = jnp.broadcast_to(trees.parents(draft), (batch, nodes))
        laws = jax.lax.map(lambda n: target_law(jnp.full((batch,), n)), jnp.arange(nodes))

        def turn(node, carry):
            laws, left = carry  # laws float32 [N, B, V]: the residual of p after each node
            above = parents[:, node]
            p, q = laws[above, rows], draft_law(jnp.full((batch,), node))
            left = left.at[:, node].set(p[rows, draft.tokens[:, node]])
            after = jnp.where(able[:, node, None], residual(p, q), p)
            return laws.at[above, rows].set(after), left

        left = jax.lax.fori_loop(1, nodes, turn, (laws, jnp.zeros((batch, nodes))))[1]
        return {"u": drawing.uniforms(key, nodes), "left": left}


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the residual distribution ``norm((p - q)+)``; p itself where ``p - q`` is nowhere
    positive.

    Args:
      p: probabilities float32 ``[B, V]``.
      q: probabilities float32 ``[B, V]``.

    Returns:
      probabilities float32 ``[B, V]``.
    """
    left = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p)
