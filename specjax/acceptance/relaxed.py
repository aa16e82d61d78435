"""Greedy acceptance with a wider test: the common part of the approximate rules over logits."""

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
    """The rank and the probability of each drafted token in the target's law after its parent.

    Attributes:
      best: int32 ``[B, N]``, the target's most probable token after the node's parent.
      gap: float32 ``[B, N]``, the logit of ``best`` minus the logit of the node's token (nats).
      rank: int32 ``[B, N]``, the number of tokens that are more probable than the node's token;
        among equally probable tokens, those with a smaller id count as more probable.
      loss: float32 ``[B, N]``, ``-log p`` of the node's token at temperature 1 (nats).
    """

    best: jax.Array
    gap: jax.Array
    rank: jax.Array
    loss: jax.Array


def standing(draft: Draft, logits: jax.Array) -> Standing:
    """Returns the ``Standing`` of every node.

    Args:
      draft: the draft.
      logits: float32 ``[B, N, V]``, the target's logits after bias, penalties and processor.
    """
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
    """Keeps tokens that pass the test ``passes``, and always the target's most probable token.

    The longest path of such tokens is kept; among equally long paths, the one with the least sum of
    ``Standing.gap``. The target's most probable token follows the path. The rule draws nothing:
    temperature, top-k, top-p and min-p change only the proposals of a drafter that draws. At the
    ``strictest`` setting this is the greedy rule.
    """

    lossless = False
    _no = "its logit is {gap:.3g} below the best one, its rank {rank:.0f}, its loss {loss:.3g} nats"
    why = {
        "accepted": _no,
        "rejected": f"{_no}: it failed the test, or its path is shorter than the kept one",
        "later": f"{_no}: it failed the test, or its path is shorter than the kept one",
        "beyond": "not on the path that was kept",
    }

    @abc.abstractmethod
    def passes(self, draft: Draft, found: Standing) -> jax.Array:
        """Returns bool ``[B, N]``: whether each node's token passes the test of the rule.

        Args:
          draft: the draft.
          found: the rank and the probability of each node's token.
        """

    @property
    @abc.abstractmethod
    def strictest(self) -> bool:
        """Whether the setting admits only the most probable token."""

    @property
    def exact_at_zero(self) -> bool:
        return self.strictest

    def __call__(self, params, draft: Draft, target_law, draft_law, key) -> Verdict:
        logits = target_law.adjusted()
        found = standing(draft, logits)
        passes = self.passes(draft, found) | (draft.tokens == found.best)
        # a token that the settings forbid has a logit of -inf; if all are forbidden, gap is NaN
        passes &= eligible(draft) & jnp.isfinite(found.gap)
        node = longest(draft, passes, -found.gap)
        return verdict(draft, node, drawing.argmax(at_node(logits, node)))

    def evidence(self, params, draft: Draft, target_law, draft_law, key) -> dict[str, jax.Array]:
        """Returns ``gap``, ``rank`` and ``loss`` of each node's token (see ``Standing``): float32
        ``[B, N]`` each."""
        found = standing(draft, target_law.adjusted())
        return {"gap": found.gap, "rank": found.rank.astype(jnp.float32), "loss": found.loss}
