"""The state of the loop, and its result."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import acceptance
from .._internal.pytree import pytree_dataclass, static
from ..sampling import processors
from ..sampling.distribution import Sampling
from ..types import Drafter, PyTree, Target
from . import stats as statistics
from .inputs import KEYS, DecodeInputs
from .stats import Stats

# why a row ended: it runs, met a stop, spent its budget, or its law gave no token a probability
ENDED = ("", "stop", "length", "no token")
RUNNING, STOPPED, SPENT, NO_TOKEN = range(len(ENDED))


@pytree_dataclass
class Decoded:
    """What ``decode`` and ``stream`` return: the prompts with all that was generated.

    Attributes:
      tokens: int32 ``[B, L]``, prompts and generated tokens; zeros after ``lengths``.
      lengths: int32 ``[B]``, committed tokens of each row, the prompt's included.
      from_draft: bool ``[B, L]``, the token was drafted and accepted (else: the target's own).
      ended: int32 ``[B]``, why the row ended: an index into ``state.ENDED``, 0 while the row runs.
      stats: the counters of all rows.
      logprobs: float32 ``[B, L]``, natural logarithms, 0 on the prompt; None if not asked for.
    """

    tokens: jax.Array
    lengths: jax.Array
    from_draft: jax.Array
    ended: jax.Array
    stats: Stats
    logprobs: jax.Array | None = None


@pytree_dataclass
class State:
    """All that the loop carries; every leaf leads with B.

    Evolving: tokens, length, budget (0: finished), num_empty_rounds (since the row last emitted),
    cache (the target's), drafter_state, processor_state (what a logits processor carries).
    Constant: begin (where what is generated begins), key, sampling, stops. Output: from_draft,
    ended, stats, logprobs (or None). Static: logprobs_of, noise (of the rule, ``Rule.noise``).
    """

    tokens: jax.Array
    length: jax.Array
    budget: jax.Array
    num_empty_rounds: jax.Array
    cache: PyTree
    drafter_state: PyTree
    key: jax.Array
    sampling: Sampling
    stops: jax.Array
    begin: jax.Array
    from_draft: jax.Array
    ended: jax.Array
    stats: Stats
    processor_state: PyTree = None
    logprobs: jax.Array | None = None
    logprobs_of: str = static(default="")
    noise: str | None = static(default=None)


def initial_state(
    target: Target,
    drafter: Drafter,
    rule,
    params,
    tokens,
    length,
    cache: PyTree,
    drafter_state: PyTree,
    request: DecodeInputs,
) -> State:
    """The state before the first round."""
    batch, capacity = tokens.shape
    sampling = request.sampling
    known = acceptance.named(rule)
    reasons = [
        target.approximate,
        "" if known is None or acceptance.exact(known, sampling.greedy) else f"rule {known.name}",
    ]
    names = dict(
        drafter=drafter.name,
        rule=rule if isinstance(rule, str) else rule.name,
        approximate=", ".join(filter(None, reasons)),
    )
    budget = jnp.minimum(request.budget, capacity - length)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return State(
        tokens=tokens,
        length=length,
        budget=budget,
        num_empty_rounds=jnp.zeros((batch,), jnp.int32),
        cache=cache,
        drafter_state=drafter_state,
        key=jax.random.wrap_key_data(jnp.zeros((batch, 2), jnp.uint32), impl=KEYS),
        sampling=sampling,
        stops=request.stops,
        begin=length,
        from_draft=jnp.zeros(tokens.shape, bool),
        ended=jnp.where(budget > 0, RUNNING, SPENT),
        stats=statistics.start(batch, drafter.depth, **names),
        processor_state=processors.initial_processor_state(
            sampling.logits_processor, params.get("logits_processor"), tokens, length
        ),
        logprobs=zeros if request.logprobs else None,
        logprobs_of=request.logprobs,
        noise=None if known is None or sampling.greedy else known.noise,
    )


def end(state: State, rows: jax.Array) -> State:
    """Ends ``rows`` (bool ``[B]``) as if they had met a stop: they cost nothing more."""
    return dataclasses.replace(
        state,
        budget=jnp.where(rows, 0, state.budget),
        ended=jnp.where(rows, STOPPED, state.ended),
    )


def result(state: State) -> Decoded:
    return Decoded(
        tokens=state.tokens,
        lengths=state.length,
        from_draft=state.from_draft,
        ended=state.ended,
        stats=state.stats,
        logprobs=state.logprobs,
    )
