"""Runs the parts of a round alone, on inputs that were recorded in the loop.

If a part were repeated on one input, the compiler would compute it only once; and the rounds of a
drafter differ in width. So a part is timed over the inputs of several consecutive rounds, in a
compiled loop over these rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass
from ..decoding import round as one_round
from ..decoding.state import State
from ..text.task import GenerationTask
from ..types import Context, Draft, DrafterWrapper, PyTree, Scores, Segment, Verdict


@pytree_dataclass
class RoundInputs:
    """The inputs of the parts of one round, leaves ``[B, ...]``; of R rounds, ``[R, B, ...]``."""

    context: Context  # without the cache
    before: dict[str, jax.Array]  # the drafter's state before draft, by path, without its caches
    proposed: PyTree  # the drafter's state between draft and observe, without what it carries
    draft: Draft
    scores: Scores
    verdict: Verdict  # after stops and budget
    segment: Segment
    keys: jax.Array  # for the acceptance


@dataclasses.dataclass(frozen=True)
class InputRecorder(DrafterWrapper):
    """The drafter ``inner``, which also records the inputs of the round's parts in its state."""

    @property
    def reads_nodes(self) -> bool:
        return True

    def draft_step(self, params, target_params, state, context):
        draft, proposed = self.inner.draft_step(params, target_params, state, context)
        return draft, (state, proposed, dataclasses.replace(context, cache=None))

    def readout(self, draft, scores):
        return self.inner.readout(draft, scores), scores

    def observe(self, params, target_params, state, segment):
        before, proposed, context = state
        draft, verdict, (readout, scores) = segment.round
        segment = dataclasses.replace(segment, round=(draft, verdict, readout))
        carried = {path: jnp.int32(0) for path in _by_path(before)}
        inputs = RoundInputs(
            context=context,
            before={path: x for path, x in _by_path(before).items() if ".cache" not in path},
            proposed=_put(proposed, carried),
            draft=draft,
            scores=scores,
            verdict=verdict,
            segment=segment,
            keys=context.key,  # replaced by ``record_inputs``
        )
        return self.inner.observe(params, target_params, proposed, segment), inputs


def without_limits(state: State, rounds: int, depth: int) -> State:
    """Returns a state whose rows do not end within some rounds.

    Args:
      state: the state.
      rounds: the number of rounds.
      depth: the depth of the drafter's draft.

    Raises:
      ValueError: the buffers have no room for the tokens of these rounds.
    """
    most, capacity = rounds * (depth + 1), state.tokens.shape[1]
    room = capacity - int(jnp.max(state.length))
    if room < most:
        raise ValueError(
            f"{rounds} rounds of up to {depth + 1} tokens need {most} free slots, and the fullest "
            f"row has {room} of {capacity}: give fewer rounds, or a greater max_new_tokens"
        )
    return dataclasses.replace(
        state,
        budget=jnp.full_like(state.budget, most),
        stops=jnp.full_like(state.stops, -1),
    )


def record_inputs(work: GenerationTask, state: State, rounds: int) -> tuple[State, RoundInputs]:
    """Runs rounds of the loop and records the inputs of their parts.

    Args:
      work: a prepared request.
      state: the state before the rounds.
      rounds: the number of rounds, R.

    Returns:
      the state after the rounds, and their inputs, with leaves ``[R, B, ...]``.
    """
    objects, recorded = (work.lm.target, work.drafter, work.rule), []
    for _ in range(rounds):
        state, inputs = _recorded(*objects, work.params, state)
        recorded.append(inputs)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *recorded)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _recorded(target, drafter, rule, params, state):
    keys = one_round.round_keys(state, one_round.ACCEPT)
    state = one_round.run_round(target, InputRecorder(drafter), rule, params, state)
    drafter_state, inputs = state.drafter_state
    return dataclasses.replace(state, drafter_state=drafter_state), dataclasses.replace(
        inputs, keys=keys
    )


