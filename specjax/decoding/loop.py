"""The loop: rounds in one compiled ``lax.while_loop``.

``decode`` runs it to the end; ``start`` and ``burst`` run the same rounds a few at a time, which
is what streaming does. ``round.py`` is what happens in one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import sharding
from .._internal.own_arithmetic import own_arithmetic
from ..types import Drafter, PyTree, Target
from . import contract_checks as checks
from .inputs import DecodeInputs, warn_capacity
from .options import DecodeOptions, StreamOptions, takes
from .prefill import extend, start
from .round import run_empty_round, run_round
from .state import Decoded, State, end, result


@own_arithmetic
def burst(target, drafter, rule, rounds, params, state: State, live=1) -> State:
    """At most ``rounds`` rounds (None: as many as it takes), one ``while_loop``; it ends when
    fewer than ``live`` rows run."""

    def going(carry):
        done, state, _ = carry
        more = jnp.sum(state.budget > 0) >= live
        return more if rounds is None else more & (done < rounds)

    def begin(done, state, plan=None):
        if not drafter.plans:
            return done, state, None
        own = params.get("drafter")
        made = drafter.plan(own, params["target"], state.drafter_state, state.budget)
        if plan is not None:
            checks.check_same(f"{type(drafter).__name__}.plan", made, plan)
        return done, state, made

    def step(run, carry):
        done, state, plan = carry
        after = run(target, drafter, rule, params, state, plan)
        hook = f"{type(drafter).__name__}.observe: the state"
        checks.check_same(hook, after.drafter_state, state.drafter_state)
        return begin(done + 1, after, plan)

    def turns(carry):
        """Rounds without a draft, then rounds with one: a branch would copy the caches."""
        for run, resting in ((run_empty_round, True), (run_round, False)):

            def wanted(carry, resting=resting):
                return going(carry) & (checks.rests(drafter, carry[2]) == resting)

            carry = jax.lax.while_loop(wanted, functools.partial(step, run), carry)
        return carry

    body = turns if drafter.plans else functools.partial(step, run_round)
    return jax.lax.while_loop(going, body, begin(jnp.int32(0), state))[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(target, drafter, rule, capacity, params, request):
    state = start(target, drafter, rule, capacity, params, request)
    return result(burst(target, drafter, rule, None, params, state))


jit_start = jax.jit(start, static_argnums=(0, 1, 2, 3, 6))
# rounds are an argument, not part of the program: bursts of any length share one compilation
jit_burst = jax.jit(burst, static_argnums=(0, 1, 2), donate_argnums=(5,))
jit_extend = jax.jit(extend, static_argnums=(0, 1, 2), donate_argnums=(4,))
jit_end = jax.jit(end, donate_argnums=(0,))


@takes(DecodeOptions)
def decode(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    options: DecodeOptions,
) -> Decoded:
    """Generates until every row has met a stop or spent its budget, in one compiled loop.

    Args:
      target, drafter: hashable objects that implement the protocols of ``specjax.types``.
      params: ``{"target": ..., "drafter": ...}`` (and ``"rule"`` for rules that learn).
      tokens: int32 ``[B, T]``, prompts padded on the right with anything.
      lengths: int32 ``[B]``, tokens of each prompt, from 1 to T. Within your own ``jit``, neither
        lengths nor ids can be checked: a length beyond T, or an id outside of the vocabulary, is
        not refused there and gives a wrong text. Check them outside, or clip them.
      key: one random key (rows get keys of their own from it, by their index), or keys ``[B]``.
        A row's text depends on its key, prompt and settings alone, not on its batch mates (sampled
        text of an ``Adaptive`` drafter: on its costs and the batch's width as well).
      max_new_tokens: an int, or int32 ``[B]``; may be traced if ``capacity`` is given.
      sampling: the law; ``Sampling()`` is greedy.
      rule: an acceptance rule's name or object; ``auto`` is lossless and chosen by the draft.
      capacity: slots ``L`` of the token buffer; default ``T + max(max_new_tokens)``, if need be
        less, up to the target's context. A row that fills it ends there.
      stops: token ids that end a row (they are kept): ``[E]`` for all rows or ``[B, E]``, padded
        with -1.
      inputs: encoder memory or the like, passed to ``init`` of target and drafter.
      mesh: devices to decode on, with axes ``data`` and ``model`` (see ``sharding.as_mesh``):
        rows go over the one, weights, caches and vocabulary over the other. Default: the mesh in
        use (``jax.set_mesh``), if any. Several processes call this alike, and each reads all of
        the result with ``sharding.gather``.
      logprobs: whether to return the logarithms (natural) of the emitted tokens' probabilities.
        ``True`` or ``"raw"``: of the model itself, the log-softmax of its logits before any
        setting, what vLLM returns; ``"law"``: of p, the law they were drawn from, all settings
        applied (at temperature 0 p is a point mass: 0).
      num_samples: rows a prompt, which is read once. Rows ``i * num_samples ...`` belong to prompt
        ``i``; each has the key that it would have were the prompts given so often.

    Returns:
      ``Decoded``. It can be called within your own ``jit``, ``scan`` or mesh. ``vmap`` over keys
      gives each lane the text of its key, but takes longer than the same rows in one batch: XLA
      then copies the caches in each round, to keep those of lanes that have ended. The loop is
      traced in 32 bits also where your program sets ``jax_enable_x64``. Within ``pmap``, or
      ``shard_map(..., check_vma=False)`` over all axes of a mesh, each device decodes rows of its
      own.

    Raises:
      ValueError: before anything is compiled, naming the argument and the way out. Where an
        argument is traced, only its shape and dtype are checked.

    Example::

        out = specjax.decode(
            target, specjax.drafters.NGram(num_draft=4), {"target": weights},
            tokens, lengths, key=jax.random.key(0), max_new_tokens=64,
        )
        text_ids = out.tokens[0, : out.lengths[0]]
    """
    ready = _ready(target, drafter, params, tokens, lengths, options)
    with sharding.using(ready.mesh, ready.params):
        return _decode(target, drafter, options.rule, ready.capacity, ready.params, ready.request)


@takes(StreamOptions)
def stream(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    options: StreamOptions,
) -> Iterator[Decoded]:
    """The same as ``decode``, as a generator: yields ``Decoded`` after every burst of rounds.

    Each ``Decoded`` holds all that is committed so far; the first comes before any round. Ends
    when every row has.

    Args:
      tokens: int32 ``[B, T]``.
      lengths: int32 ``[B]``.
      target, drafter, params, key, ...: as ``decode`` takes them.
      rounds: how many rounds one compiled burst runs, at least 1.

    Returns:
      An iterator over ``Decoded``, whose arrays are copies.

    Raises:
      ValueError: as ``decode`` does, before the first ``Decoded``.
    """
    rounds, rule = options.rounds, options.rule
    if not isinstance(rounds, int | np.integer) or rounds < 1:
        raise ValueError(
            f"rounds={rounds!r}: it must be an integer, at least 1: a burst without rounds never "
            "ends"
        )
    ready = _ready(target, drafter, params, tokens, lengths, options)

    def bursts():
        with sharding.using(ready.mesh, ready.params):
            state = jit_start(target, drafter, rule, ready.capacity, ready.params, ready.request)
        while True:
            # copies: the state itself is donated to the next burst
            yield jax.tree.map(jnp.copy, result(state))
            if not bool(jnp.any(state.budget > 0)):
                return
            with sharding.using(ready.mesh, ready.params):
                state = jit_burst(target, drafter, rule, rounds, ready.params, state)

    return bursts()


class _Ready(NamedTuple):
    """A checked request with its weights, on the devices of ``mesh``; ``capacity`` is L."""

    request: DecodeInputs
    capacity: int
    mesh: jax.sharding.Mesh | None
    params: PyTree


def _ready(target, drafter, params, tokens, lengths, options: DecodeOptions) -> _Ready:
    """What ``decode`` was given, checked and placed."""
    request, capacity = options.prepare(target, drafter, tokens, lengths)
    warn_capacity(lengths, options.max_new_tokens, options.capacity, target)
    mesh = sharding.as_mesh(options.mesh)
    params, request = sharding.place(mesh, target, drafter, params, request)
    return _Ready(request, capacity, mesh, params)
