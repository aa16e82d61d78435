"""Target and drafter on separate devices, which work at the same time: two programs.

A drafter that drafts ahead (``types.AheadDrafter``) needs nothing of the target's pass, and the
pass needs the first half of its draft alone. So each of the two gets devices of its own, and each
round hands over, between the devices and without the host:

=====================  ==================================================================
drafter to target      the draft's tokens and laws, before the pass; the guess, after it
target to drafter      the text, its lengths and budgets, and the verdict
=====================  ==================================================================

    drafter   observe, draft_ready      draft_on ...            observe, draft_ready
    target                    |-> score (the pass) -> judge ->|

JAX dispatches programs without waiting for them, so ``draft_on`` runs while ``score`` does. The
host waits once a round, for the budgets that say whether any row goes on. The text is that of
``decode`` with the same keys: the same functions run, in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from .. import sharding
from .._internal.own_arithmetic import own_arithmetic
from ..types import AheadDrafter, Draft, Drafter, DrafterWrapper, PyTree, Segment, Target
from . import contract_checks as checks
from . import prefill, round
from .inputs import DecodeInputs
from .options import StateOptions, takes
from .state import Decoded, State, result

Devices = Sequence[jax.Device] | Mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions(StateOptions):
    """The options of ``decode_on_groups``."""

    target_devices: Devices
    draft_devices: Devices


class _Elsewhere(DrafterWrapper):
    """The drafter as the target's program sees it: it learns what the drafter is to be told."""

    def init(self, params, target_params, batch, capacity, inputs=None):
        return ()

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            return state
        return dataclasses.replace(segment, round=(None, *segment.round[1:]))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _start(target, drafter, rule, capacity, params, request: DecodeInputs) -> State:
    return prefill.start(target, _Elsewhere(drafter), rule, capacity, params, request)


@functools.partial(jax.jit, static_argnums=(0, 1))
@own_arithmetic
def _begin(drafter: Drafter, capacity: int, params, view: State) -> PyTree:
    """The drafter's state after the prompts."""
    own, batch = params["drafter"], len(view.length)
    state = drafter.init(own, None, batch, capacity)
    return drafter.sync(own, None, state, round.round_context(params, view), before="draft")


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def _draft_ready(drafter: AheadDrafter, params, state: PyTree, view: State):
    return drafter.draft_ready(params["drafter"], None, state, _for_drafts(params, view))


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def _draft_on(drafter: AheadDrafter, params, state: PyTree, view: State, draft: Draft):
    context = _for_drafts(params, view)
    made = drafter.draft_on(params["drafter"], None, state, context, draft)
    checks.check_draft(drafter, made, len(view.length))
    return made


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def _observe(drafter: Drafter, params, state: PyTree, segment: Segment, draft: Draft) -> PyTree:
    assert segment.round is not None
    segment = dataclasses.replace(segment, round=(draft, *segment.round[1:]))
    return drafter.observe(params["drafter"], None, state, segment)


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def _score(target: Target, params, state: State, draft: Draft):
    """The target's pass; the draft has no guess, which may still be on its way."""
    live = state.budget > 0

    def score(draft):
        every = jnp.ones(draft.tokens.shape, bool) if draft.scored is None else draft.scored
        seen = dataclasses.replace(draft, scored=every & live[:, None])
        return round.verify(target, params, state.cache, seen)

    return round.in_narrowest(draft, live, score)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))
def _judge(target, drafter, rule, params, state: State, draft: Draft, scores):
    """The rest of a round; also what the drafter is to observe."""
    context = round.round_context(params, state)
    verdict = round.accept(rule, params, draft, scores, context, round.acceptance_keys(state))
    judged = round.VerifiedRound(
        context=context, draft=draft, proposed=(), scores=scores, verdict=verdict
    )
    after = round.commit_round(target, _Elsewhere(drafter), params, state, judged)
    return dataclasses.replace(after, drafter_state=()), after.drafter_state


def _for_drafts(params, view: State):
    context = round.round_context(params, view)
    return dataclasses.replace(context, sampling=context.sampling.for_drafts)