def replays(
    work: GenerationTask, state: State, rounds: int
) -> dict[str, tuple[Callable, Callable]]:
    """Returns functions that run each part of a round on recorded inputs.

    The caches of the target and of the drafter (the leaves named ``cache`` in its state) are those
    after the last round. They contain the entries that the earlier rounds saw, and the cost of a
    pass depends on the lengths, which are those of each round.

    Args:
      work: a prepared request.
      state: the state before the recorded rounds.
      rounds: the number of recorded rounds.

    Returns:
      ``{part: (run, prepare)}``: ``run(prepare())`` runs the part once for each recorded round.
    """
    objects = (work.lm.target, work.drafter, work.rule)
    final, inputs = record_inputs(work, state, rounds)
    cache, drafter_state = final.cache, final.drafter_state

    def prepared(part, carried):
        def run(copied):
            return _replayed(part, objects, work.params, cache, inputs, copied)

        return run, lambda: jax.tree.map(jnp.copy, carried)

    def commit(copied):  # the cache itself is what it is given
        return _replayed(_commit, objects, work.params, None, inputs, copied)

    return {
        "draft": prepared(_draft, drafter_state),
        "verify": prepared(_verify, ()),
        "accept": prepared(_accept, ()),
        "commit": (commit, lambda: jax.tree.map(jnp.copy, cache)),
        "observe": prepared(_observe, drafter_state),
    }


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5,))
def _replayed(part, objects, params, cache, inputs: RoundInputs, carried):
    """Runs ``part(objects, params, cache, inputs, carried) -> (carried, output)`` over all rounds.

    The last output is returned, so that all of it is computed.
    """

    def step(index, both):
        now = jax.tree.map(lambda x: x[index], inputs)
        return part(objects, params, cache, now, both[0])

    first = jax.tree.map(lambda x: x[0], inputs)
    output = jax.eval_shape(functools.partial(part, objects), params, cache, first, carried)[1]
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), output)
    rounds = jax.tree.leaves(inputs)[0].shape[0]
    return jax.lax.fori_loop(0, rounds, step, (carried, empty))


def _draft(objects, params, cache, now: RoundInputs, drafter_state):
    context = dataclasses.replace(now.context, cache=cache)
    drafter_state = _put(drafter_state, now.before)
    draft, proposed = one_round.draft_step(objects[1], params, drafter_state, context)
    found = _by_path(proposed)
    fresh = {path: leaf for path, leaf in found.items() if path not in _by_path(drafter_state)}
    return _put(drafter_state, found), (draft, fresh)


def _verify(objects, params, cache, now: RoundInputs, carried):
    live = now.context.budget > 0

    def run(draft):
        return one_round.verify(objects[0], params, cache, draft, features=objects[1].features)

    return (), one_round.in_narrowest(now.draft, live, run)


def _accept(objects, params, cache, now: RoundInputs, carried):
    return (), one_round.accept(objects[2], params, now.draft, now.scores, now.context, now.keys)


def _commit(objects, params, cache, now: RoundInputs, carried):
    start = now.segment.start
    return objects[0].commit(carried, now.scores.entries, start, now.verdict), ()


def _observe(objects, params, cache, now: RoundInputs, drafter_state):
    proposed = _put(now.proposed, _by_path(drafter_state))
    return objects[1].observe(params.get("drafter"), params["target"], proposed, now.segment), ()


def _by_path(values: PyTree) -> dict[str, jax.Array]:
    flat = jax.tree_util.tree_flatten_with_path(values)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _put(values: PyTree, leaves: dict[str, jax.Array]) -> PyTree:
    """Returns ``values`` with the leaves of ``leaves`` at their paths."""
    flat, structure = jax.tree_util.tree_flatten_with_path(values)
    return structure.unflatten([leaves.get(jax.tree_util.keystr(p), x) for p, x in flat])
