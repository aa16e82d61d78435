"""Typical acceptance, an approximate rule: it keeps tokens that are plausible for the target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .walk import at_node, eligible, has_children, verdict


@dataclasses.dataclass(frozen=True)
class Typical(Rule):
    """Accepts a token ``x`` if ``p(x) > min(ε, δ exp(-H(p)))``, ``H`` the entropy in nats.

    The rule keeps the longest path of accepted tokens; among equally long paths the most probable
    by p, and among equally probable paths the first. The token after the path is the most probable
    one by p; it is not drawn. Medusa takes the first token of each of its drafts in this way, and
    here the last token of a round is the root of the next. So temperature and filters only change
    the threshold, and the draws of the drafter are the only random numbers.

    At temperature 0 p is a point mass, and the rule is ``greedy``, token for token.

    Lossless: only at temperature 0. Otherwise the drafter chooses among the plausible tokens, and
    the results carry the label ``approximate``.

    Attributes:
      epsilon: ε in (0, 1], the threshold where the entropy of p is small.
      delta: δ above 0, the factor of ``exp(-H)`` where the entropy of p is large. Medusa takes the
        square root of ``epsilon``.

    Cost: p at each accepted node that has children, and at the last node.

    References: Cai et al., Medusa, arXiv 2401.10774, section 2.3.1. The reference implementation
    adds 1e-5 to the probabilities within ``H``; this rule does not.

    Raises:
      ValueError: ``epsilon`` or ``delta`` is out of range.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name = "approximate-typical"
    lossless = False
    exact_at_zero = True
    _no = (
        "p = {p:.3g}, the threshold is {bound:.3g}: p is not above it, or the path is shorter than "
        "the kept one"
    )
    why = {
        "accepted": "p = {p:.3g} is above the threshold {bound:.3g}",
        "rejected": _no,
        "later": _no,
        "beyond": "not on the path that was kept",
    }

    def __post_init__(self):
        if not 0 < self.epsilon <= 1 or not 0 < self.delta < float("inf"):
            raise ValueError(
                f"Typical(epsilon={self.epsilon}, delta={self.delta}): epsilon must be in (0, 1], "
                "delta above 0 and finite"
            )

    def check(self, draft: Draft, greedy: bool) -> None:
        """Admits every draft, because the rule does not use the draft's laws."""

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        able = eligible(draft)
        bearing = has_children(draft, able)
        batch, nodes = draft.tokens.shape
        index, tokens = jnp.arange(nodes), jnp.maximum(draft.tokens, 0)

        def visit(state):
            """Tests the children of an accepted node; nodes come before their children."""
            node, reached, score, going = state
            p = target_law(node)
            bound = self.threshold(p)
            said = jnp.take_along_axis(p, tokens, axis=1)
            passes = able & (trees.parents(draft) == node[:, None]) & (said > bound[:, None])
            passes &= going[:, None]
            likely = at_node(score, node)[:, None] + jnp.log(jnp.where(passes, said, 1.0))
            reached, score = reached | passes, jnp.where(passes, likely, score)
            left = reached & bearing & (index > node[:, None])
            going &= jnp.any(left, axis=1)
            return jnp.argmax(left, axis=1).astype(jnp.int32), reached, score, going

        start = jnp.full((batch,), ROOT, jnp.int32)
        reached = jnp.broadcast_to(index == ROOT, (batch, nodes))
        state = (start, reached, jnp.zeros((batch, nodes)), bearing[:, ROOT])
        if nodes > 1:
            state = jax.lax.while_loop(lambda s: jnp.any(s[3]), visit, state)
        _, reached, score, _ = state
        depth = jnp.where(reached, trees.depths(draft), -1)
        deepest = depth == jnp.max(depth, axis=1, keepdims=True)
        node = jnp.argmax(jnp.where(deepest, score, -jnp.inf), axis=1).astype(jnp.int32)
        p = target_law(node)
        # -1 where no token has any probability
        return verdict(draft, node, drawing.argmax(jnp.where(p > 0, p, -jnp.inf)))

    def threshold(self, p: jax.Array) -> jax.Array:
        """Returns the threshold that p of a token must exceed, float32 ``[B]``.

        Args:
          p: probabilities float32 ``[B, V]``.
        """
        entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)
        return jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """Returns ``bound``, the threshold for each node's token: float32 ``[B, N]``."""
        batch, nodes = draft.tokens.shape
        above = jnp.maximum(jnp.broadcast_to(trees.parents(draft), (batch, nodes)), ROOT)
        bounds = jax.lax.map(lambda node: self.threshold(target_law(node)), above.T)
        return {"bound": bounds.T}
