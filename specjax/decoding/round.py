"""One round: draft, verify, accept, commit, observe.

``draft_step``, ``verify`` and ``accept`` are its parts, pure and public: call one alone and look at
what comes out. ``loop.py`` runs rounds.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import acceptance, sharding, trees
from .._internal.optional import required
from .._internal.ordering import after_changes
from .._internal.own_arithmetic import own_arithmetic
from .._internal.pytree import filled, pytree_dataclass
from ..acceptance.guess import unscored, with_guess, without_guess
from ..acceptance.node_laws import DraftLaw, TargetLaw
from ..sampling.noise import Noise
from ..types import (
    ROOT,
    Context,
    Draft,
    Drafter,
    DrafterWrapper,
    PyTree,
    Scores,
    Segment,
    Target,
    Verdict,
)
from . import contract_checks as checks
from .emission import emitted_state, path_logprobs, places, truncate, update_stats
from .state import State

DRAFT, ACCEPT = 0, 1  # the two roles a random key can have within a round
NOISE = 2**32 - 1  # folded into a row's key where no round is: greater than ``2 * position + role``


@own_arithmetic
def draft_step(drafter: Drafter, params, state, context: Context) -> tuple[Draft, PyTree]:
    """Proposes a tree of N nodes below each row's root. Pure.

    Args:
      params: those of ``decode``.
      state: the drafter's, ``State.drafter_state``.
      context: from ``round_context``.

    Returns:
      the draft, and the drafter's state until the round is committed.
    """
    context = dataclasses.replace(context, sampling=context.sampling.for_drafts)
    checks.check_params(params)
    with checks.missing_params(params, drafter):
        made = drafter.draft_step(params.get("drafter"), params["target"], state, context)
    checks.check_draft(drafter, made, len(context.length))
    return made


@own_arithmetic
def verify(target: Target, params, cache, draft: Draft, *, features=()) -> Scores:
    """Scores all nodes of a draft in ONE pass of the target. Reads the cache, never writes. Pure.

    Args:
      target: the target.
      params: ``{"target": weights, ...}``, as ``decode`` takes it.
      cache: ``state.cache``.
      draft: of N nodes, with ``tokens`` int32 ``[B, N]``.
      features: which hidden states are returned, ``drafter.features``; empty: none.

    Returns:
      ``Scores``: raw logits float32 ``[B, N, V]``, the hidden states of a floating dtype
      ``[B, N, F]`` or None, and the entries that ``commit_round`` writes into the cache.

    Raises:
      ValueError: while tracing: ``params`` has no ``"target"``, or the target returns other shapes
        or dtypes.
    """
    checks.check_params(params)
    return checks.verified(target, params["target"], cache, draft, features=features)


def widths(nodes: int) -> tuple[int, ...]:
    """The numbers of nodes that a pass of at most ``nodes`` can be compiled for."""
    return (*(w for w in (1, 2, 4, 8, 16, 32, 64, 128) if w < nodes), nodes)


def in_narrowest(draft: Draft, live, run):
    """``run(draft)``, a pytree, from the narrowest compiled width that holds every scored node of a
    ``live`` row; zeros stand for what belongs to nodes left out.

    A draft whose nodes are all scored (``scored=None``) has one width. Branches may read the cache
    and return what belongs to nodes, so nothing of it is copied.
    """
    if draft.scored is None or draft.num_nodes == 1:
        return run(draft)
    index = jnp.arange(draft.num_nodes)
    last = jnp.max(jnp.where(draft.scored & live[:, None], index, ROOT))
    full = jax.eval_shape(lambda: run(draft))

    def padded(width):
        return jax.tree.map(filled, run(trees.narrow(draft, width)), full)

    sizes = widths(draft.num_nodes)
    choice = jnp.sum(jnp.asarray(sizes) <= last)
    return jax.lax.switch(choice, [functools.partial(padded, w) for w in sizes])


@own_arithmetic
def accept(rule, params, draft: Draft, scores: Scores, context: Context, key) -> Verdict:
    """The longest lawful path through the draft, and one more token. Pure.

    Args:
      rule: a name, ``auto``, or a rule object.
      params: as ``decode`` takes it; a rule that learns reads ``params["rule"]``.
      draft: of N nodes, as ``draft_step`` returned it.
      scores: of these nodes, as ``verify`` returned them.
      context: its sampling settings make the law; its tokens matter under a repetition penalty.
      key: random keys ``[B]``; a rule that shares its noise takes ``context.noise`` instead.

    Returns:
      ``Verdict``: ``path`` int32 ``[B, D + 1]``, ``count`` int32 ``[B]`` and ``token`` int32
      ``[B]``, before stop tokens and the budget cut anything. ``count`` and ``token`` are -1 where
      the root is no candidate: the row emits nothing in this round.

    Raises:
      ValueError: while tracing: what the rule does not judge, a state that was made for another
        rule, scores of other nodes, or a key that is not one for each row.
    """
    judged, place = with_guess(draft)
    rule = acceptance.choose(rule, judged, context.sampling.greedy)
    if rule.noise is not None:
        key = context.noise
        if key is None or key.by_path != (rule.noise == "path"):
            raise ValueError(
                f"rule={rule.name!r} shares its noise with drafters, and this state was made for "
                f"another rule: give init_state (or start) rule={rule.name!r} too"
            )
    elif key is not None:
        checks.check_keys(key, draft.tokens.shape[0])
    logits = required(scores.logits, "scores.logits")
    shape = (*draft.tokens.shape, None)
    checks.check_array("scores.logits", logits, shape, jnp.floating, " (batch, nodes, vocabulary)")
    if draft.laws is not None and draft.vocab is None:
        shape = (draft.tokens.shape[0], None, logits.shape[-1])
        checks.check_array("draft.laws", draft.laws, shape, jnp.float32)
    p = TargetLaw(judged, logits if place is None else unscored(logits), context)
    q = DraftLaw(judged, logits.shape[-1])
    verdict = rule(params.get("rule"), judged, p, q, key)
    checks.check_verdict(rule, verdict, judged)
    verdict = without_guess(verdict, judged, place)
    if draft.candidate is None:
        return verdict
    silent = ~draft.candidate[:, ROOT]
    return dataclasses.replace(
        verdict,
        count=jnp.where(silent, -1, verdict.count),
        token=jnp.where(silent, -1, verdict.token),
    )


def round_keys(state: State, role: int) -> jax.Array:
    """Keys ``[B]`` by row, position of the root, role and number of empty rounds.

    A draw adds the node.

    NOT by the absolute position of the node: a token drawn again at a position must not meet the
    noise of its rejected predecessor, which would bias every rule that looks ahead. Nor may a
    round meet the noise of an empty one before it at the same root: a pipelined drafter, which
    proposes now what it drew then and draws on, would draw related tokens.
    """
    keys = jax.vmap(jax.random.fold_in)(state.key, 2 * (state.length - 1) + role)
    return jax.vmap(jax.random.fold_in)(keys, state.num_empty_rounds)


@own_arithmetic
def round_context(params: PyTree, state: State, plan: PyTree = None) -> Context:
    """Makes the context that a drafter and a rule may read in the next round. Pure.

    Args:
      params: as ``decode`` takes it; ``params["logits_processor"]`` is read, if there is any.
      state: the state before the round.
      plan: what ``drafter.plan`` decided, of drafters that have one; None: ``draft_step`` asks.

    Returns:
      ``Context`` of all B rows, with keys ``[B]`` for the draws of the drafter.
    """
    return Context(
        plan=plan,
        tokens=state.tokens,
        length=state.length,
        budget=state.budget,
        key=round_keys(state, DRAFT),
        sampling=state.sampling,
        cache=state.cache,
        begin=state.begin,
        processor_state=state.processor_state,
        processor_params=params.get("logits_processor"),
        noise=shared_noise(state),
    )


def shared_noise(state: State) -> Noise | None:
    """The noise that drafters and the rule share, by row and absolute position and no round; None
    under a rule that shares none."""
    if state.noise is None:
        return None
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, jnp.uint32(NOISE))
    return Noise(keys=keys, by_path=state.noise == "path")


@own_arithmetic
def acceptance_keys(state: State) -> jax.Array:
    """Makes the random keys for ``accept`` in the next round; no drafter may see them. Pure.

    Args:
      state: the state before the round.

    Returns:
      random keys ``[B]``, which depend on the row's key, the root's position and the number of
      empty rounds since.
    """
    return round_keys(state, ACCEPT)


@pytree_dataclass
class VerifiedRound:
    """A round before it changes anything, as ``commit_round`` takes it.

    Attributes:
      context: what ``accept`` was given.
      draft, scores: of N nodes; zeros stand for the scores of what was left out of the pass.
      proposed: the drafter's state between ``draft_step`` and ``observe``.
      verdict: the rule's own, before stops and the budget cut it.
      logprobs: float32 ``[B, D + 1]`` of the emitted tokens, or None.
    """

    context: Context
    draft: Draft
    proposed: PyTree
    scores: Scores
    verdict: Verdict
    logprobs: jax.Array | None = None


@own_arithmetic
def run_round(target, drafter, rule, params, state: State, plan=None) -> State:
    """One round for every row that is not finished. Finished rows stay as they are, bit by bit.

    ``plan``: what ``drafter.plan`` said, of drafters that have one.
    """
    judged = draft_and_verify(target, drafter, rule, params, state, plan)
    return commit_round(target, drafter, params, state, judged)


def run_empty_round(target, drafter, rule, params, state: State, plan) -> State:
    """``run_round`` where the plan is to draft nothing: a plain round, and as cheap as one."""
    resting = _Resting(drafter)
    judged = draft_and_verify(target, resting, rule, params, state, plan)
    return commit_round(target, resting, params, state, judged)


class _Resting(DrafterWrapper):
    """A drafter with a plan, in a round without a draft."""

    @property
    def num_draft(self) -> int:
        return 0

    def draft_step(self, params, target_params, state, context):
        nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
        synced = self.inner.sync(params, target_params, state, context, before="rest")
        draft = trees.chain_draft(context, nothing)
        # the text is written after it was read, or it would be copied in every such round
        start = after_changes(draft.start, synced, state)
        return dataclasses.replace(draft, start=start), synced


@own_arithmetic
def draft_and_verify(
    target, drafter, rule, params, state: State, plan=None, noise: Noise | None = None
) -> VerifiedRound:
    """The first half of a round, which only reads: draft, verify, accept. Pure.

    ``noise``: that of a loop around this one, which is shared in place of the state's own."""
    context = round_context(params, state, plan)
    if noise is not None:
        context = dataclasses.replace(context, noise=noise)
    draft, proposed = draft_step(drafter, params, state.drafter_state, context)
    live = state.budget > 0

    def score(draft):
        # nothing of a finished row is scored: experts cost what the others choose
        every = jnp.ones(draft.tokens.shape, bool) if draft.scored is None else draft.scored
        seen = dataclasses.replace(draft, scored=every & live[:, None])
        return verify(target, params, state.cache, seen, features=drafter.features)

    def judge(draft, scores):
        return judged(rule, params, state, draft, scores, context)

    if draft.guess is None:
        # The verdict is computed within the branches: logits that nothing reads afterwards
        # then have the width of the narrow pass.
        scores, (verdict, said) = in_narrowest(
            draft, live, lambda draft: (found := score(draft), judge(draft, found))
        )
    else:  # a branch would wait for the guess, which is drawn while the pass runs
        scores = in_narrowest(dataclasses.replace(draft, guess=None), live, score)
        verdict, said = judge(draft, scores)
    return VerifiedRound(
        context=context,
        draft=draft,
        proposed=proposed,
        scores=scores,
        verdict=verdict,
        logprobs=said,
    )