@takes(GroupOptions)
def decode_on_groups(
    target: Target,
    drafter: AheadDrafter,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    options: GroupOptions,
) -> Decoded:
    """The same as ``decode``, with the drafter on devices of its own, where it drafts ahead.

    Args:
      target: the target.
      drafter: a drafter that drafts ahead, such as ``drafters.PEARL`` and ``drafters.SSD``.
      params: ``{"target": ..., "drafter": ...}``; each part is put on the devices of its group.
      tokens: int32 ``[B, T]``.
      lengths: int32 ``[B]``.
      target_devices, draft_devices: devices, over which the weights and caches of the target and of
        the drafter are spread, or meshes as ``decode`` takes them. No device is in both.
      key, max_new_tokens, sampling, rule, capacity, stops, num_samples: as ``decode`` takes them.

    Returns:
      ``Decoded``, on the target's devices.

    Raises:
      ValueError: before anything is compiled: there are several processes; a group is no list of
        devices, or empty, or the groups share devices; the drafter does not draft ahead; a logits
        processor, ``logprobs`` or ``inputs`` are asked for; and what ``decode`` refuses.

    Example::

        one, other = jax.devices()[:2]
        out = decode_on_groups(
            target, PEARL(num_draft=4, model=small), {"target": weights, "drafter": own},
            tokens, lengths, key=jax.random.key(0), max_new_tokens=64,
            target_devices=[one], draft_devices=[other],
        )
    """
    there = _as_mesh("target_devices", options.target_devices)
    here = _as_mesh("draft_devices", options.draft_devices)
    _check(drafter, there, here, options)
    rule = options.rule
    if "drafter" not in params:
        raise ValueError("params has no 'drafter': give the weights of the drafter, or None")
    request, capacity = options.prepare(target, drafter, tokens, lengths)
    theirs = {name: own for name, own in params.items() if name != "drafter"}
    theirs, request = sharding.place(there, target, drafter, theirs, request)
    ours, _ = sharding.place(here, target, drafter, {"drafter": params["drafter"]}, request)

    def to(mesh, tree):
        return jax.tree.map(lambda x: sharding.put(x, mesh), tree)

    with sharding.using(there):
        state = _start(target, drafter, rule, capacity, theirs, request)
    constant = to(here, (state.key, state.sampling, state.begin))
    proposed = None
    while bool(jnp.any(state.budget > 0)):
        view = _view(state, constant, functools.partial(to, here))
        with sharding.using(here):
            if proposed is None:
                proposed = _begin(drafter, capacity, ours, view)
            draft, proposed = _draft_ready(drafter, ours, proposed, view)
        passing = to(there, draft)
        with sharding.using(there):
            scores = _score(target, theirs, state, passing)
        with sharding.using(here):
            draft, proposed = _draft_on(drafter, ours, proposed, view, draft)
        judged = dataclasses.replace(passing, guess=to(there, draft.guess))
        with sharding.using(there):
            state, segment = _judge(target, drafter, rule, theirs, state, judged, scores)
        told = to(here, segment)
        with sharding.using(here):
            proposed = _observe(drafter, ours, proposed, told, draft)
    return result(state)


def _view(state: State, constant, to) -> State:
    """What the drafter may know of the state, on its own devices."""
    key, sampling, begin = constant
    tokens, length, budget, empty = to(
        (state.tokens, state.length, state.budget, state.num_empty_rounds)
    )
    nothing: dict = dict(from_draft=None, ended=None, stats=None, stops=None)
    return State(
        tokens=tokens,
        length=length,
        budget=budget,
        num_empty_rounds=empty,
        cache=None,
        drafter_state=None,
        key=key,
        sampling=sampling,
        begin=begin,
        noise=state.noise,
        **nothing,
    )


def _as_mesh(name: str, devices: Devices) -> Mesh:
    """A group of devices as a mesh."""
    if isinstance(devices, Mesh):
        sharding.check_axes(devices)
        return devices
    group = list(devices) if isinstance(devices, Iterable) else []
    if not group or not all(isinstance(device, jax.Device) for device in group):
        raise ValueError(
            f"{name}={devices!r}: give a list of devices, at least one, such as "
            "jax.devices()[:1], or a mesh"
        )
    grid = np.asarray(group).reshape(1, -1)
    return Mesh(grid, (sharding.DATA, sharding.MODEL), axis_types=(AxisType.Auto,) * 2)


def _check(drafter: Drafter, there: Mesh, here: Mesh, options: GroupOptions) -> None:
    """Raises ``ValueError`` for what two groups cannot do."""
    if jax.process_count() > 1:
        raise ValueError(
            f"target_devices and draft_devices belong to one process, here are "
            f"{jax.process_count()}: each round is handed over within a process; decode on groups "
            "in one process, or use specjax.decode(mesh=...), which the processes can share"
        )
    shared = sorted({*map(str, there.devices.flat)} & {*map(str, here.devices.flat)})
    if shared:
        raise ValueError(
            f"target_devices and draft_devices share {', '.join(shared)}: the target and the "
            "drafter can work at the same time on separate devices only; give each its own, or "
            "use specjax.decode, which runs both on the same ones"
        )
    if not isinstance(drafter, AheadDrafter):
        name = getattr(drafter, "name", type(drafter).__name__)
        raise ValueError(
            f"drafter={name!r} does not draft ahead, so the target would wait for it: give "
            "specjax.drafters.PEARL or SSD, or use specjax.decode(mesh=...)"
        )
    asked = {
        "logits_processor": options.sampling.logits_processor,
        "logprobs": options.logprobs or None,
        "inputs": options.inputs,
    }
    for name, value in asked.items():
        if value is not None:
            raise ValueError(f"{name}: not on two groups of devices; use specjax.decode")
