"""The loop: draft, verify, accept, commit, observe, in one compiled ``lax.while_loop``.

``decode`` runs it to the end; ``start`` and ``burst`` run the same round a few at a time, which
is what streaming does. ``draft_step``, ``verify`` and ``accept`` are one round's parts, pure and
public: call one alone and look at what comes out.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from . import acceptance, laws, sharding, tree
from .acceptance import walk
from .acceptance.laws import DraftLaw, TargetLaw
from .prefill import extend, start
from .pytree import pytree_dataclass
from .request import prepare
from .sampling import Sampling
from .state import NO_TOKEN, SPENT, STOPPED, Decoded, State, end, result
from .stats import Stats
from .types import ROOT, Context, Draft, Drafter, PyTree, Scores, Segment, Target, Verdict

DRAFT, ACCEPT = 0, 1  # the two roles a random key can have within a round
# ---------------------------------------------------------------- one round, part by part


def draft_step(drafter: Drafter, params, state, context: Context) -> tuple[Draft, PyTree]:
    """Proposes a tree of N nodes below each row's root. Pure."""
    return drafter.draft_step(params, state, context)


def verify(target: Target, params, cache, draft: Draft, *, features=()) -> Scores:
    """Scores all nodes in ONE pass of the target. Reads the cache, never writes. Pure."""
    return target.verify(params["target"], cache, draft, features=features)


def widths(nodes: int) -> tuple[int, ...]:
    """The numbers of nodes that a pass of at most ``nodes`` can be compiled for."""
    return (*(w for w in (1, 4, 8, 16, 32, 64, 128) if w < nodes), nodes)


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

    def pad(x, like):
        return jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])

    def padded(width):
        return jax.tree.map(pad, run(tree.narrow(draft, width)), full)

    sizes = widths(draft.num_nodes)
    choice = jnp.sum(jnp.asarray(sizes) <= last)
    return jax.lax.switch(choice, [functools.partial(padded, w) for w in sizes])


def accept(rule, params, draft: Draft, scores: Scores, context: Context, key) -> Verdict:
    """The longest lawful path through the draft, and one more token. Pure.

    Args:
      rule: a name, ``auto``, or a rule object.
      context: its sampling settings make the law; its tokens matter under a repetition penalty.
      key: random keys ``[B]``.
    """
    rule = acceptance.choose(rule, draft, context.sampling.greedy)
    p = TargetLaw(draft, scores.logits, context)
    q = DraftLaw(draft, scores.logits.shape[-1])
    verdict = rule(params, draft, p, q, key)
    if draft.candidate is None:
        return verdict
    silent = ~draft.candidate[:, ROOT]
    return dataclasses.replace(
        verdict,
        count=jnp.where(silent, -1, verdict.count),
        token=jnp.where(silent, -1, verdict.token),
    )


def truncate(draft: Draft, verdict: Verdict, state: State) -> tuple[Verdict, jax.Array]:
    """Cuts a verdict at the first stop token and at the budget; rows out of budget do nothing.

    Returns:
      the verdict, and the emitted tokens int32 ``[B, D + 1]``, -1 behind the last. A verdict
      without a last token (there is no law behind its path) leaves what was accepted.
    """
    steps = jnp.arange(verdict.path.shape[1])
    drafted = jnp.take_along_axis(draft.tokens, verdict.path, axis=1)
    drafted = jnp.concatenate([drafted[:, 1:], jnp.zeros_like(drafted[:, :1])], axis=1)
    tokens = jnp.where(steps == verdict.count[:, None], verdict.token[:, None], drafted)
    stop = jnp.any(tokens[:, :, None] == state.stops[:, None, :], axis=-1)
    before = jnp.cumsum(stop, axis=1) - stop  # stops strictly before each token
    emitted = (steps <= verdict.count[:, None]) & (before == 0) & (steps < state.budget[:, None])
    emitted &= tokens >= 0
    num = jnp.sum(emitted, axis=1).astype(jnp.int32)
    last = jnp.take_along_axis(tokens, jnp.maximum(num - 1, 0)[:, None], axis=1)[:, 0]
    none = num == 0
    kept = dataclasses.replace(
        verdict, count=jnp.where(none, -1, num - 1), token=jnp.where(none, -1, last)
    )
    return kept, jnp.where(emitted, tokens, -1)