def judged(rule, params, state: State, draft: Draft, scores: Scores, context: Context):
    """The rule's verdict, and the logarithms of the emitted tokens' probabilities or None."""
    verdict = accept(rule, params, draft, scores, context, acceptance_keys(state))
    said = None
    if state.logprobs is not None:
        p = TargetLaw(draft, required(scores.logits, "scores.logits"), context)
        _, emitted = truncate(draft, verdict, state)
        said = path_logprobs(p, state.logprobs_of, verdict.path, emitted)
    return verdict, said


@own_arithmetic
def commit_round(target, drafter, params, state: State, judged: VerifiedRound) -> State:
    """Commits what was accepted, lets the drafter observe it, and returns the next state. Pure.

    Args:
      target, drafter, params: as ``decode`` takes them.
      state: the state before the round, of which ``judged`` was made.
      judged: the draft of N nodes with its scores and the rule's verdict.

    Returns:
      ``State`` of the same structure, shapes and dtypes: ``tokens`` int32 ``[B, L]`` with the
      accepted tokens and the verdict's own, up to the first stop token and the budget; ``length``,
      ``budget``, ``cache``, ``drafter_state`` and ``stats`` follow.

    Raises:
      ValueError: while tracing: a cache or a drafter's state that changes its structure, shapes or
        dtypes, or missing weights of the drafter.
    """
    root, draft, scores, full = state.length - 1, judged.draft, judged.scores, judged.verdict
    verdict, emitted = truncate(draft, full, state)
    cache = checks.committed(target, state.cache, scores.entries, root, verdict)
    num, fed, features = verdict.count + 1, draft.tokens, scores.features
    if draft.num_nodes > 1:  # otherwise all paths are the root
        fed = jnp.take_along_axis(fed, verdict.path, axis=1, mode="clip")
        if features is not None:
            features = jnp.take_along_axis(features, verdict.path[:, :, None], axis=1, mode="clip")
    # a round without a draft is shown to the drafter in the shapes of the others
    steps = max(drafter.depth + 1, verdict.path.shape[1])
    verdict = dataclasses.replace(verdict, path=_filled(verdict.path, steps, 0))
    emitted, fed = _filled(emitted, steps, -1), _filled(fed, steps, 0)
    readout = drafter.readout(draft, scores)
    checks.check_readout(drafter, readout, len(root))
    segment = Segment(
        tokens=fed,
        next=emitted,
        features=None if features is None else _filled(features, steps, 0),
        start=root,
        num=num,
        round=(draft, verdict, readout),
    )
    own = params.get("drafter")
    with checks.missing_params(params, drafter):
        drafter_state = drafter.observe(own, params["target"], judged.proposed, segment)
    after = emitted_state(params, state, full, verdict, emitted, judged.logprobs)
    from_draft = (jnp.arange(emitted.shape[1]) < full.count[:, None]) & (emitted >= 0)
    rows, where = places(state, emitted)
    after = dataclasses.replace(
        after,
        cache=cache,
        drafter_state=drafter_state,
        from_draft=state.from_draft.at[rows, where].set(from_draft, mode="drop"),
        stats=update_stats(state, draft, num, from_draft),
    )
    return sharding.rows(after)


def _filled(x: jax.Array, width: int, value: int) -> jax.Array:
    """``[B, T, ...]`` with at least ``width`` columns."""
    spare = max(width - x.shape[1], 0)
    pads = ((0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2))
    return jnp.pad(x, pads, constant_values=value) if spare else x
