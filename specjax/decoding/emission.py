"""What a round, or the reading of a prompt, emits: the verdict cut at stop tokens and the budget,
the state after it, and the counts of rounds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from ..acceptance import walk
from ..acceptance.node_laws import TargetLaw
from ..sampling import processors
from ..types import Draft, Verdict
from .state import NO_TOKEN, SPENT, STOPPED, State
from .stats import Stats


def truncate(draft: Draft, verdict: Verdict, state: State) -> tuple[Verdict, jax.Array]:
    """Cuts a verdict at the first stop token and at the budget; rows out of budget do nothing.

    Returns:
      The verdict, and the emitted tokens int32 ``[B, D + 1]``, -1 after the last. A verdict without
      a last token (the law after its path gives no token any probability) emits the accepted
      tokens only.
    """
    steps = jnp.arange(verdict.path.shape[1])
    drafted = jnp.take_along_axis(draft.tokens, verdict.path, axis=1, mode="clip")
    drafted = jnp.concatenate([drafted[:, 1:], jnp.zeros_like(drafted[:, :1])], axis=1)
    tokens = jnp.where(steps == verdict.count[:, None], verdict.token[:, None], drafted)
    stop = jnp.any(tokens[:, :, None] == state.stops[:, None, :], axis=-1)
    before = jnp.cumsum(stop, axis=1) - stop  # stops strictly before each token
    emitted = (steps <= verdict.count[:, None]) & (before == 0) & (steps < state.budget[:, None])
    emitted &= tokens >= 0
    num = jnp.sum(emitted, axis=1).astype(jnp.int32)
    last = walk.at_node(tokens, jnp.maximum(num - 1, 0))
    none = num == 0
    kept = dataclasses.replace(
        verdict, count=jnp.where(none, -1, num - 1), token=jnp.where(none, -1, last)
    )
    return kept, jnp.where(emitted, tokens, -1)


def path_logprobs(p: TargetLaw, which: str, path: jax.Array, emitted: jax.Array) -> jax.Array:
    """float32 ``[B, D + 1]``, of each emitted token at its node; only visited nodes are computed.

    ``which``: ``raw``, the log-softmax of the model's logits; ``law``, the logarithm of p.
    """

    def visit(step, said):
        node, token = path[:, step], jnp.maximum(emitted[:, step], 0)[:, None]
        if which == "law":
            there = jnp.take_along_axis(p(node), token, axis=1)[:, 0]
            value = jnp.log(there)
        else:
            logits = walk.at_node(p.logits, node)
            there = jnp.take_along_axis(logits, token, axis=1)[:, 0]
            value = there - jax.nn.logsumexp(logits, axis=-1)
        return said.at[:, step].set(value)

    steps = jnp.max(jnp.sum(emitted >= 0, axis=1))
    return jax.lax.fori_loop(0, steps, visit, jnp.zeros(emitted.shape, jnp.float32))


def places(state: State, emitted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column in ``state.tokens`` of tokens ``[B, T]`` that follow the root; column L, which
    does not exist and is dropped, where they are -1."""
    steps = jnp.arange(emitted.shape[1])
    where = jnp.where(emitted >= 0, state.length[:, None] + steps, state.tokens.shape[1])
    return jnp.arange(where.shape[0])[:, None], where


def emitted_state(
    params, state: State, full: Verdict, verdict: Verdict, emitted, logprobs
) -> State:
    """``state`` after the tokens ``emitted``, int32 ``[B, T]``: all but its caches and counters.

    Args:
      full: the rule's verdict.
      verdict: the same, cut at stop tokens and the budget.
      logprobs: float32 ``[B, T]`` of the emitted tokens, or None.
    """
    num = verdict.count + 1
    rows, where = places(state, emitted)
    stopped = jnp.any(verdict.token[:, None] == state.stops, axis=1) & (num > 0)
    # nothing to draw from, unless the row would have ended before
    lost = (full.count >= 0) & (full.token < 0) & (num == full.count) & (state.budget > num)
    lost &= ~stopped
    budget = jnp.where(stopped | lost, 0, state.budget - num)
    ended = jnp.where(stopped, STOPPED, jnp.where(lost, NO_TOKEN, SPENT))
    processed, said = state.processor_state, state.logprobs
    if processed is not None:
        processed = processors.advance_processor(
            state.sampling.logits_processor, params.get("logits_processor"), processed, emitted
        )
    if said is not None:
        said = said.at[rows, where].set(logprobs, mode="drop")
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(emitted, mode="drop"),
        length=state.length + num,
        budget=budget,
        ended=jnp.where((state.budget > 0) & (budget == 0), ended, state.ended),
        processor_state=processed,
        logprobs=said,
        num_empty_rounds=jnp.where(num > 0, 0, state.num_empty_rounds + (state.budget > 0)),
    )


def update_stats(state: State, draft: Draft, num, from_draft) -> Stats:
    """The statistics after a round in which each row emitted ``num`` int32 ``[B]`` tokens, those at
    ``from_draft`` bool ``[B, D + 1]`` out of the draft."""
    stats, live = state.stats, (state.budget > 0).astype(jnp.int32)
    accepted = from_draft[:, : stats.accepted_at.shape[1]].astype(jnp.int32)
    candidates = walk.eligible(draft)
    # a node that could only stand beyond the budget is not held against the drafter
    depth = trees.depths(draft)
    reachable = candidates & (depth <= state.budget[:, None]) & (num > 0)[:, None]
    positions = jnp.arange(1, accepted.shape[1] + 1)
    drafted = jnp.any(reachable[:, None] & (depth[:, None] == positions[:, None]), axis=2)
    passengers, riding = stats.passengers, walk.passengers(draft)
    if riding is not None:
        passengers += jnp.sum(riding, axis=1, dtype=jnp.int32) * live
    hidden = stats.hidden
    if draft.hidden is not None:
        hidden += draft.hidden.astype(jnp.int32) * live
    return dataclasses.replace(
        stats,
        rounds=stats.rounds + live,
        emitted=stats.emitted + num,
        drafted=stats.drafted + jnp.sum(reachable, axis=1, dtype=jnp.int32),
        accepted=stats.accepted + jnp.sum(accepted, axis=1, dtype=jnp.int32),
        passengers=passengers,
        drafted_at=stats.drafted_at + drafted,
        accepted_at=stats.accepted_at + accepted,
        hidden=hidden,
    )
