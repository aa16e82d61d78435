"""A chain whose tokens are tested one after the other: the common part of two approximate rules."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from ..sampling import drawing
from ..types import Draft, Rule, Verdict
from .compatibility import need_chain
from .rejection import chain_probabilities, chain_verdict
from .walk import eligible


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
        able = eligible(draft)
        uniform = drawing.uniforms(key, draft.num_nodes)
        logits = target_law.adjusted()
        p, q = chain_probabilities(draft, target_law, draft_law)
        # as in rejection, a token with q = 0 was not drawn
        own = able & (uniform * q < p) & (q > 0)
        before = jnp.roll(logits, 1, axis=1)
        scored = jnp.take_along_axis(before, jnp.maximum(draft.tokens, 0)[:, :, None], axis=2)
        passes = self.passes(draft, own, jnp.isfinite(scored[:, :, 0]), logits)
        return chain_verdict(draft, passes, target_law, draft_law, uniform)

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """Returns ``u``, and ``left``, the target's probability of each node's token; float32
        ``[B, N]`` each."""
        p, _ = chain_probabilities(draft, target_law, draft_law)
        return {"u": drawing.uniforms(key, draft.num_nodes), "left": p}
