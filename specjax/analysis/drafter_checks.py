"""``check_drafter``: tests whether a drafter keeps the contract of ``specjax.Drafter``.

Greedy output is compared with plain decoding, and drawn tokens with the laws that the draft states.
The check is meant for authors of drafters and their tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..acceptance.walk import eligible
from ..decoding import loop, stepwise
from ..decoding.inputs import check_objects
from ..decoding.round import draft_step, round_context
from ..drafters.plain import Plain
from ..sampling.distribution import Sampling
from ..types import POINT_MASS, Draft, Drafter, PyTree, Target
from .contract_report import ContractReport, run_check

SIGMAS = 6  # the most standard deviations between a count and its expectation


def check_drafter(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    *,
    tokens=None,
    max_new_tokens: int = 24,
    draws: int = 2000,
    inputs: PyTree = None,
    seed: int = 0,
) -> ContractReport:
    """Checks whether a drafter keeps the contract of ``specjax.Drafter``.

    Greedy output is compared with plain decoding, and drawn tokens with the laws that the draft
    states: sampling with ``rejection`` is lossless only if these laws are right.

    Args:
      target: the target that the drafter drafts for.
      drafter: the drafter.
      params: ``params`` of ``decode``: ``{"target": ..., "drafter": ...}``.
      tokens: prompts int32 ``[B, T]``, at least two rows; None: random prompts.
      max_new_tokens: the number of tokens in the greedy comparison.
      draws: the number of rows that draw from one prompt.
      inputs: ``inputs`` of ``decode``, or None; with inputs, drawn tokens are not checked.
      seed: the seed of random prompts and draws.

    Returns:
      a report; ``print`` it, or call its ``raise_if_wrong``.

    Raises:
      TypeError: ``target`` is not a ``specjax.Target`` or ``drafter`` not a ``specjax.Drafter``.

    Example::

        params = {"target": weights, "drafter": None}
        print(specjax.check_drafter(target, MyDrafter(3), params))
    """
    check_objects(target, drafter)
    if tokens is None:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, target.vocab_size, (3, 6)).astype(np.int32)
    tokens = np.asarray(tokens, np.int32)
    lengths = np.maximum(1, tokens.shape[1] - np.arange(len(tokens)))
    key = jax.random.key(seed)
    common: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, inputs=inputs)

    def state_of(tokens, lengths, temperature):
        sampling = Sampling(temperature=temperature)
        return stepwise.init_state(
            target, drafter, params, tokens, lengths, sampling=sampling, **common
        )

    @jax.jit
    def all_drafted(params, state):
        """The draft, whose tokens that no rule looks at are -1; its tokens as they were drafted;
        which of these a rule would look at although they are neither ids nor -1."""
        context = round_context(params, state)
        draft = draft_step(drafter, params, state.drafter_state, context)[0]
        outside = (draft.tokens < -1) | (draft.tokens >= target.vocab_size)
        for mask in (draft.candidate, draft.scored):
            outside = outside if mask is None else outside & mask
        tokens = jnp.where(eligible(draft), draft.tokens, -1)
        return dataclasses.replace(draft, tokens=tokens, partial=None), draft.tokens, outside

    def drafted(params, state):
        return all_drafted(params, state)[0]

    def shapes():
        def one_round(params):
            state = state_of(tokens, lengths, 0.0)
            return loop.burst(target, drafter, "auto", 1, params, state)

        jax.eval_shape(one_round, params)
        return ""

    def greedy():
        found = loop.decode(target, drafter, params, tokens, lengths, **common)
        plain = {**params, "drafter": None}
        wanted = loop.decode(target, Plain(), plain, tokens, lengths, **common)
        for row in range(len(tokens)):
            size = int(wanted.lengths[row])
            pair = np.asarray(found.tokens[row, :size]), np.asarray(wanted.tokens[row, :size])
            if not np.array_equal(*pair):
                at = int(np.flatnonzero(pair[0] != pair[1])[0])
                return f"row {row}: token {at} is {pair[0][at]}, in plain decoding {pair[1][at]}"
        return ""

    def ids():
        _, found, outside = all_drafted(params, state_of(tokens, lengths, 1.0))
        for row, node in np.argwhere(outside)[:1]:
            return (
                f"row {row}, node {node}: the token is {found[row, node]}: expected an id from 0 "
                f"to {target.vocab_size - 1}, or -1 for no token"
            )
        return ""

    def rows():
        state = state_of(tokens, lengths, 1.0)
        whole = drafted(params, state)
        for row in range(len(tokens)):
            alone = drafted(params, jax.tree.map(lambda x, r=row: x[r : r + 1], state))
            if not np.array_equal(alone.tokens[0], whole.tokens[row]):
                return f"row {row} drafts {alone.tokens[0]} alone, {whole.tokens[row]} in the batch"
        return ""

    def buffer():
        state = state_of(tokens, lengths, 0.0)
        beyond = jnp.arange(state.tokens.shape[1]) >= state.length[:, None]
        filled = jnp.where(beyond, (state.tokens + 1) % target.vocab_size, state.tokens)
        other = drafted(params, dataclasses.replace(state, tokens=filled))
        if not np.array_equal(other.tokens, drafted(params, state).tokens):
            return "the draft depends on the buffer's content after the last committed token"
        return ""

    def laws():
        if inputs is not None:
            return ""
        many = np.repeat(tokens[:1], draws, axis=0)
        draft = drafted(params, state_of(many, np.full(draws, tokens.shape[1]), 1.0))
        return "" if draft.laws is None else _wrong_law(draft, target.vocab_size)

    checks = []
    for name, run in (
        ("the drafter is hashable", lambda: hash(drafter) and None),
        ("shapes and dtypes of a round, the state keeps its structure", shapes),
        ("drafted tokens are ids of the vocabulary", ids),
        ("greedy output is identical to plain decoding", greedy),
        ("a row's draft does not depend on the other rows", rows),
        ("a draft depends on committed tokens alone", buffer),
        ("drawn tokens follow the laws that the draft states", laws),
    ):
        checks.append(run_check(name, run))
        if not checks[-1].passed and run is shapes:
            break
    return ContractReport(f"{type(drafter).__name__} ({drafter.name})", tuple(checks))


def _wrong_law(draft: Draft, vocab: int) -> str:
    """Returns what is wrong with the frequencies of drawn tokens, or an empty text.

    Only nodes that are the first of their siblings are tested, because their law is the stated one.
    """
    tokens, index = np.asarray(draft.tokens), np.asarray(draft.law)
    parent = np.broadcast_to(np.asarray(trees.parents(draft)), tokens.shape)
    rows = np.arange(len(tokens))
    for node in range(1, tokens.shape[1]):
        here = (parent[:, 1:node] == parent[:, node : node + 1]).any(axis=1)
        able = ~here & (index[:, node] != POINT_MASS) & (tokens[:, node] >= 0)
        if not able.any():
            continue
        q = np.zeros((len(tokens), vocab))
        stated = np.asarray(draft.laws)[rows, np.maximum(index[:, node], 0)]
        if draft.vocab is None:
            q[:] = stated
        else:
            np.add.at(q, (rows[:, None], np.asarray(draft.vocab)), stated)
        q = q[able]
        if not np.allclose(q.sum(axis=1), 1, atol=1e-3):
            return f"node {node}: its law sums to {q.sum(axis=1).min():.3g}, not to 1"
        counts = np.bincount(tokens[able, node], minlength=vocab)
        expected, variance = q.sum(axis=0), (q * (1 - q)).sum(axis=0)
        off = np.abs(counts - expected) / np.sqrt(variance + 1)
        if off.max() > SIGMAS:
            token = int(off.argmax())
            return (
                f"node {node}: token {token} was drawn {counts[token]} times in {len(q)} draws; "
                f"its law gives {expected[token]:.0f}"
            )
    return ""
