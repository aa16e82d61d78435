"""Traversal verification: judge a tree from its leaves up, whole paths at once."""

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
    """Tests leaves before their ancestors: a path is kept that one by one would have been lost.

    Each node ``v`` on the way has a chance ``α_v`` and a law ``P_v``; at first ``α = 1`` at the
    root, ``P_v = p`` after ``v``, and for a child ``x`` drawn from ``Q``::

        α_x = min(1, α_v P_v(x) / Q(x))

    Down along first children to a leaf, which is accepted with its whole path with probability
    ``α``. Else it is gone, and with ``S = Σ (α_v P_v - Q)+`` its parent goes on with::

        P_v <- norm((α_v P_v - Q)+),    α_v <- S / (S + 1 - α_v)

    to the next sibling's leaves, or, where none is left, is tested like a leaf. The token after the
    accepted path is drawn from its ``P``.

    On a chain this is block verification, draw by draw. On trees it kept at least as many tokens in
    expectation as ``rejection`` wherever the tests enumerate both; the paper measures the same.

    Lossless: yes, as ``rejection`` is: for siblings drawn ``iid``, from laws of their own
    (``mixed``), ``distinct``, in a ``hub``'s pairs, and for point masses. Rejecting ``x`` has
    probability ``S + 1 - α_v`` on average over ``Q``, whatever stands below it, and leaves a state
    that no token of the subtree is in; so a node is kept with probability ``α_v`` on average, and
    what follows it then has the law ``P_v``.

    Cost: a rule that looks at the top first ends at the first node none of whose children is
    accepted; this one looks at every node before the accepted one, in the worst case at all N. It
    computes p at the looked-at nodes that have children and where it ends, and two laws of the
    draft for each look: ``O(V)`` a step, at most N steps. It keeps one ``P`` for each depth,
    float32 ``[B, D + 1, V]``, beside the ``[B, N, V]`` logits of the pass. Subtrees below ``α = 0``
    are left out.

    References: Weng et al., Traversal Verification for Speculative Tree Decoding, arXiv 2505.12398.
    Unlike the paper, which has 0/0 for ``p = q``, this rule sets ``P_v <- P_v, α_v <- 1`` there. A
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
            """The next child to go to; none below a node that can't be accepted."""
            child, found = next_child(draft, node, after, able)
            return child, found & (alpha > 0)

        def reject(node, chance, kept):
            """What ``P_v`` and ``α_v`` (``kept``, ``chance``) become without the child ``node``."""
            left = jnp.maximum(chance[:, None] * kept - draft_law(node), 0.0)
            mass = jnp.sum(left, axis=-1)
            room = mass + (1.0 - chance)  # in this order: where α = 1 it stays 1
            after = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 1.0)
            # without a law here the text can only end here: all of p is beside q
            after = jnp.where(jnp.max(kept, axis=-1) > 0, after, chance)
            norm = left / jnp.where(mass > 0, mass, 1.0)[:, None]
            return after, jnp.where((mass > 0)[:, None], norm, kept)

        def look(state):
            """Tests the row's node if nothing is left below it, and goes on to the next one."""
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
        fresh = (after == node)[:, None]  # nothing below it was looked at
        rest = jnp.where(fresh, target_law(node), laws[rows, level])
        return verdict(draft, node, drawing.draw(rest, uniform[:, ROOT]))
