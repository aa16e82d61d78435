"""PEARL: a draft model that drafts further tokens while the target verifies those drafted before.

    the target verifies   root  d_1 ... d_K            (K = 0 after a rejection: "pre-verify")
    meanwhile are drawn              g, e_1 ... e_K    the text after d_K

The guess ``g`` is the drafter's draw of the token after the chain. The target's law after ``d_K``,
which the pass gives anyway, judges it as it judges a drafted token: accepted with probability
``min(1, p(g) / q(g))``, else replaced by a draw from the residual. If the whole chain and the guess
are accepted, ``e_1 ... e_K`` is the draft of the next round ("post-verify"), which is there at
once. Otherwise the next round verifies nothing but the root and the guess that is drawn meanwhile,
so that no pass of the target ever waits for the drafter.

A round emits 1 to K + 1 tokens. Where a draft takes as long as a pass of the target, and each has
devices of its own, a round takes half as long as that of a draft model; the price is the round
after a rejection, which emits one token.

Lossless: yes (drafts and the guess state their laws), under every rule for chains.

Differs from the released code, which is biased above temperature 0: there the test of the first
token after a rejection and the test of the round after it use one random number.

Example::

    specjax.decode(target, PEARL(num_draft=4, model=small.target), params, ...)
    params = {"target": weights, "drafter": small.params}

References: Liu et al., arXiv 2408.11850.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..types import Guess
from .draft_ahead import Begun, DraftAhead, say


@dataclasses.dataclass(frozen=True)
class PEARL(DraftAhead):
    """Drafts the next round while the target verifies; ``params["drafter"]`` are the weights.

    Attributes:
      num_draft: K, the tokens of a chain; a round emits one more at most. The paper's γ is K + 1.
      model: the draft model.

    Raises:
      ValueError: there is no model, or nothing to draft; a tree.
    """

    name = "pearl"

    @property
    def num_outcomes(self) -> int:
        return 1

    @property
    def always_drafts(self) -> bool:
        return False

    def redraft(self, params, state, context):
        return state.ready, jnp.ones(context.length.shape, bool)

    def expect(self, context, begun: Begun):
        logits = jnp.take_along_axis(begun.logits, begun.count[:, None, None], axis=1)
        count, uniform = begun.count[:, None], begun.uniform[:, :1]
        token, q = say(context, begun.chain, count, logits, count + 1, uniform)
        return count, token, Guess(token=token[:, 0], law=None if q is None else q[:, 0])
