"""Losses and held-out measures of light heads, computed for a few positions at a time.

Head k at position t predicts token t + 2 + k. Heads are aligned by the *place* u = t + k, at which
all heads predict the same token, u + 2, and are compared with the same law of the target. For each
chunk of places (``chunks.py``) that law is computed once, and the logits of one head exist at a
time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.causal_lm import CausalLM

from . import chunks, losses
from .evaluate import Mean, mean
from .rows import Heads, Rows


def inside(rows: Rows, head: int, steps: int) -> jax.Array:
    """Returns float32 ``[B, steps]``: the weight of the token that a head (from 0) predicts.

    It is 0 if that token and the tokens before it, from the position on, are not in one document.
    """
    last = rows.segments[:, 1 + head : 1 + head + steps]
    # the weight of predicting token t + 2 + k has the index t + 1 + k
    weight = rows.weight[:, 1 + head : 1 + head + steps]
    return (last == rows.segments[:, :steps]) * weight


class Said(NamedTuple):
    """The tokens and laws with which heads are compared at places ``[B, C]``.

    Attributes:
      next: int32, the token of the text.
      best: int32, the target's most likely token; None if no law is needed.
      law: float32 ``[B, C, V]``, the target's law, restricted to the heads' vocabulary and
        renormalized.
      known: float32, 0.0 where ``best`` is not in that vocabulary; None: all tokens are.
    """

    next: jax.Array
    best: jax.Array | None = None
    law: jax.Array | None = None
    known: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Laws:
    """A target's laws for heads with a vocabulary of their own (``vocab``, see ``Heads``).

    The tokens of that vocabulary come first, in their order, then all others. The law over that
    vocabulary is then a slice, which is much cheaper than gathering its tokens at every position.
    """

    target: CausalLM
    vocab: np.ndarray | None = None

    @functools.cached_property
    def order(self) -> np.ndarray | None:
        """The order of the tokens, int32 ``[V]``; None: the target's own order."""
        if self.vocab is None:
            return None
        every = np.arange(self.target.vocab_size, dtype=np.int32)
        if np.array_equal(self.vocab, every):
            return None
        return np.concatenate([self.vocab, np.setdiff1d(every, self.vocab)]).astype(np.int32)

    def table(self, params) -> jax.Array:
        """The target's LM head, ``[V, F]``, in that order."""
        table = self.target.head_table(params)
        return table if self.order is None else table[self.order]

    def said(self, table, pieces) -> Said:
        """The function ``common`` of ``chunks.totals``; ``table=None`` if no law is needed."""
        if table is None:
            return Said(pieces["next"])
        logits = chunks.logits_of(table, pieces["hidden"], self.target.config.logit_softcap)
        best, known = jnp.argmax(logits, axis=-1), None
        if self.order is not None:
            known = (best < len(self.vocab)).astype(jnp.float32)
            best, logits = jnp.asarray(self.order)[best], logits[..., : len(self.vocab)]
        return Said(pieces["next"], best, jax.nn.softmax(logits, axis=-1), known)


def places_of(rows: Rows) -> dict:
    """The pieces of all places at which heads predict, for ``Laws.said``."""
    return {"next": rows.tokens[:, 2:], "hidden": rows.hidden[:, 1:]}


def laid(outputs, rows: Rows) -> list[chunks.Head]:
    """Aligns the heads over all places; where a head predicts nothing, its weight is 0."""
    steps, found = rows.steps(len(outputs)), []
    for k, (table, bias, state) in enumerate(outputs):
        around = k, len(outputs) - 1 - k
        states = state.reshape(len(state), -1, steps).transpose(1, 2, 0)
        weight = jnp.pad(inside(rows, k, steps), ((0, 0), around))
        found.append(
            chunks.Head((table, bias), jnp.pad(states, ((0, 0), around, (0, 0))), (), weight)
        )
    return found


def nats(q, said: Said, teacher_share: float):
    """The loss at each place for logits ``q``, float32 ``[B, C]`` in nats; see ``head_losses``."""
    value = 0.0
    if teacher_share < 1:
        value += (1 - teacher_share) * losses.cross_entropy(q, said.next)
    if teacher_share:
        value += teacher_share * losses.soft_cross_entropy(said.law, q)
    return value


def cap_of(heads: Heads, target) -> float | None:
    """The cap of the logits of the heads."""
    return target.config.logit_softcap if heads.capped else None


def terms_of(cap: float | None, teacher_share: float):
    """Returns the function ``terms`` of ``chunks.totals`` for one head; see ``head_losses``.

    Places that do not count (``Said.known``) have a loss of 0.
    """

    def terms(output, states, said, _):
        table, bias = output
        value = nats(chunks.logits_of(table, states, cap, bias), said, teacher_share)
        if said.known is None:
            return {"loss": value}
        return {"loss": value * said.known, "count": said.known}

    return terms


