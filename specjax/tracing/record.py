"""Records rounds one at a time, with p and q at every node, for ``specjax trace``.

The rounds are those of the loop, ``draft_and_verify`` and then ``commit_round``. The record adds
the laws at every node, whereas an acceptance rule computes them only at the nodes that it visits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, sharding, trees
from .._internal.optional import required
from .._internal.own_arithmetic import own_arithmetic
from .._internal.pytree import pytree_dataclass, static
from ..acceptance import walk
from ..acceptance.node_laws import DraftLaw, TargetLaw
from ..decoding import contract_checks
from ..decoding.emission import truncate
from ..decoding.prefill import judge_of_first
from ..decoding.round import (
    ACCEPT,
    VerifiedRound,
    commit_round,
    draft_and_verify,
    round_keys,
)
from ..decoding.state import ENDED, State
from ..drafters.plain import Plain
from ..types import POINT_MASS, ROOT, Draft, PyTree, Verdict
from . import explain

TOP = 5  # most probable tokens that are recorded at a visited node

# values of Node.status
ROOT_NODE, ACCEPTED, CUT, REJECTED = "root", "accepted", "cut", "rejected"
BEYOND, PASSENGER, LEFT_OUT, EMPTY = "beyond", "passenger", "left out", "empty"
# values of Round.kind
CORRECTION, BONUS, PLAIN, NONE = "correction", "bonus", "plain", "none"


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a draft.

    Attributes:
      token: the token id; -1 where the drafter had no token to propose.
      parent: index of the parent node; -1 at the root.
      depth: distance from the root, 0 at the root.
      p: probability of the token under the target's law after its parent; None at the root, and
        where the parent was not scored. At temperature 0, where that law is a point mass, p is the
        softmax at temperature 1.
      q: probability of the token under the law from which it was drawn; None for a token that was
        not drawn.
      status: ``root``, ``accepted``, ``cut`` (accepted, but after the end of the text),
        ``rejected``, ``beyond`` (the rule did not test it), ``passenger`` (scored, but it cannot
        be accepted), ``left out`` (not scored in this round, or no token was proposed), ``empty``
        (the round emits nothing).
      why: the reason for the status, in words.
      top: token ids and p of the most probable tokens after the node, if the node is on the
        accepted path; otherwise empty.
    """

    token: int
    parent: int
    depth: int
    p: float | None
    q: float | None
    status: str
    why: str
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of one row.

    Attributes:
      nodes: the nodes of the draft; the first is the root.
      path: indices of the accepted nodes, from the root down, including those after the end of the
        text; empty in a round that emits nothing.
      kind: the kind of the token after the path: ``correction`` (a drafted token was rejected in
        its place), ``bonus`` (the whole path to a leaf was accepted), ``plain`` (nothing was
        drafted), ``none`` (the round emits nothing, or the law gives no token any probability).
      token: the token after the path, -1 for none.
      p: the probability of ``token``, as in ``Node.p``.
      emitted: the emitted token ids.
      from_draft: for each emitted token, whether it was drafted.
      rule: name of the acceptance rule; for ``auto``, of the rule that was chosen.
      reason: why the row ended with this round; empty if the row did not end.
    """

    nodes: list[Node]
    path: list[int]
    kind: str
    token: int
    p: float | None
    emitted: list[int]
    from_draft: list[bool]
    rule: str
    reason: str

    def cut(self, num: int, reason: str) -> Round:
        """Returns the round with only its first ``num`` emitted tokens.

        Args:
          num: the number of tokens before the end of the text.
          reason: why the text ended.
        """

        def fate(n: int, node: Node) -> Node:
            if n not in self.path[num + 1 :]:
                return node
            words = f"{node.why}; but the text ends before it"
            return dataclasses.replace(node, status=CUT, why=words)

        return dataclasses.replace(
            self,
            nodes=[fate(n, node) for n, node in enumerate(self.nodes)],
            emitted=self.emitted[:num],
            from_draft=self.from_draft[:num],
            reason=reason,
        )


@pytree_dataclass
class RoundArrays:
    """A recorded round of all rows, on the device, without the logits.

    Attributes:
      draft: the draft, without its laws.
      depth: int32 ``[B, N]``, the depth of each node.
      acceptable: bool ``[B, N]``, the nodes that the rule may accept.
      p, q: float32 ``[B, N]``, as in ``Node``.
      top: ids int32 and p float32 of the most probable tokens after each node: ``[B, N, TOP]``.
      verdict: the verdict of the rule, before it is cut at stop tokens and the budget.
      p_last: float32 ``[B]``, p of the verdict's token.
      emitted: int32 ``[B, D + 1]``, the emitted tokens, then -1.
      evidence: the numbers of ``Rule.evidence`` by name, float32 ``[B, N]``.
      rule: the acceptance rule; for ``auto``, the rule that was chosen.
    """

    draft: Draft
    depth: jax.Array
    acceptable: jax.Array
    p: jax.Array
    q: jax.Array
    top: tuple[jax.Array, jax.Array]
    verdict: Verdict
    p_last: jax.Array
    emitted: jax.Array
    evidence: dict[str, jax.Array]
    rule: object = static()


@functools.partial(jax.jit, static_argnums=(0, 1))
@own_arithmetic
def recorded_answer(target, rule, params, state: State, token: jax.Array) -> RoundArrays:
    """Records the choice of the first token, which the pass over the end of the prompt emits.

    Args:
      target, rule, params: see ``specjax.decode``.
      state: a state whose root is the last token of the prompt, see ``prefill.unanswered``.
      token: int32 ``[B]``, the token that was emitted; -1 where there was none.
    """
    plain = Plain()
    state = dataclasses.replace(state, drafter_state=())
    rule = judge_of_first(rule, state)
    verified = draft_and_verify(target, plain, rule, params, state)
    verdict = dataclasses.replace(verified.verdict, token=token)
    verified = dataclasses.replace(verified, verdict=verdict)
    return _arrays(rule, params, verified, token[:, None], round_keys(state, ACCEPT))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@own_arithmetic
def run_recorded_round(target, drafter, rule, params, state: State) -> tuple[State, RoundArrays]:
    """Runs one round of the loop and records it.

    Args:
      target, drafter, rule, params: see ``specjax.decode``.
      state: the state before the round.

    Returns:
      the state after the round, and its record.
    """
    verified = draft_and_verify(target, drafter, rule, params, state)
    _, emitted = truncate(verified.draft, verified.verdict, state)
    arrays = _arrays(rule, params, verified, emitted, round_keys(state, ACCEPT))
    return commit_round(target, drafter, params, state, verified), arrays


def _arrays(rule, params, verified: VerifiedRound, emitted, keys) -> RoundArrays:
    """Returns the record. The laws are computed node by node, because a law has V numbers."""
    draft, context, verdict = verified.draft, verified.context, verified.verdict
    batch, nodes = draft.tokens.shape
    rows, tokens = jnp.arange(batch)[:, None], jnp.maximum(draft.tokens, 0)
    logits = required(verified.scores.logits, "scores.logits")
    target_law, draft_law = TargetLaw(draft, logits, context), DraftLaw(draft, logits.shape[-1])
    most = min(TOP, logits.shape[-1])
    last = walk.at_node(verdict.path, jnp.maximum(verdict.count, 0))

    def law(node):
        if context.sampling.greedy:
            p = jax.nn.softmax(target_law.adjusted_at(node), axis=-1)
            return jnp.where(jnp.isnan(p), 0.0, p)  # no token is allowed
        return target_law(node)

    def at(index):
        node = jnp.full((batch,), index, jnp.int32)
        p = law(node)
        best = jax.lax.top_k(p, most)
        return p[rows, tokens], draft_law(node)[rows[:, 0], tokens[:, index]], best[1], best[0]

    after, q, best, best_p = jax.lax.map(at, jnp.arange(nodes))
    parent = jnp.broadcast_to(trees.parents(draft), (batch, nodes))
    rule = acceptance.choose(rule, draft, context.sampling.greedy)
    evidence = rule.evidence(params.get("rule"), draft, target_law, draft_law, keys)
    contract_checks.check_evidence(rule, evidence, draft)
    others = dict.fromkeys(("laws", "topology", "partial", "vectors"))  # not recorded
    return RoundArrays(
        draft=dataclasses.replace(draft, parent=parent, **others),
        depth=jnp.broadcast_to(trees.depths(draft), (batch, nodes)),
        acceptable=walk.eligible(draft),
        p=after[jnp.maximum(parent, ROOT), rows, jnp.arange(nodes)],
        q=q.T,
        top=(jnp.swapaxes(best, 0, 1), jnp.swapaxes(best_p, 0, 1)),
        verdict=verdict,
        p_last=law(last)[rows[:, 0], jnp.maximum(verdict.token, 0)],
        emitted=emitted,
        evidence=evidence,
        rule=rule,
    )


def record_rounds(
    target,
    drafter,
    rule,
    params,
    state: State,
    spell: Callable[[int], object] = str,
    row: int = 0,
    refreshed: Callable[[State], PyTree] | None = None,
    before: State | None = None,
) -> Iterator[tuple[Round, State]]:
    """Runs rounds until one row has ended, and records each round of this row.

    Args:
      target, drafter, rule, params: see ``specjax.decode``.
      state: the state after the prompts were read; its buffers are not donated.
      spell: returns the text of a token id for the sentences.
      row: index of the recorded row; the other rows are decoded along with it.
      refreshed: returns ``params`` for the round that begins at a state; None: they stay.
      before: the same state before the first token, see ``prefill.unanswered``; the pass that
        emitted it is then recorded first, as a round without a draft. None: it is not recorded.

    Yields:
      the record of each round of the row, and the state after that round.
    """
    if before is not None and int(sharding.gather(state.length - before.length)[row]):
        token = jnp.take_along_axis(state.tokens, before.length[:, None], axis=1, mode="clip")[:, 0]
        token = jnp.where(state.length > before.length, token, -1)
        arrays = recorded_answer(target, rule, params, before, token)
        arrays, ended = sharding.gather((arrays, state.ended))
        yield _round(arrays, row, spell, ENDED[int(ended[row])]), state
    while int(sharding.gather(state.budget)[row]) > 0:
        params = params if refreshed is None else refreshed(state)
        state, arrays = run_recorded_round(target, drafter, rule, params, state)
        arrays, ended = sharding.gather((arrays, state.ended))
        yield _round(arrays, row, spell, ENDED[int(ended[row])]), state


def _round(arrays: RoundArrays, row: int, spell, reason: str) -> Round:
    one = jax.tree.map(lambda x: x[row], arrays)
    count, token = int(one.verdict.count), int(one.verdict.token)
    path = [int(node) for node in one.verdict.path[: count + 1]]
    emitted = [int(t) for t in one.emitted if t >= 0]
    last = path[-1] if path else ROOT
    below = one.acceptable & (one.draft.parent == last)
    kind = CORRECTION if below.any() else BONUS if count > 0 else PLAIN
    if token < 0:
        kind = NONE
    whole = Round(
        nodes=_nodes(one, path, spell),
        path=path,
        kind=kind,
        token=token,
        p=None if token < 0 else float(one.p_last),
        emitted=emitted,
        from_draft=[i < count for i in range(len(emitted))],
        rule=one.rule.name,
        reason=reason,
    )
    return whole.cut(len(emitted), reason)


def _nodes(one: RoundArrays, path: list[int], spell) -> list[Node]:
    """Returns the nodes of one row, before they are cut at the end of the text."""
    draft, tokens = one.draft, one.draft.tokens
    parent = required(draft.parent, "draft.parent")  # as ``_arrays`` records it
    scored = np.ones(tokens.shape, bool) if draft.scored is None else draft.scored
    accepted_child = dict(zip(path, path[1:], strict=False))
    next_token = {node: int(tokens[child]) for node, child in accepted_child.items()}
    if path:
        next_token[path[-1]] = int(one.verdict.token)

    def fate(n: int, above: int) -> tuple[str, str]:
        if n == ROOT:
            return ROOT_NODE, "the last committed token; its entry is computed in this pass"
        if not scored[n]:
            return LEFT_OUT, "not proposed in this round: the target did not score it"
        if tokens[n] < 0:
            return LEFT_OUT, "the drafter's law had no token left to propose here"
        if not path:
            return EMPTY, "the round emits nothing: no token was judged"
        if n in path:
            return ACCEPTED, words(explain.ACCEPTED, n, above)
        if not one.acceptable[n]:
            return PASSENGER, "scored only for the drafter: it cannot be accepted"
        if above not in path:
            if nodes[above].status == BEYOND:  # nodes below an untested node are not tested either
                return BEYOND, explain.WHY[explain.BEYOND]
            return judged(explain.BEYOND, n, above)
        chosen = accepted_child.get(above)
        if chosen is not None and tokens[chosen] == tokens[n]:
            return REJECTED, "a sibling with the same token was accepted"
        if one.q[n] == 0:
            return REJECTED, "its earlier siblings had used up the drafter's law"
        later = chosen is not None and chosen < n
        return judged(explain.LATER if later else explain.REJECTED, n, above)

    def judged(case: str, n: int, above: int) -> tuple[str, str]:
        status = REJECTED if explain.judges(one.rule, case) else BEYOND
        return status, words(case, n, above)

    def words(case: str, n: int, above: int) -> str:
        earlier = np.flatnonzero(one.acceptable & (parent == above))
        first = not earlier.size or earlier[0] == n
        numbers = {name: float(x[n]) for name, x in one.evidence.items()}
        name = spell(next_token[above]) if next_token.get(above, -1) >= 0 else "nothing"
        share = "p" if first else "the residual of p after its earlier siblings"
        fields = {"p": float(one.p[n]), "q": float(one.q[n]), "said": name, "share": share}
        return explain.sentence(one.rule, case, **fields, **numbers)

    nodes = []
    for n in range(len(tokens)):
        above = int(parent[n])
        status, because = fate(n, above)
        there = n > ROOT and scored[n] and scored[above] and tokens[n] >= 0
        drawn = draft.law is not None and draft.law[n] != POINT_MASS
        top = zip(one.top[0][n], one.top[1][n], strict=True) if n in path else ()
        node = Node(
            token=int(tokens[n]),
            parent=above,
            depth=int(one.depth[n]),
            p=float(one.p[n]) if there else None,
            q=float(one.q[n]) if there and drawn else None,
            status=status,
            why=because,
            top=tuple((int(token), float(p)) for token, p in top),
        )
        nodes.append(node)
    return nodes
