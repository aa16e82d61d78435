"""How any rule judges a guess: a token after the chain that no pass of the target has scored.

The rule is shown the chain with the guess as one node more. What follows that node would be drawn
from the target's law there, which is unknown; so if the rule keeps the guess, the guess itself is
the round's last token. A lossless rule emits the tokens up to the guess with the target's law, and
the token after the guess belongs to the next round.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..types import POINT_MASS, ROOT, Draft, Verdict
from .walk import eligible


def with_guess(draft: Draft) -> tuple[Draft, jax.Array | None]:
    """Returns the draft that a rule judges, and in it the node of the guess int32 ``[B]``.

    The draft has N + 1 nodes. In a row with k candidates, which are the first k nodes of the chain,
    the guess is node k + 1. A draft without a guess, or that is no chain, is returned as it is,
    with None.
    """
    guess, nodes = draft.guess, draft.num_nodes + 1
    if guess is None or not trees.is_chain(draft):
        return draft, None
    index, able = jnp.arange(nodes), eligible(draft)
    lasting = jnp.cumprod(able[:, 1:].astype(jnp.int32), axis=1)
    place = jnp.sum(lasting, axis=1, dtype=jnp.int32) + 1
    here = index == place[:, None]

    def wider(x, value):
        return jnp.pad(x, ((0, 0), (0, 1)), constant_values=value)

    law, laws = draft.law, draft.laws
    if guess.law is not None:
        row = 0 if laws is None else laws.shape[1]
        known = jnp.full(here.shape, POINT_MASS) if law is None else wider(law, POINT_MASS)
        law = jnp.where(here, row, known).astype(jnp.int32)
        last = guess.law[:, None]
        laws = last if laws is None else jnp.concatenate([laws, last], axis=1)
    elif law is not None:
        law = jnp.where(here, POINT_MASS, wider(law, POINT_MASS))
    first = jnp.ones(able.shape, bool) if draft.candidate is None else draft.candidate
    before = wider(able, False) & (index < place[:, None])  # a node after an absent one has no law
    judged = dataclasses.replace(
        draft,
        tokens=jnp.where(here, guess.token[:, None], wider(draft.tokens, 0)),
        candidate=jnp.where(index == ROOT, wider(first, False), before | here),
        scored=None,
        law=law,
        laws=laws,
        topology=trees.chain_parents(nodes - 1),
        deepest=None,
        partial=None,
        guess=None,
    )
    return judged, place


def unscored(logits: jax.Array) -> jax.Array:
    """Returns logits ``[B, N + 1, V]``, with zeros for the guess, which no rule's verdict reads."""
    return jnp.pad(logits, ((0, 0), (0, 1), (0, 0)))


def without_guess(verdict: Verdict, judged: Draft, place: jax.Array | None) -> Verdict:
    """Returns the verdict on the chain alone: an accepted guess becomes the token after it.

    Args:
      verdict: the rule's, on ``judged``.
      judged, place: from ``with_guess``.
    """
    if place is None:
        return verdict
    taken = verdict.count == place
    token = jnp.take_along_axis(judged.tokens, place[:, None], axis=1)[:, 0]
    return Verdict(
        path=verdict.path[:, :-1],
        count=verdict.count - taken,
        token=jnp.where(taken, token, verdict.token),
    )