def head_losses(
    outputs, target, params, rows: Rows, teacher_share: float, vocab=None, capped=True
) -> list[Mean]:
    """Returns for each head the ``Mean`` over its positions, in nats, of

        (1 - teacher_share) * -log q(next token)  +  teacher_share * -sum_x p(x) log q(x)

    with the target's law ``p`` after the true tokens. For heads with a vocabulary of their own
    (``vocab``, see ``Heads``) the law is restricted to that vocabulary and renormalized, positions
    count if the target's best token is in that vocabulary, and ``teacher_share`` must be 1.
    ``capped``: see ``Heads``.
    """
    heads, laws = laid(outputs, rows), Laws(target, vocab)
    table = laws.table(params) if teacher_share else None
    terms = terms_of(target.config.logit_softcap if capped else None, teacher_share)
    found = chunks.totals(terms, heads, table, places_of(rows), common=laws.said)
    return [
        Mean(loss, others.get("count", jnp.sum(head.weight)))
        for head, (loss, others) in zip(heads, found, strict=True)
    ]


def shared(losses: list[Mean], decay: float, factor: float = 1.0) -> dict[str, Mean]:
    """Returns the terms ``head_1 ...`` of the loss ``factor * sum_k decay ** k * loss_k``."""
    return {
        f"head_{k + 1}": value._replace(share=factor * decay ** (k + 1))
        for k, value in enumerate(losses)
    }


def make_loss(heads: Heads, target, read, config):
    """Returns the loss of all heads for ``loop.TrainingTask``; ``config`` is a ``FrozenConfig``."""

    def loss(params, frozen, batch, keys):
        del keys
        rows = read(frozen["target"], batch)
        outputs = heads.outputs(params, frozen["target"], rows)
        how = config.teacher_share, heads.vocab, heads.capped
        losses = head_losses(outputs, target, frozen["target"], rows, *how)
        return shared(losses, config.decay)

    return loss


def make_measure(heads: Heads, target, read, config, loss_of=None):
    """Returns held-out measures that need no decoding.

    They are the loss, the share of positions at which each head's best token is the target's, and
    ``greedy_tau``, the tokens emitted per round if the text were decoded greedily. The last one is
    exact for text that the target wrote greedily.

    ``loss_of(q, said)`` returns the loss at each place for the logits ``q`` and a ``Said``; None:
    ``nats``.
    """
    loss_of = loss_of or functools.partial(nats, teacher_share=config.teacher_share)
    laws, cap = Laws(target, heads.vocab), cap_of(heads, target)

    def terms(tables, states, table, pieces):
        """Returns for each head its loss, whether its best token is the target's, and weights."""
        said, found = laws.said(table, pieces), []
        for (own, bias), state in zip(tables, states, strict=True):
            q = chunks.logits_of(own, state, cap, bias)
            best = jnp.argmax(q, axis=-1)
            best = best if heads.vocab is None else jnp.asarray(heads.vocab)[best]
            known = jnp.ones(best.shape) if said.known is None else said.known
            found.append((loss_of(q, said), best == said.best, known))
        return found

    def measure(params, frozen, tokens, weight):
        rows = read(frozen["target"], {"tokens": tokens, "weight": weight})
        outputs = heads.outputs(params, frozen["target"], rows)
        steps, own = rows.steps(len(outputs)), laid(outputs, rows)
        tables, states = [head.table for head in own], [head.states for head in own]
        read_by = tables, states, laws.table(frozen["target"]), places_of(rows)
        alive = counted = tau = jnp.ones((len(tokens), steps))
        means, found = [], {}
        for k, values in enumerate(chunks.each(terms, *read_by, chunk=chunks.SEVERAL)):
            value, hit, known = (x[:, k : k + steps] for x in values)
            fits = inside(rows, k, steps)
            means.append(mean(value, fits * known))
            found[f"accuracy_{k + 1}"] = mean(hit, fits)
            alive, counted = alive * hit, counted * fits
            tau = tau + alive
        found["greedy_tau"] = mean(tau, counted)
        return {"heldout_loss": shared(means, config.decay), **found}

    return measure


def make_mean_measure(*given, loss_of=None):
    """As ``make_measure``, for recipes whose loss is the weighted mean over heads: so is the
    held-out one."""
    measure = make_measure(*given, loss_of=loss_of)

    def averaged(*read):
        found = measure(*read)
        terms = found["heldout_loss"]
        scale = sum(term.share for term in terms.values())
        terms = {name: x._replace(share=x.share / scale) for name, x in terms.items()}
        return {**found, "heldout_loss": terms}

    return averaged
