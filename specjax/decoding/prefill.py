"""Reading prompts: the caches of target and drafter are filled, chunk by chunk."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import acceptance, kernels, sharding, trees
from .._internal.ordering import after
from .._internal.own_arithmetic import own_arithmetic
from ..kernels import prompts
from ..kernels.interface import PREFILL_CHUNK
from ..kernels.quantized import is_quantized
from ..types import Context, Draft, HeadTarget, PyTree, Scores, Segment, Verdict
from . import contract_checks as checks
from . import round as rounds
from . import state as states
from .emission import emitted_state, truncate
from .inputs import DecodeInputs
from .state import State


def chunk_for(params: PyTree) -> int:
    """Prompt tokens to feed at once to a target with these weights."""
    return kernels.of(params).prefill_chunk(_weights(params))


def _weights(params: PyTree) -> list:
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)  # a module wraps its weights
    return [w[...] if is_quantized(w) else w for w in leaves]


@own_arithmetic
def start(
    target,
    drafter,
    rule,
    capacity,
    params,
    request: DecodeInputs,
    chunk: int = PREFILL_CHUNK,
    hidden: bool = True,
) -> State:
    """Fills the caches from the prompts, in chunks that bound the memory, and emits the token after
    each prompt, for which the pass over its end has the logits.

    ``hidden``: whether a drafter that ``reads_last`` sees only the end of a prompt.

    With ``request.num_samples`` above 1 each prompt is read once; its row is then repeated, with a
    key of its own for each sample.
    """
    prompt, lengths, inputs = request.tokens, request.lengths, request.inputs
    batch, width = prompt.shape
    tokens = jnp.pad(prompt[:, :capacity], ((0, 0), (0, max(0, capacity - width))))
    tokens = jnp.where(jnp.arange(capacity) < lengths[:, None], tokens, 0)
    checks.check_params(params)
    with checks.missing_target_params(params, target):
        cache = target.init(params["target"], batch, capacity, inputs)
    checks.check_leads(f"{type(target).__name__}.init: the cache", cache, batch)
    own = params.get("drafter")
    with checks.missing_params(params, drafter):
        drafter_state = drafter.init(own, params["target"], batch, capacity, inputs)
    checks.check_leads(f"{type(drafter).__name__}.init: the state", drafter_state, batch)
    if drafter.features and isinstance(target, HeadTarget):
        checks.check_head_target(target, params["target"], batch)
    cache, drafter_state = sharding.rows((cache, drafter_state))
    begin = jnp.zeros((batch,), jnp.int32)
    state = states.initial_state(
        target, drafter, rule, params, tokens, lengths, cache, drafter_state, request
    )
    chunk = min(chunk, width, capacity)
    return _read(target, drafter, rule, params, state, request, begin, chunk, hidden)


def unanswered(
    target, drafter, rule, capacity, params, request: DecodeInputs, chunk: int = PREFILL_CHUNK
) -> State:
    """``start`` without the first token: the first round drafts and judges it. A lossless rule
    decides no token of ``start``, so this is how all tokens of a text are seen to obey it."""
    nothing = dataclasses.replace(request, budget=jnp.zeros_like(request.budget))
    state = start(target, drafter, rule, capacity, params, nothing, chunk, hidden=False)
    return resumed(state, request.budget)


def resumed(state: State, budget: jax.Array) -> State:
    """``state``, whose rows ended before their first token, with the budget int32 ``[B]`` of each
    prompt."""
    budget = jnp.repeat(budget, len(state.length) // len(budget))
    budget = jnp.minimum(budget, state.tokens.shape[1] - state.length)
    ended = jnp.where(budget > 0, states.RUNNING, states.SPENT)
    return dataclasses.replace(state, budget=budget, ended=ended)


@own_arithmetic
def extend(target, drafter, rule, params, state: State, request: DecodeInputs) -> State:
    """Appends ``request.tokens`` to the rows of a state, and starts again with its settings.

    The target reads only the root and these tokens, since the caches are kept, and emits the token
    after them. The caller must refuse what does not fit into the buffer; ``request.inputs`` are
    those of the start.
    """
    more, width = request.tokens, request.tokens.shape[1]
    capacity = state.tokens.shape[1]
    steps = jnp.arange(width)
    where = jnp.where(steps < request.lengths[:, None], state.length[:, None] + steps, capacity)
    rows = jnp.arange(more.shape[0])[:, None]
    tokens = state.tokens.at[rows, where].set(more, mode="drop")
    context = Context(
        tokens=state.tokens,
        length=state.length,
        budget=request.budget,
        key=request.key,
        sampling=request.sampling,
    )
    own = params.get("drafter")
    drafter_state = drafter.sync(
        own, params["target"], state.drafter_state, context, before="prompt"
    )
    checks.check_same(
        f"{type(drafter).__name__}.sync: the state", drafter_state, state.drafter_state
    )
    begin, length = state.length - 1, state.length + request.lengths
    state = states.initial_state(
        target, drafter, rule, params, tokens, length, state.cache, drafter_state, request
    )
    chunk = min(PREFILL_CHUNK, width + 1)
    return _read(target, drafter, rule, params, state, request, begin, chunk)


def _read(
    target,
    drafter,
    rule,
    params,
    state: State,
    request: DecodeInputs,
    begin,
    chunk: int,
    hidden=True,
) -> State:
    """Reads the tokens from ``begin``, int32 ``[B]``, on, and emits the token after them.

    The pass over the last of them, 1 to ``chunk`` tokens, scores the root as well. A target that
    gives no logits of single nodes reads the root alone, and so does one whose prompts have several
    samples, each of which has another token after it.
    """
    samples = request.num_samples
    last = chunk if target.picks_logits and samples == 1 else 1
    rest = begin + (state.length - begin - 1) // last * last

    def chunks(index, carry):
        at = jnp.minimum(begin + index * chunk, rest)
        cache, seen = carry
        unseen = hidden and drafter.reads_last
        given = target, drafter, params, state.tokens, cache, seen
        return _show(*given, at, rest, chunk, unseen)

    count = (jnp.max(rest - begin) + chunk - 1) // chunk
    read = jax.lax.fori_loop(0, count, chunks, (state.cache, state.drafter_state))
    state = dataclasses.replace(state, cache=read[0], drafter_state=read[1])
    piece = _piece(state.tokens, rest, state.length, last)
    root = state.length - 1 - rest
    asked = dict(features=drafter.features, logits=root if last > 1 else True)
    with checks.missing_target_params(params, target), prompts.reading():
        scores = checks.verified(target, params["target"], state.cache, piece, **asked)
    if samples > 1:
        repeat = functools.partial(jnp.repeat, repeats=samples, axis=0)
        state, scores, root = jax.tree.map(repeat, (state, scores, root))
        piece = _piece(state.tokens, state.length - 1, state.length, last)
    state = dataclasses.replace(state, key=request.key)
    return _answered(target, drafter, rule, params, state, piece, scores, root)


def _answered(
    target, drafter, rule, params, state: State, piece: Draft, scores: Scores, root
) -> State:
    """``state`` with the token after its root, which is node ``root``, int32 ``[B]``, of the end of
    its prompt."""
    batch, size = piece.tokens.shape
    context = rounds.round_context(params, state)
    alone = trees.chain_draft(context, jnp.zeros((batch, 0), jnp.int32))
    judged = dataclasses.replace(scores, features=None, entries=None)
    judge = judge_of_first(rule, state)
    full, logprobs = rounds.judged(judge, params, state, alone, judged, context)
    verdict, emitted = truncate(alone, full, state)
    steps = jnp.arange(size, dtype=jnp.int32)
    num = root + 1 + verdict.count  # a row that emits nothing keeps its root unread
    kept = Verdict(path=jnp.broadcast_to(steps, (batch, size)), count=num - 1, token=verdict.token)
    cache = checks.committed(target, state.cache, scores.entries, piece.start, kept)
    following = _tokens_at(state.tokens, piece.start + 1, size)
    segment = Segment(
        tokens=piece.tokens,
        next=jnp.where(steps == root[:, None], emitted, following),
        features=scores.features,
        start=piece.start,
        num=num,
    )
    drafter_state = _observed(drafter, params, state.drafter_state, segment)
    after = emitted_state(params, state, full, verdict, emitted, logprobs)
    return sharding.rows(dataclasses.replace(after, cache=cache, drafter_state=drafter_state))


def judge_of_first(rule, state: State):
    """The rule that takes the first token from the target's law: that of the loop where its law is
    its own, also without a draft (approximate rules), or where its noise decides (``coupled``)."""
    known = acceptance.named(rule)
    exact = known is None or acceptance.exact(known, state.sampling.greedy)
    return "auto" if exact and state.noise is None else rule


def _show(target, drafter, params, tokens, cache, drafter_state, at, end, size: int, unseen: bool):
    """Shows at most ``size`` tokens from ``at`` on, before ``end``, int32 ``[B]``, to the target,
    and unless they are ``unseen`` to the drafter."""
    piece = _piece(tokens, at, end, size)
    features = () if unseen else drafter.features
    asked = dict(features=features, logits=False)
    with checks.missing_target_params(params, target), prompts.reading():
        scores = checks.verified(target, params["target"], cache, piece, **asked)
    num = jnp.clip(end - at, 0, size)
    count = num - 1
    if scores.features is not None:  # the last layer's attention is read for them alone
        count = after(count, scores.features)
    steps = jnp.arange(size, dtype=jnp.int32)
    verdict = Verdict(
        path=jnp.broadcast_to(steps, piece.tokens.shape), count=count, token=jnp.full_like(at, -1)
    )
    kept = checks.committed(target, cache, scores.entries, at, verdict)
    if unseen:
        return kept, drafter_state
    following = _tokens_at(tokens, at + 1, size)
    segment = Segment(
        tokens=piece.tokens, next=following, features=scores.features, start=at, num=num
    )
    return kept, _observed(drafter, params, drafter_state, segment)


def _observed(drafter, params, state: PyTree, segment: Segment) -> PyTree:
    """The drafter's state after a part of a prompt."""
    own = params.get("drafter")
    with checks.missing_params(params, drafter):
        shown = drafter.observe(own, params["target"], state, segment)
    checks.check_same(f"{type(drafter).__name__}.observe: the state", shown, state)
    return shown


def _piece(tokens, at, end, size: int) -> Draft:
    """At most ``size`` tokens from ``at`` on, before ``end``, int32 ``[B]``, as a chain."""
    steps = jnp.arange(size, dtype=jnp.int32)
    scored = steps < jnp.clip(end - at, 0, size)[:, None]
    chain = trees.chain_parents(size - 1)
    return Draft(start=at, tokens=_tokens_at(tokens, at, size), scored=scored, topology=chain)


def _tokens_at(tokens, at, size: int):
    where = at[:, None] + jnp.arange(size, dtype=jnp.int32)
    return jnp.take_along_axis(tokens, where, axis=1, mode="clip")
