"""Weights of the steps of an unroll by the streak of tokens that is accepted up to them.

At each position the unroll drafts K tokens, of which the k-th counts only if those before it are
accepted. ``streaks.py`` weighs the places of a block so; here the drafter learns the target's law,
and a token is accepted with the probability of speculative decoding at temperature 1:

    A_k         sum_x min(p'(x), q_k(x)), and 0 where the most likely token is not in the vocabulary
    ce-streak   loss = sum_k  sg(prod_{i < k} A_i) H_k
    d-pace      loss = sum_k  sg(sum_{m >= k} prod_{i <= m} s_i) H_k
    s_i         (1 - alpha) A_i + alpha
    H_k         -sum_x p'(x) log q_k(x)

``sg`` stops the gradient, ``alpha`` is the field ``pace_floor``. The loss is a mean over positions.

Differs from D-PACE, which is defined for the cross-entropy of the text: A stands for the
probability of the text's token, and H for that cross-entropy. The gradient with ``alpha = 0`` is
therefore not that of the expected streak.

References: D-PACE, arXiv 2605.18810; SpecDiff-2, arXiv 2511.00606.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import chunks, head_losses, losses, streaks
from .config import ConfigError
from .evaluate import Mean
from .rows import Heads, Rows

KINDS = ("decay", "d-pace", "ce-streak")


def check(weighting: str, pace_floor: float) -> None:
    """Raises ``ConfigError`` for a weighting that this loss does not have, or a bad alpha."""
    if weighting not in KINDS:
        raise ConfigError(f"weighting={weighting!r}; known here: {', '.join(KINDS)}")
    streaks.check(weighting, pace_floor, 1.0)


def accepted(outputs, heads: Heads, target, params, rows: Rows) -> jax.Array:
    """``A_k`` at each position, float32 ``[K, B, T]``, without a gradient."""
    laws, cap = head_losses.Laws(target, heads.vocab), head_losses.cap_of(heads, target)

    def terms(tables, states, table, pieces):
        said, found = laws.said(table, pieces), []
        for (own, bias), state in zip(tables, states, strict=True):
            share = losses.overlap(said.law, chunks.logits_of(own, state, cap, bias))
            found.append(share if said.known is None else share * said.known)
        return found

    own, steps = head_losses.laid(jax.lax.stop_gradient(outputs), rows), rows.steps(len(outputs))
    tables, states = [head.table for head in own], [head.states for head in own]
    read_by = tables, states, laws.table(params), head_losses.places_of(rows)
    found = chunks.each(terms, *read_by, chunk=chunks.SEVERAL)
    return jnp.stack([x[:, k : k + steps] for k, x in enumerate(found)])


def make_loss(heads: Heads, target, read, config):
    """As ``head_losses.make_loss``, with ``config.weighting`` and ``config.pace_floor``."""
    if config.weighting == "decay":
        return head_losses.make_loss(heads, target, read, config)
    laws, terms_of = head_losses.Laws(target, heads.vocab), head_losses.terms_of

    def loss(params, frozen, batch, keys):
        del keys
        rows = read(frozen["target"], batch)
        outputs = heads.outputs(params, frozen["target"], rows)
        count, steps = len(outputs), rows.steps(len(outputs))
        fits = jnp.stack([head_losses.inside(rows, k, steps) for k in range(count)])
        shares = accepted(outputs, heads, target, frozen["target"], rows)
        nats = -jnp.log(shares)
        weights = streaks.weights_of(config.weighting, nats, fits, config.pace_floor)
        own = [
            head._replace(weight=jnp.pad(weight, ((0, 0), (k, count - 1 - k))))
            for k, (head, weight) in enumerate(
                zip(head_losses.laid(outputs, rows), weights, strict=True)
            )
        ]
        terms, table = (
            terms_of(head_losses.cap_of(heads, target), 1.0),
            laws.table(frozen["target"]),
        )
        found = chunks.totals(terms, own, table, head_losses.places_of(rows), common=laws.said)
        positions = jnp.sum(fits[0] > 0).astype(jnp.float32)
        streak = jnp.sum(fits * streaks.alive(nats, fits))
        total = sum(value for value, _ in found)
        logged = {
            f"accepted_{k + 1}": Mean(jnp.sum(fits[k] * shares[k]), jnp.sum(fits[k]), 0.0)
            for k in range(count)
        }
        return {"loss": Mean(total, positions), "streak": Mean(streak, positions, 0.0), **logged}

    return loss
