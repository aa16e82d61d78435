"""What a ``Cascade`` writes down while the outer model generates its text, and where this ends."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..acceptance.node_laws import TargetLaw
from ..decoding.round import VerifiedRound
from ..decoding.state import State
from ..trees.confidence import most_probable
from ..types import Context
from .cascade_tree import best_at


@pytree_dataclass
class Notes:
    """What is known of the K tokens of the outer text; None: no one asks.

    Attributes:
      laws: float32 ``[B, K, V]``, the law of each drafted token.
      sure: float32 ``[B, K]``, its greatest probability before all settings.
      best: int32 ``[B, K, C]``, the tokens that come first where none is drawn.
    """

    laws: jax.Array | None
    sure: jax.Array | None
    best: jax.Array | None

    def after_round(
        self, context: Context, before: State, after: State, judged: VerifiedRound
    ) -> Notes:
        """The notes with those of the tokens of an inner round.

        Args:
          context: of the round of the target.
          before, after: the states of the inner loop around the inner round.
          judged: the inner round.
        """
        p = TargetLaw(judged.draft, required(judged.scores.logits, "logits"), judged.context)

        def noted(notes, value):
            return _noted(notes, context, before, after, judged, value)

        laws, sure, best = self.laws, self.sure, self.best
        if laws is not None:
            laws = noted(laws, lambda node, _: p(node))
        if sure is not None:
            sure = noted(sure, lambda node, _: most_probable(p.raw(node)))
        if best is not None:
            count = best.shape[2]
            best = noted(best, lambda node, at: best_at(p, node, context, at, count))
        return dataclasses.replace(self, laws=laws, sure=sure, best=best)


def no_notes(context: Context, depth: int, vocab: int, sure: bool, siblings: int) -> Notes:
    """The notes before the first inner round.

    Args:
      context: of the round.
      depth: K.
      vocab: V.
      sure: whether a threshold is compared with the greatest probabilities.
      siblings: how many children a node of the draft has at most.
    """
    batch = len(context.length)
    drawn = not context.sampling.greedy and context.noise is None
    wide = (batch, depth, vocab), jnp.float32
    several = siblings > 1 and not drawn
    return Notes(
        laws=jnp.zeros(*wide) if drawn else None,
        sure=jnp.zeros((batch, depth), jnp.float32) if sure else None,
        best=jnp.zeros((batch, depth, siblings), jnp.int32) if several else None,
    )


def _noted(notes, context: Context, before: State, after: State, judged, value):
    """Writes ``value(node, position)`` of the nodes below which an inner round drew tokens, and of
    the positions of these tokens, to the places of the tokens among ``notes`` ``[B, K, ...]``."""
    num, most = after.length - before.length, notes.shape[1]
    rows = jnp.arange(len(num))

    def visit(step, notes):
        said = value(judged.verdict.path[:, step], before.length + step)
        place = before.length - context.length + step
        return notes.at[rows, jnp.where(step < num, place, most)].set(said, mode="drop")

    return jax.lax.fori_loop(0, jnp.max(num), visit, notes)