def round_keys(state: State, role: int) -> jax.Array:
    """Keys ``[B]`` by row, position of the root, role and silent rounds; a draw adds the node.

    NOT by the absolute position of the node: a token drawn again at a position must not meet the
    noise of its rejected predecessor, which would bias every rule that looks ahead. Nor may a
    round meet the noise of a silent one before it at the same root: a pipelined drafter, which
    proposes now what it drew then and draws on, would draw related tokens.
    """
    keys = jax.vmap(jax.random.fold_in)(state.key, 2 * (state.length - 1) + role)
    return jax.vmap(jax.random.fold_in)(keys, state.silent)


@pytree_dataclass
class Judged:
    """A round before it changes anything. See ``judge``.

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
    logprobs: jax.Array | None


def run_round(target, drafter, rule, params, state: State) -> State:
    """One round for every row that is not finished. Finished rows stay as they are, bit by bit."""
    judged = judge(target, drafter, rule, params, state)
    return conclude(target, drafter, params, state, judged)


def judge(target, drafter, rule, params, state: State) -> Judged:
    """The first half of a round, which only reads: draft, verify, accept. Pure."""
    context = Context(
        tokens=state.tokens,
        length=state.length,
        budget=state.budget,
        key=round_keys(state, DRAFT),
        sampling=state.sampling.for_drafts,
        cache=state.cache,
        begin=state.begin,
        law_state=state.law,
        law_params=params.get("law"),
    )
    draft, proposed = draft_step(drafter, params, state.drafter, context)
    context = dataclasses.replace(context, sampling=state.sampling)
    live = state.budget > 0

    def score(draft):
        # nothing of a finished row is scored: experts cost what the others choose
        every = jnp.ones(draft.tokens.shape, bool) if draft.scored is None else draft.scored
        seen = dataclasses.replace(draft, scored=every & live[:, None])
        scores = verify(target, params, state.cache, seen, features=drafter.features)
        verdict = accept(rule, params, draft, scores, context, round_keys(state, ACCEPT))
        said = None
        if state.logprobs is not None:
            p = TargetLaw(draft, scores.logits, context)
            _, emitted = truncate(draft, verdict, state)
            said = _logprobs(p, state.logprobs_of, verdict.path, emitted)
        return scores, verdict, said

    # in the branches, since logits of which no one asks later are then as wide as the pass
    scores, verdict, said = in_narrowest(draft, live, score)
    return Judged(
        context=context,
        draft=draft,
        proposed=proposed,
        scores=scores,
        verdict=verdict,
        logprobs=said,
    )


def conclude(target, drafter, params, state: State, judged: Judged) -> State:
    """The second half of a round: commit, observe, and the state after it. Pure."""
    root, draft, scores, full = state.length - 1, judged.draft, judged.scores, judged.verdict
    verdict, emitted = truncate(draft, full, state)
    cache = target.commit(state.cache, scores.entries, root, verdict)

    num = verdict.count + 1
    fed = jnp.take_along_axis(draft.tokens, verdict.path, axis=1)
    features = scores.features
    if features is not None:
        features = jnp.take_along_axis(features, verdict.path[:, :, None], axis=1)
    segment = Segment(
        tokens=fed,
        next=emitted,
        features=features,
        start=root,
        num=num,
        round=(draft, verdict, drafter.readout(draft, scores)),
    )
    learned = drafter.observe(params, judged.proposed, segment)

    # emitted tokens go behind the root; column L does not exist, so it drops what is not emitted
    steps = jnp.arange(emitted.shape[1])
    where = jnp.where(emitted >= 0, state.length[:, None] + steps, state.tokens.shape[1])
    rows = jnp.arange(where.shape[0])[:, None]
    from_draft = (steps < full.count[:, None]) & (emitted >= 0)
    stopped = jnp.any(verdict.token[:, None] == state.stops, axis=1) & (num > 0)
    # nothing to draw from, unless the row would have ended before
    lost = (full.count >= 0) & (full.token < 0) & (num == full.count) & (state.budget > num)
    lost &= ~stopped
    budget = jnp.where(stopped | lost, 0, state.budget - num)
    ended = jnp.where(stopped, STOPPED, jnp.where(lost, NO_TOKEN, SPENT))
    law, logprobs = state.law, state.logprobs
    if law is not None:
        law = laws.fold(state.sampling.law, params.get("law"), law, emitted)
    if logprobs is not None:
        logprobs = logprobs.at[rows, where].set(judged.logprobs, mode="drop")
    after = dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(emitted, mode="drop"),
        length=state.length + num,
        budget=budget,
        ended=jnp.where((state.budget > 0) & (budget == 0), ended, state.ended),
        law=law,
        logprobs=logprobs,
        silent=jnp.where(num > 0, 0, state.silent + (state.budget > 0)),
        cache=cache,
        drafter=learned,
        from_draft=state.from_draft.at[rows, where].set(from_draft, mode="drop"),
        stats=_count(state, draft, num, from_draft),
    )
    return sharding.rows(after)


def _logprobs(p: TargetLaw, which: str, path: jax.Array, emitted: jax.Array) -> jax.Array:
    """float32 ``[B, D + 1]``, of each emitted token at its node; only visited nodes are computed.

    ``which``: ``raw``, the log-softmax of the model's logits; ``law``, the logarithm of p.
    """

    def visit(step, said):
        node, token = path[:, step], jnp.maximum(emitted[:, step], 0)[:, None]
        if which == "law":
            there = jnp.take_along_axis(p(node), token, axis=1)[:, 0]
            value = jnp.log(there)
        else:
            logits = walk.at_node(p.logits, node)
            there = jnp.take_along_axis(logits, token, axis=1)[:, 0]
            value = there - jax.nn.logsumexp(logits, axis=-1)
        return said.at[:, step].set(value)

    steps = jnp.max(jnp.sum(emitted >= 0, axis=1))
    return jax.lax.fori_loop(0, steps, visit, jnp.zeros(emitted.shape, jnp.float32))


def _count(state: State, draft: Draft, num, from_draft) -> Stats:
    stats, live = state.stats, (state.budget > 0).astype(jnp.int32)
    accepted = from_draft[:, : stats.accepted_at.shape[1]].astype(jnp.int32)
    candidates = walk.eligible(draft)
    # a node that could only stand beyond the budget is not held against the drafter
    depth = tree.depths(draft)
    reachable = candidates & (depth <= state.budget[:, None]) & (num > 0)[:, None]
    positions = jnp.arange(1, accepted.shape[1] + 1)
    drafted = jnp.any(reachable[:, None] & (depth[:, None] == positions[:, None]), axis=2)
    return dataclasses.replace(
        stats,
        rounds=stats.rounds + live,
        emitted=stats.emitted + num,
        drafted=stats.drafted + jnp.sum(reachable, axis=1, dtype=jnp.int32),
        accepted=stats.accepted + jnp.sum(accepted, axis=1, dtype=jnp.int32),
        drafted_at=stats.drafted_at + drafted,
        accepted_at=stats.accepted_at + accepted,
    )


# ---------------------------------------------------------------- run


def burst(target, drafter, rule, rounds, params, state: State, live=1) -> State:
    """At most ``rounds`` rounds (None: as many as it takes), one ``while_loop``; it ends when
    fewer than ``live`` rows run."""

    def going(carry):
        done, state = carry
        more = jnp.sum(state.budget > 0) >= live
        return more if rounds is None else more & (done < rounds)

    def body(carry):
        done, state = carry
        return done + 1, run_round(target, drafter, rule, params, state)

    return jax.lax.while_loop(going, body, (jnp.int32(0), state))[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(target, drafter, rule, capacity, params, request):
    state = start(target, drafter, rule, capacity, params, request)
    return result(burst(target, drafter, rule, None, params, state))


jit_start = jax.jit(start, static_argnums=(0, 1, 2, 3, 6))
# rounds are an argument, not part of the program: bursts of any length share one compilation
jit_burst = jax.jit(burst, static_argnums=(0, 1, 2), donate_argnums=(5,))
jit_extend = jax.jit(extend, static_argnums=(0, 1, 2), donate_argnums=(4,))
jit_end = jax.jit(end, donate_argnums=(0,))


def decode(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    key: jax.Array,
    max_new_tokens: jax.typing.ArrayLike,
    sampling: Sampling = Sampling(),
    rule="auto",
    capacity: int | None = None,
    stops: jax.typing.ArrayLike = (),
    inputs: PyTree = None,
    mesh=None,
    logprobs: bool | str = False,
    num_samples: int = 1,
) -> Decoded:
    """Generates until every row has met a stop or spent its budget, in one compiled loop.

    Args:
      target, drafter: hashable objects that implement the protocols of ``types.py``.
      params: ``{"target": ..., "drafter": ...}`` (and ``"rule"`` for rules that learn).
      tokens: int32 ``[B, T]``, prompts padded on the right with anything.
      lengths: int32 ``[B]``, tokens of each prompt, at least 1.
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
      ``Decoded``. It can be called within your own ``jit``, ``vmap``-free ``scan`` or mesh.

    Raises:
      ValueError: before anything is compiled, naming the argument and the way out.

    Example::

        out = specjax.decode(
            target, specjax.drafters.NGram(num_draft=4), {"target": weights},
            tokens, lengths, key=jax.random.key(0), max_new_tokens=64,
        )
        text_ids = out.tokens[0, : out.lengths[0]]
    """
    request, capacity = prepare(
        target,
        drafter,
        tokens,
        lengths,
        key,
        max_new_tokens,
        sampling,
        capacity,
        stops,
        inputs,
        logprobs,
        num_samples,
    )
    mesh = sharding.as_mesh(mesh)
    params, request = sharding.place(mesh, target, drafter, params, request)
    with sharding.using(mesh):
        return _decode(target, drafter, rule, capacity, params, request)


def stream(
    target,
    drafter,
    params,
    tokens,
    lengths,
    *,
    key,
    max_new_tokens,
    sampling=Sampling(),
    rule="auto",
    capacity=None,
    stops=(),
    inputs=None,
    mesh=None,
    logprobs=False,
    num_samples=1,
    rounds: int = 1,
):
    """The same as ``decode``, as a generator: yields ``Decoded`` after every burst of rounds.

    Each ``Decoded`` holds all that is committed so far; the first comes before any round. Ends
    when every row has. ``rounds``: how many rounds one compiled burst runs.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1: a burst without rounds never ends")
    request, capacity = prepare(
        target,
        drafter,
        tokens,
        lengths,
        key,
        max_new_tokens,
        sampling,
        capacity,
        stops,
        inputs,
        logprobs,
        num_samples,
    )

    mesh = sharding.as_mesh(mesh)
    params, request = sharding.place(mesh, target, drafter, params, request)

    def bursts():
        with sharding.using(mesh):
            state = jit_start(target, drafter, rule, capacity, params, request)
        while True:
            # copies: the state itself is donated to the next burst
            yield jax.tree.map(jnp.copy, result(state))
            if not bool(jnp.any(state.budget > 0)):
                return
            with sharding.using(mesh):
                state = jit_burst(target, drafter, rule, rounds, params, state)

    return bursts()
