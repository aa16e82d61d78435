"""Continuous rows: a new prompt takes the place of a finished row, and the loop goes on.

Every leaf of a state leads with B and no row reads another's, so a row is replaced by overwriting
its slice of each leaf. The new prompts are read apart from the batch, as a small one of their own:
a row that comes costs its own prompt and a copy of its own cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import sharding
from .._internal.own_arithmetic import own_arithmetic
from . import loop, prefill
from .inputs import KEYS, DecodeInputs
from .prefill import PREFILL_CHUNK
from .state import State, end

REPORT = ("length", "ended", "rounds", "drafted", "accepted")


@own_arithmetic
def insert(
    target,
    drafter,
    rule,
    params,
    state: State,
    rows,
    request: DecodeInputs,
    chunk: int = PREFILL_CHUNK,
) -> State:
    """``state`` with prompts of ``request`` in place of the rows ``rows``; the others stay as they
    are, bit by bit: tokens, caches, keys, statistics.

    An inserted row is what ``prefill.start`` makes of its prompt, so its text is the one that the
    prompt has in any batch, alone included, to the last bits of the products. What an ``Adaptive``
    drafter has for the whole batch (pauses between probes) comes from the rows that run.

    Args:
      rows: int32 ``[K]``, each row at most once; what is not below B is left out, so that fewer
        prompts than K can be inserted by the same program.
      request: of K rows, with settings of the same kind as the state's (greedy or sampled, the
        same ones None) and as many stops.

    Raises:
      ValueError: when it is traced, for settings of another kind.
    """
    capacity = state.tokens.shape[1]
    fresh = prefill.start(target, drafter, rule, capacity, params, request, chunk=chunk)
    alike = jax.tree.structure(fresh) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(state), strict=alike)
    if not alike or any(new.shape[1:] != old.shape[1:] for new, old in pairs):
        raise ValueError(
            "insert: the request has settings of another kind than the batch that it joins: give "
            f"what it has (greedy={state.sampling.greedy}, the same settings, as many stops)"
        )
    rows = jnp.asarray(rows, jnp.int32)
    after = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, fresh)
    return sharding.rows(after)


@own_arithmetic
def turn(
    target,
    drafter,
    rule,
    params,
    state: State,
    over,
    coming: tuple[jax.Array, DecodeInputs] | None,
    rounds,
    live,
    chunk: int = PREFILL_CHUNK,
) -> tuple[State, jax.Array]:
    """What a scheduler wants between two looks at its batch, in one program: ``state.end``,
    ``insert``, ``loop.burst``.

    Args:
      over: bool ``[B]``, rows that end where they are.
      coming: rows and request as ``insert`` takes them, but for the request's keys, which are
        bare: uint32 ``[K, 2]``. None: nobody comes.
      rounds, live: as ``loop.burst`` takes them.

    Returns:
      the state, and its ``report``.
    """
    state = end(state, over)
    if coming is not None:
        rows, request = coming
        request = dataclasses.replace(request, key=jax.random.wrap_key_data(request.key, impl=KEYS))
        state = insert(target, drafter, rule, params, state, rows, request, chunk)
    state = loop.burst(target, drafter, rule, rounds, params, state, live)
    return state, report(state)


def report(state: State) -> jax.Array:
    """int32 ``[B, len(REPORT)]``: what is worth a look after every burst."""
    said = [state.length, state.ended, *(getattr(state.stats, name) for name in REPORT[2:])]
    return jnp.stack(said, axis=1)


jit_turn = jax.jit(turn, static_argnums=(0, 1, 2, 9), donate_argnums=(4,))
jit_report = jax.jit(report)
