"""Traversal verification: the rule judges a tree from its leaves up, whole paths at once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .walk import at_node, eligible, next_child, verdict


@dataclasses.dataclass(frozen=True)
class Traversal(Rule):
    """Tests leaves before their ancestors, and so keeps paths that ``rejection`` would lose.

    Each node ``v`` on the current path has an acceptance probability ``α_v`` and a law ``P_v``.
    At first ``α = 1`` at the root and ``P_v = p`` after ``v``. For a child ``x`` drawn from ``Q``::

        α_x = min(1, α_v P_v(x) / Q(x))

    The rule descends along first children to a leaf, and accepts the leaf with its whole path with
    probability ``α``. If the leaf is rejected, it is removed, and its parent ``v`` is updated, with
    ``S = Σ (α_v P_v - Q)+``, by::

        P_v <- norm((α_v P_v - Q)+),    α_v <- S / (S + 1 - α_v)

    The rule then descends from the next child of ``v``; if ``v`` has no child left, ``v`` is tested
    like a leaf. The token after the accepted path is drawn from the ``P`` of its last node.

    On a chain this is block verification, with the same decisions for the same random numbers. On
    trees it keeps at least as many tokens in expectation as ``rejection`` in every case that the
    tests enumerate; the paper measures the same.

    Lossless: yes, for the drafts of ``rejection``: siblings drawn ``iid``, ``distinct``, from laws
    of their own (``mixed``) or as a ``hub``'s pairs, and point masses. Rejecting ``x`` has
    probability ``S + 1 - α_v`` on average over ``Q``, whatever its subtree is, and the state after
    it depends on no token of the subtree. So a node is kept with probability ``α_v`` on average,
    and the token after it then has the law ``P_v``.

    Cost: ``rejection`` ends at the first node none of whose children is accepted; this rule tests
    every node before the accepted one, in the worst case all N. It computes p at the visited nodes
    that have children and at the last node, and two laws of the draft at each step: ``O(V)``
    operations a step, at most N steps. It stores one ``P`` for each depth, float32
    ``[B, D + 1, V]``, beside the ``[B, N, V]`` logits of the pass. Subtrees below a node with
    ``α = 0`` are skipped.

    References: Weng et al., Traversal Verification for Speculative Tree Decoding, arXiv 2505.12398.
    The paper's update is 0/0 for ``p = q``; this rule sets ``P_v <- P_v, α_v <- 1`` in this case. A
    node after which no token has any probability keeps its ``α``, and the text ends there.
    """

    name = "traversal"
    lossless = True
    _no = "no path through it passed its test"
    why = {
        "accepted": "the path that ends here, or a longer one, passed its test",
        "rejected": _no,
        "beyond": "no path through it was accepted",
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        """Admits every draft."""

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        uniform = drawing.uniforms(key, draft.num_nodes)
        batch = draft.tokens.shape[0]
        rows = jnp.arange(batch)
        parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), draft.tokens.shape)

        def below(node, after, alpha):
            """Returns the next child to visit; none below a node with ``α = 0``."""
            child, found = next_child(draft, node, after, able)
            return child, found & (alpha > 0)

        def reject(node, chance, kept):
            """Returns the updated ``α_v`` and ``P_v`` after the child ``node`` was rejected;
            ``chance`` and ``kept`` are their values before."""
            left = jnp.maximum(chance[:, None] * kept - draft_law(node), 0.0)
            mass = jnp.sum(left, axis=-1)
            room = mass + (1.0 - chance)  # in this order: where α = 1 it stays 1
            after = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
            # where no token has any probability the text can only end: all of p is beside q
            after = jnp.where(jnp.max(kept, axis=-1) > 0, after, chance)
            norm = left / jnp.where(mass > 0, mass, 1.0)[:, None]
            return after, jnp.where((mass > 0)[:, None], norm, kept)

        def look(state):
            """Tests the row's node if it has no child left, and goes on to the next node."""
            node, after, level, alpha, laws, going = state
            chance = alpha[rows, level]
            _, more = below(node, after, chance)
            kept = (node == ROOT) | (at_node(uniform, node) < chance)  # the root's α stays 1
            going &= more | ~kept
            gone = going & ~more
            above = jnp.maximum(level - 1, 0)
            chance, now = reject(node, alpha[rows, above], laws[rows, above])
            at = jnp.where(gone, above, alpha.shape[1])  # that column does not exist
            alpha = alpha.at[rows, at].set(chance, mode="drop")
            laws = laws.at[rows, at].set(now, mode="drop")
            level = jnp.where(gone, above, level)
            after = jnp.where(gone, node, after)
            node = jnp.where(gone, at_node(parent, node), node)

            chance = alpha[rows, level]
            child, more = below(node, after, chance)
            more &= going
            now, fresh = laws[rows, level], more & (after == node)
            # p only where a node's first child is reached, and for leaves not at all
            now = jax.lax.cond(
                jnp.any(fresh),
                lambda now: jnp.where(fresh[:, None], target_law(node), now),
                lambda now: now,
                now,
            )
            laws = laws.at[rows, jnp.where(fresh, level, alpha.shape[1])].set(now, mode="drop")
            x = jnp.maximum(at_node(draft.tokens, child), 0)
            drawn = draft_law(child)[rows, x]
            ratio = chance * now[rows, x] / jnp.where(drawn > 0, drawn, 1.0)
            ratio = jnp.where(drawn > 0, jnp.minimum(1.0, ratio), 0.0)
            level = jnp.where(more, level + 1, level)
            alpha = alpha.at[rows, jnp.where(more, level, alpha.shape[1])].set(ratio, mode="drop")
            node = jnp.where(more, child, node)
            return node, jnp.where(more, child, after), level, alpha, laws, going

        depth = trees.max_depth(draft) + 1
        start = jnp.full((batch,), ROOT, jnp.int32)
        vocab = jax.eval_shape(target_law, start).shape[-1]
        state = (
            start,
            start,
            jnp.zeros((batch,), jnp.int32),
            jnp.ones((batch, depth), jnp.float32),
            jnp.zeros((batch, depth, vocab), jnp.float32),
            jnp.ones((batch,), bool),
        )
        if draft.num_nodes > 1:
            state = jax.lax.while_loop(lambda s: jnp.any(s[-1]), look, state)
        node, after, level, _, laws, _ = state
        fresh = (after == node)[:, None]  # none of its children was visited
        rest = jnp.where(fresh, target_law(node), laws[rows, level])
        return verdict(draft, node, drawing.draw(rest, uniform[:, ROOT]))
