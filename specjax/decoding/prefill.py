"""Reading prompts: the caches of target and drafter are filled, chunk by chunk."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import kernels, sharding, trees
from .._internal.ordering import after
from ..kernels import prompts
from ..kernels.interface import PREFILL_CHUNK
from ..kernels.quantized import is_quantized
from ..types import Context, Draft, HeadTarget, PyTree, Segment, Verdict
from . import contract_checks as checks
from . import state as states
from .inputs import DecodeInputs
from .state import State


def chunk_for(params: PyTree) -> int:
    """Prompt tokens to feed at once to a target with these weights."""
    return kernels.of(params).prefill_chunk(_weights(params))


def _weights(params: PyTree) -> list:
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)  # a module wraps its weights
    return [w[...] if is_quantized(w) else w for w in leaves]


def start(
    target, drafter, rule, capacity, params, request: DecodeInputs, chunk: int = PREFILL_CHUNK
) -> State:
    """Fills the caches from the prompts, in chunks that bound the memory.

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
    chunk = min(chunk, width, capacity)
    begin = jnp.zeros((batch,), jnp.int32)
    given = params, cache, drafter_state, tokens, begin, lengths - 1
    apart = _apart(drafter, width, params)
    cache, drafter_state = _feed(target, drafter, *given, chunk, apart)
    state = states.initial_state(
        target, drafter, rule, params, tokens, lengths, cache, drafter_state, request
    )
    if request.num_samples > 1:
        state = jax.tree.map(lambda x: jnp.repeat(x, request.num_samples, axis=0), state)
    return sharding.rows(dataclasses.replace(state, key=request.key))


def extend(target, drafter, rule, params, state: State, request: DecodeInputs) -> State:
    """Appends ``request.tokens`` to the rows of a state, and starts again with its settings.

    The target reads only the root and these tokens, since the caches are kept. The caller must
    refuse what does not fit into the buffer; ``request.inputs`` are those of the start.
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
    chunk = min(PREFILL_CHUNK, width)
    given = params, state.cache, drafter_state, tokens, begin, length - 1
    apart = _apart(drafter, width, params)
    cache, drafter_state = _feed(target, drafter, *given, chunk, apart)
    state = states.initial_state(
        target, drafter, rule, params, tokens, length, cache, drafter_state, request
    )
    return sharding.rows(dataclasses.replace(state, key=request.key))


def _apart(drafter, width: int, params: PyTree) -> bool:
    """Whether the last of up to ``width`` tokens goes alone: where the drafter reads its features
    and no others, those before it need little of the last layer."""
    if not drafter.reads_last:
        return False
    return kernels.current().feeds_last_token_alone(width, _weights(params["target"]))


def _feed(target, drafter, params, cache, drafter_state, tokens, begin, end, chunk, apart):
    """Shows the tokens at positions ``begin ... end - 1``, int32 ``[B]``, to target and drafter;
    ``apart``: to the drafter the last one alone."""
    feed = functools.partial(_piece, target, drafter, params, tokens)
    rest = jnp.maximum(end - 1, begin) if apart else end

    def chunks(index, carry):
        at = jnp.minimum(begin + index * chunk, rest)
        cache, drafter_state = carry
        return feed(cache, drafter_state, at, rest, chunk, unseen=apart)

    count = (jnp.max(rest - begin) + chunk - 1) // chunk
    cache, drafter_state = jax.lax.fori_loop(0, count, chunks, (cache, drafter_state))
    return feed(cache, drafter_state, rest, end, 1) if apart else (cache, drafter_state)


def _piece(target, drafter, params, tokens, cache, drafter_state, at, end, size, unseen=False):
    """Shows at most ``size`` tokens from ``at`` on, before ``end``, int32 ``[B]``, to the target,
    and unless they are ``unseen`` to the drafter."""
    batch = len(tokens)
    steps = jnp.arange(size, dtype=jnp.int32)
    where = at[:, None] + steps
    piece = jnp.take_along_axis(tokens, where, axis=1, mode="clip")
    following = jnp.take_along_axis(tokens, where + 1, axis=1, mode="clip")
    num = jnp.clip(end - at, 0, size)
    topology = trees.chain_parents(size - 1)
    draft = Draft(start=at, tokens=piece, scored=steps < num[:, None], topology=topology)
    features = () if unseen else drafter.features
    settings = dict(features=features, logits=False)
    with checks.missing_target_params(params, target), prompts.reading():
        scores = checks.verified(target, params["target"], cache, draft, **settings)
    path = jnp.broadcast_to(steps, piece.shape)
    count = num - 1
    if scores.features is not None:  # the last layer's attention is read for them alone
        count = after(count, scores.features)
    verdict = Verdict(path=path, count=count, token=jnp.full((batch,), -1, jnp.int32))
    kept = checks.committed(target, cache, scores.entries, at, verdict)
    if unseen:
        return kept, drafter_state
    segment = Segment(tokens=piece, next=following, features=scores.features, start=at, num=num)
    own = params.get("drafter")
    with checks.missing_params(params, drafter):
        shown = drafter.observe(own, params["target"], drafter_state, segment)
    checks.check_same(f"{type(drafter).__name__}.observe: the state", shown, drafter_state)
    return kept, shown
