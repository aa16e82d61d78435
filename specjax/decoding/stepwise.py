"""One round at a time, outside the compiled loop: for looking at what happens, and for research.

A round is ``round_context``, ``draft_step``, ``verify``, ``accept`` and ``commit_round``. All are
pure::

    params = {"target": weights, "drafter": drafter_weights}
    state = specjax.init_state(
        target, drafter, params, tokens, lengths, key=jax.random.key(0), max_new_tokens=32
    )
    while (state.budget > 0).any():
        context = specjax.round_context(params, state)
        draft, proposed = specjax.draft_step(drafter, params, state.drafter_state, context)
        scores = specjax.verify(target, params, state.cache, draft, features=drafter.features)
        keys = specjax.acceptance_keys(state)
        verdict = specjax.accept("auto", params, draft, scores, context, keys)
        verified = specjax.VerifiedRound(
            context=context, draft=draft, proposed=proposed, scores=scores, verdict=verdict
        )
        state = specjax.commit_round(target, drafter, params, state, verified)

``step`` does all of it. The tokens, ``state.tokens[:, :state.length]``, are those of ``decode``.
"""

from __future__ import annotations

import jax

from .. import sharding
from ..types import Drafter, PyTree, Rule, Target
from .loop import jit_start
from .options import StateOptions, takes
from .round import run_round
from .state import State


@takes(StateOptions)
def init_state(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    options: StateOptions,
) -> State:
    """Reads the prompts and returns the state before the first round, with the first token of each
    row, which the pass over the end of its prompt emits.

    Args:
      tokens: int32 ``[B, T]``.
      lengths: int32 ``[B]``.
      target, drafter, params, key, ...: as ``decode`` takes them; there is no ``mesh``.

    Returns:
      ``State``: ``tokens`` int32 ``[B, L]`` of which ``length`` int32 ``[B]`` are committed,
      ``budget`` int32 ``[B]`` (0: the row has ended), ``cache``, ``drafter_state``, ``stats``.

    Raises:
      ValueError, TypeError: before anything is compiled, as ``decode`` does.
    """
    request, slots = options.prepare(target, drafter, tokens, lengths)
    with sharding.using(None, params):
        return jit_start(target, drafter, options.rule, slots, params, request)


def step(
    target: Target, drafter: Drafter, params: PyTree, state: State, rule: str | Rule = "auto"
) -> State:
    """Runs one round: draft, verify, accept, commit. Rows that have ended stay as they are. Pure.

    Under ``jax.jit`` target, drafter and rule are static: ``jax.jit(step, static_argnums=(0, 1,
    4))``.

    Args:
      target, drafter, params: as ``decode`` takes them.
      state: from ``init_state``, or from the step before.
      rule: the acceptance rule that ``init_state`` was given, a name or an object.

    Returns:
      ``State`` of the same structure, shapes and dtypes: in each row up to D + 1 tokens more in
      ``tokens`` int32 ``[B, L]``, ``length`` int32 ``[B]``, and ``budget`` int32 ``[B]`` (0: the
      row has ended).

    Raises:
      ValueError: while tracing: a draft that the rule does not judge, a rule that the state was not
        made for, or hooks that return other shapes or dtypes than they must.
    """
    with sharding.using(None, params):
        return run_round(target, drafter, rule, params, state)
