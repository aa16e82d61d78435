"""Greedy acceptance with a wider test: what the approximate rules over logits share."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..sampling import drawing
from ..types import ROOT, Draft, Rule, Verdict
from .walk import at_node, eligible, longest, verdict


@pytree_dataclass
class Standing:
    """How drafted tokens stand in the target's scores after their parents.

    Attributes:
      best: int32 ``[B, N]``, the most probable token there.
      gap: float32 ``[B, N]``, by how much (nats) the token's logit is below that token's.
      rank: int32 ``[B, N]``, how many tokens are more probable; of equal ones the first counts.
      loss: float32 ``[B, N]``, ``-log p`` of the token at temperature 1 (nats).
    """

    best: jax.Array
    gap: jax.Array
    rank: jax.Array
    loss: jax.Array


def standing(draft: Draft, logits: jax.Array) -> Standing:
    """The standing of every node, by adjusted ``logits`` float32 ``[B, N, V]``."""
    batch, nodes = draft.tokens.shape
    above = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), (batch, nodes))
    index = jnp.arange(logits.shape[-1])

    def at(node):
        row, token = at_node(logits, above[:, node]), jnp.maximum(draft.tokens[:, node], 0)[:, None]
        best = drawing.argmax(row)
        own = jnp.take_along_axis(row, token, axis=1)
        top = jnp.max(row, axis=1)
        before = (row > own) | ((row == own) & (index < token))
        rank = jnp.sum(before, axis=1, dtype=jnp.int32)
        loss = jax.nn.logsumexp(row, axis=1) - own[:, 0]
        return best, top - own[:, 0], rank, loss

    best, gap, rank, loss = (x.T for x in jax.lax.map(at, jnp.arange(nodes)))
    return Standing(best=best, gap=gap, rank=rank, loss=loss)


class Relaxed(Rule):
    """Keeps a token that ``passes``, and the target's most probable one in any case.

    The longest path of such tokens is kept; of equally long ones that whose logits are closest to
    the best; then the target's most probable token follows. Nothing is drawn: the temperature and
    the like change only what a sampled drafter proposes. At the ``strictest`` setting this is the
    greedy rule.
    """

    lossless = False
    _no = "its logit is {gap:.3g} below the best, its rank {rank:.0f}, its loss {loss:.3g} nats"
    why = {
        "accepted": _no,
        "rejected": f"{_no}: too far, or on a path not so long",
        "later": f"{_no}: too far, or on a path not so long",
        "beyond": "not on the path that was kept",
    }

    @abc.abstractmethod
    def passes(self, draft: Draft, found: Standing) -> jax.Array:
        """Returns bool ``[B, N]``, the tokens that are near enough."""

    @property
    @abc.abstractmethod
    def strictest(self) -> bool:
        """Whether the setting admits nothing but the most probable token."""

    @property
    def exact_at_zero(self) -> bool:
        return self.strictest

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        logits = target_law.adjusted()
        found = standing(draft, logits)
        passes = self.passes(draft, found) | (draft.tokens == found.best)
        # a token that the target's settings forbid has a logit of -inf, or none is left
        passes &= eligible(draft) & jnp.isfinite(found.gap)
        node = longest(draft, passes, -found.gap)
        return verdict(draft, node, drawing.argmax(at_node(logits, node)))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """``gap``, ``rank`` and ``loss`` of each node's token, see ``Standing``."""
        found = standing(draft, target_law.adjusted())
        return {"gap": found.gap, "rank": found.rank.astype(jnp.float32), "loss": found.loss}
