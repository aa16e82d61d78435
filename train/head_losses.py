"""Losses and held-out measures of light heads, over a vocabulary a few positions at a time.

Head k at position t is about token t + 2 + k. So heads are laid over the *places* u = t + k, at
which all of them are about the same token, u + 2, and the same law of the target: of each chunk of
places (``chunks.py``) that law is computed once, and one head's logits exist at a time.
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
    """float32 ``[B, steps]``: the weight of the token that head (from 0) is about, where all that
    it goes on from is one document, so that the token could be known; else 0."""
    last = rows.segments[:, 1 + head : 1 + head + steps]
    # weights count predictions: that of token t + 2 + k stands at t + 1 + k
    weight = rows.weight[:, 1 + head : 1 + head + steps]
    return (last == rows.segments[:, :steps]) * weight


class Said(NamedTuple):
    """What heads are compared with at places ``[B, C]``.

    Attributes:
      next: int32, the text's token.
      best: int32, the target's most likely one; None where its law was not asked for.
      law: float32 ``[B, C, V]``, the target's, on the heads' own vocabulary and renormalised there.
      known: float32, 0.0 where ``best`` is not in that vocabulary; None: all are.
    """

    next: jax.Array
    best: jax.Array | None = None
    law: jax.Array | None = None
    known: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Laws:
    """A target's laws, as heads with a vocabulary of their own (``vocab``, see ``Heads``) see them.

    Over that vocabulary's tokens first, in their order, then all others: a law on it is then a
    slice, where picking its tokens out of every position's logits would cost more than the rest.
    """

    target: CausalLM
    vocab: np.ndarray | None = None

    @functools.cached_property
    def order(self) -> np.ndarray | None:
        """int32 ``[V]``; None: the target's own order."""
        if self.vocab is None:
            return None
        every = np.arange(self.target.vocab_size, dtype=np.int32)
        if np.array_equal(self.vocab, every):
            return None
        return np.concatenate([self.vocab, np.setdiff1d(every, self.vocab)]).astype(np.int32)

    def table(self, params) -> jax.Array:
        """The target's head, ``[V, F]``, in that order."""
        table = self.target.head_table(params)
        return table if self.order is None else table[self.order]

    def said(self, table, pieces) -> Said:
        """``common`` of ``chunks.totals``; ``table``: of ``table``, None where no law is needed."""
        if table is None:
            return Said(pieces["next"])
        logits = chunks.logits_of(table, pieces["hidden"], self.target.config.logit_softcap)
        best, known = jnp.argmax(logits, axis=-1), None
        if self.order is not None:
            known = (best < len(self.vocab)).astype(jnp.float32)
            best, logits = jnp.asarray(self.order)[best], logits[..., : len(self.vocab)]
        return Said(pieces["next"], best, jax.nn.softmax(logits, axis=-1), known)


def places_of(rows: Rows) -> dict:
    """The pieces of all places that heads are about, see ``Laws.said``."""
    return {"next": rows.tokens[:, 2:], "hidden": rows.hidden[:, 1:]}


def laid(outputs, rows: Rows) -> list[chunks.Head]:
    """The heads, each over all places; those that it has nothing to say at weigh nothing."""
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
    """float32 ``[B, C]``, what ``head_losses`` takes the mean of, of logits ``q``."""
    value = 0.0
    if teacher_share < 1:
        value += (1 - teacher_share) * losses.cross_entropy(q, said.next)
    if teacher_share:
        value += teacher_share * losses.soft_cross_entropy(said.law, q)
    return value


def head_losses(
    outputs, target, params, rows: Rows, teacher_share: float, vocab=None
) -> list[Mean]:
    """Of each head, the ``Mean`` over its positions, in nats, of

        (1 - teacher_share) * -log q(next token)  +  teacher_share * -sum_x p(x) log q(x)

    with the target's own law ``p`` behind the true tokens. With a vocabulary of its own (``vocab``,
    see ``Heads``) that law is what remains of it there, renormalised, and positions count at which
    the target's best token is in it; ``teacher_share`` has to be 1.
    """
    cap = target.config.logit_softcap

    def terms(output, states, said, _):
        table, bias = output
        value = nats(chunks.logits_of(table, states, cap, bias), said, teacher_share)
        if said.known is None:
            return {"loss": value}
        return {"loss": value * said.known, "count": said.known}

    heads, laws = laid(outputs, rows), Laws(target, vocab)
    table = laws.table(params) if teacher_share else None
    found = chunks.totals(terms, heads, table, places_of(rows), common=laws.said)
    return [
        Mean(loss, others.get("count", jnp.sum(head.weight)))
        for head, (loss, others) in zip(heads, found, strict=True)
    ]


def shared(losses: list[Mean], decay: float, factor: float = 1.0) -> dict[str, Mean]:
    """The terms ``head_1 ...`` of the loss ``factor * sum_k decay ** k * loss_k``."""
    return {
        f"head_{k + 1}": value._replace(share=factor * decay ** (k + 1))
        for k, value in enumerate(losses)
    }


def make_loss(heads: Heads, target, read, config):
    """The loss of all heads, as ``loop.TrainingTask`` takes it; ``config``: a ``FrozenConfig``."""

    def loss(params, frozen, batch, keys):
        del keys
        rows = read(frozen["target"], batch)
        outputs = heads.outputs(params, frozen["target"], rows)
        how = config.teacher_share, heads.vocab
        losses = head_losses(outputs, target, frozen["target"], rows, *how)
        return shared(losses, config.decay)

    return loss


def make_measure(heads: Heads, target, read, config):
    """Held-out, cheap: the loss, how often each head's best token is the target's own, and the
    tokens of a round that they would make of the text's (``greedy_tau``: exact where the target
    wrote it)."""
    laws, cap = Laws(target, heads.vocab), target.config.logit_softcap

    def terms(tables, states, table, pieces):
        """Of each head its loss, whether its best token is the target's, and what counts."""
        said, found = laws.said(table, pieces), []
        for (own, bias), state in zip(tables, states, strict=True):
            q = chunks.logits_of(own, state, cap, bias)
            best = jnp.argmax(q, axis=-1)
            best = best if heads.vocab is None else jnp.asarray(heads.vocab)[best]
            known = jnp.ones(best.shape) if said.known is None else said.known
            found.append((nats(q, said, config.teacher_share), best == said.best, known))
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
