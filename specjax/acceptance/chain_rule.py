"""A chain whose tokens are tested one after the other: the common part of two approximate rules."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .compatibility import need_chain
from .rejection import residual
from .walk import at_node, eligible, longest, verdict


class ChainRule(Rule):
    """Keeps a chain up to the first token that fails ``passes``, which replaces speculative
    sampling's own test.

    The token after the kept part is drawn from the residual distribution after a token that failed,
    otherwise from the target's law. Where every token is judged by its own test, this is the rule
    ``rejection``.
    """

    why = {
        "accepted": "u q = {u:.3g} × {q:.3g} is below p, {left:.3g}, or the rule overlooks it",
        "rejected": "u q = {u:.3g} × {q:.3g} is not below p, {left:.3g}",
        "beyond": "after a token that was rejected",
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        need_chain(self.name, draft)

    @abc.abstractmethod
    def passes(
        self, draft: Draft, own: jax.Array, possible: jax.Array, logits: jax.Array
    ) -> jax.Array:
        """Returns bool ``[B, N]``: whether each node's token is kept if the tokens before it are.

        Nodes that may not be accepted are rejected, whatever this says.

        Args:
          draft: the draft, a chain.
          own: bool ``[B, N]``, whether the token passes speculative sampling's own test.
          possible: bool ``[B, N]``, whether bias, penalties and the logits processor allow the
            token: its adjusted logit is finite.
          logits: float32 ``[B, N, V]``, the target's adjusted logits after each node.
        """

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        batch, nodes = draft.tokens.shape
        able = eligible(draft)
        uniform = drawing.uniforms(key, nodes)
        logits = target_law.adjusted()
        p, q = self._of_tokens(draft, target_law, draft_law)
        # as in rejection, a token with q = 0 was not drawn
        own = able & (uniform * q < p) & (q > 0)
        before = jnp.roll(logits, 1, axis=1)
        scored = jnp.take_along_axis(before, jnp.maximum(draft.tokens, 0)[:, :, None], axis=2)
        passes = self.passes(draft, own, jnp.isfinite(scored[:, :, 0]), logits)
        node = longest(draft, passes & able)
        below = jnp.minimum(node + 1, nodes - 1)
        failed = (node + 1 < nodes) & at_node(able, below)
        law = target_law(node)
        left = jnp.where(failed[:, None], residual(law, draft_law(below)), law)
        return verdict(draft, node, drawing.draw(left, uniform[:, ROOT]))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """Returns ``u``, and ``left``, the target's probability of each node's token; float32
        ``[B, N]`` each."""
        p, _ = self._of_tokens(draft, target_law, draft_law)
        return {"u": drawing.uniforms(key, draft.num_nodes), "left": p}

    def _of_tokens(self, draft: Draft, target_law, draft_law) -> tuple[jax.Array, jax.Array]:
        """Returns p and q of each node's token, float32 ``[B, N]`` each; zeros at the root."""
        batch = draft.tokens.shape[0]
        rows = jnp.arange(batch)

        def at(node):
            here = jnp.full((batch,), node, jnp.int32)
            x = jnp.maximum(at_node(draft.tokens, here), 0)
            p, q = target_law(jnp.maximum(here - 1, ROOT))[rows, x], draft_law(here)[rows, x]
            return jnp.where(node == ROOT, 0.0, jnp.stack([p, q]))

        found = jax.lax.map(at, jnp.arange(draft.num_nodes, dtype=jnp.int32))  # [N, 2, B]
        return found[:, 0].T, found[:, 1].T
