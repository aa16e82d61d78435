"""Tries a round from every position of a text, to count the drafted and the accepted tokens there.

The rounds in which a text was decoded show only the positions that became roots, and these depend
on the length of the drafts. The planner also needs the other positions, for drafts of other
lengths.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...decoding.state import State
from ...drafters.cascade_levels import draft_models
from ...drafters.heads import HeadDrafter
from ...models.causal_lm import CausalLM
from ...sampling import processors
from ...text.task import GenerationTask
from .predict import AcceptanceRecord


def check_rewinds(work: GenerationTask) -> None:
    """Checks whether a state can be set back to an earlier token of its text.

    Args:
      work: a prepared request.

    Raises:
      ValueError: a layer's window is shorter than the text, so that its cache has overwritten
        earlier entries, or a logits processor carries a state.
    """
    target, drafter, request = work.lm.target, work.drafter, work.request
    models = (target, *draft_models(drafter))
    longest = int(np.max(request.lengths + request.budget)) + drafter.num_draft
    for model in (part for whole in models for part in (whole, *whole.parts)):
        if not isinstance(model, CausalLM):
            continue
        config = model.config
        if config.overwrites(longest):
            windows = map(config.window_of, range(config.num_layers))
            raise ValueError(
                f"plan: a text of {longest} tokens with its last draft is longer than the window "
                f"of {min(w for w in windows if w is not None)} that {config.model_type} attends "
                "to, and planning goes back in the text; give shorter prompts or a smaller "
                "max_new_tokens"
            )
    if _carries_state(work):
        raise ValueError(
            "plan: a logits processor with a state is not supported, because planning goes back "
            "in the text; leave logits_processor= out"
        )


def _carries_state(work: GenerationTask) -> bool:
    """Returns whether the request has a logits processor with a state; traces only."""
    make = functools.partial(
        processors.initial_processor_state, work.request.sampling.logits_processor
    )
    arrays = work.params.get("logits_processor")
    state = jax.eval_shape(make, arrays, work.request.tokens, work.request.lengths)
    return state is not None


def try_rounds(work: GenerationTask, state: State) -> AcceptanceRecord:
    """Tries a round of a request from every position of its text after the first token, which the
    pass over the end of the prompt emits.

    Positions are tried from the last to the first, because a round reads only the text and the
    entries of the caches before its root, and writes after them. This holds for drafters whose
    state is a cache, or that have no state. Heads, and all that reads the target's hidden states,
    need the state of the token before the root, which is known only after that token was committed;
    for these, positions are tried from the first to the last.

    Args:
      work: the request.
      state: the state at the end of the request's text.

    Returns:
      the proposed and accepted tokens at each position, for each row.
    """
    if work.drafter.features or isinstance(work.drafter, HeadDrafter):
        return _try_in_order(work, state)
    begins = np.asarray([len(prompt) for prompt in work.prompts]) + 1
    ends = np.maximum(np.asarray(state.length) - begins, 0)  # tokens of each row's rounds
    depth, batch = work.drafter.depth, len(begins)
    proposed = np.zeros((batch, ends.max()), np.int64)
    accepted = np.zeros_like(proposed)
    state = dataclasses.replace(state, stops=jnp.full_like(state.stops, -1))
    for at in reversed(range(proposed.shape[1]) if depth else ()):
        live = at < ends
        zeros = dict.fromkeys(("drafted", "accepted"), np.zeros(batch, np.int32))
        fresh = jax.device_put(
            dict(
                length=(begins + np.minimum(at, ends)).astype(np.int32),
                budget=np.where(live, depth + 1, 0).astype(np.int32),
                num_empty_rounds=np.zeros(batch, np.int32),
                stats=zeros,
            )
        )
        stats = dataclasses.replace(state.stats, **fresh.pop("stats"))
        state = work.burst(1, dataclasses.replace(state, stats=stats, **fresh))
        proposed[:, at] = state.stats.drafted
        accepted[:, at] = state.stats.accepted
    return _cut(proposed, accepted, ends)


def _try_in_order(work: GenerationTask, state: State) -> AcceptanceRecord:
    """Returns the result of ``try_rounds`` for what reads the target's hidden states.

    At each position a whole round is tried on a copy of the state, and a round with a budget of one
    token continues the text. Above temperature 0 the tokens are drawn anew.
    """
    ends = np.asarray(state.length) - [len(prompt) + 1 for prompt in work.prompts]
    ends = np.maximum(ends, 0)
    proposed = np.zeros((len(ends), ends.max()), np.int64)
    accepted = np.zeros_like(proposed)
    state = work.start()
    state = dataclasses.replace(state, stops=jnp.full_like(state.stops, -1))

    def round_of(state: State, budget: np.ndarray) -> State:
        zero = jnp.zeros(len(ends), jnp.int32)
        stats = dataclasses.replace(state.stats, drafted=zero, accepted=zero.copy())
        asked = jnp.asarray(budget, jnp.int32)
        return work.burst(1, dataclasses.replace(state, stats=stats, budget=asked))

    for at in range(ends.max()):
        live = at < ends
        tried = round_of(jax.tree.map(jnp.copy, state), np.where(live, work.drafter.depth + 1, 0))
        proposed[:, at], accepted[:, at] = tried.stats.drafted, tried.stats.accepted
        state = round_of(state, live)
    return _cut(proposed, accepted, ends)


def _cut(proposed: np.ndarray, accepted: np.ndarray, ends: np.ndarray) -> AcceptanceRecord:
    """Returns the counts of each row, up to the end of its text."""
    return AcceptanceRecord(
        proposed=[row[:end] for row, end in zip(proposed, ends, strict=True)],
        accepted=[row[:end] for row, end in zip(accepted, ends, strict=True)],
    )
