"""Rounds one at a time, with all that was looked at: what ``specjax trace`` shows.

The rounds are the loop's own, ``round.judge`` and then ``round.conclude``; what is added are the
laws at every node, which a rule asks for only where it stands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, sharding, trees
from .._internal.pytree import pytree_dataclass, static
from ..acceptance import walk
from ..acceptance.node_laws import DraftLaw, TargetLaw
from ..decoding.round import (
    ACCEPT,
    VerifiedRound,
    commit_round,
    draft_and_verify,
    round_keys,
    truncate,
)
from ..decoding.state import ENDED, State
from ..types import POINT_MASS, ROOT, Draft, Verdict
from . import explain

TOP = 5  # tokens of the target's law that are kept at a visited node

# what became of a node
ROOT_NODE, ACCEPTED, CUT, REJECTED = "root", "accepted", "cut", "rejected"
BEYOND, PASSENGER, LEFT_OUT, SILENT = "beyond", "passenger", "left out", "silent"
CORRECTION, BONUS, OWN, NONE = "correction", "bonus", "own", "none"


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a draft.

    Attributes:
      token: its id; -1 where the drafter had none to propose.
      parent: index of the node above; -1 at the root.
      depth: 0 at the root.
      p: of the token, by the target's law after its parent; None at the root, and where the parent
        was not scored. At temperature 0, where that law is a point mass, the softmax at
        temperature 1.
      q: of the token, by the law that it was drawn from; None for a point mass.
      status: ``root``, ``accepted``, ``cut`` (accepted, but behind a stop or beyond the budget),
        ``rejected``, ``beyond`` (the rule did not look at it), ``passenger`` (scored, cannot be
        accepted), ``left out`` (not scored in this round, or no token was proposed), ``silent``
        (the round emits nothing).
      why: the same in words.
      top: the most probable tokens after it and their p, where the walk came by; else empty.
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
      nodes: of the draft; the first is the root.
      path: the accepted nodes, from the root down, before stops and the budget cut anything;
        empty in a silent round.
      kind: of the token behind the path: ``correction`` (a child was there and rejected),
        ``bonus`` (all was accepted), ``own`` (nothing was drafted), ``none`` (a silent round, or a
        law that gives no token any probability).
      token: the token behind the path, -1 for none; p: its probability as in ``Node.p``.
      emitted: the new tokens; from_draft: which of them were drafted.
      rule: the acceptance rule that ``auto`` stands for.
      reason: why the row ended with this round, "" if it did not.
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
        """The round with its first ``num`` tokens, for the text ended there for this reason."""

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
class Seen:
    """A round on the device; arrays lead with B, logits are left behind.

    ``p``, ``q`` float32 ``[B, N]`` as in ``Node``; ``top`` ids and p ``[B, N, TOP]``; ``behind``
    float32 ``[B]``, p of the verdict's token; ``emitted`` int32 ``[B, D + 1]``, -1 behind the last;
    ``able`` bool ``[B, N]``, nodes that the rule may accept; ``evidence``: of the rule, by name.
    """

    draft: Draft
    depth: jax.Array
    able: jax.Array
    p: jax.Array
    q: jax.Array
    top: tuple[jax.Array, jax.Array]
    verdict: Verdict
    behind: jax.Array
    emitted: jax.Array
    evidence: dict[str, jax.Array]
    rule: object = static()  # the one that ``auto`` stands for


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def advance(target, drafter, rule, params, state: State) -> tuple[State, Seen]:
    """One round of the loop, and what was looked at."""
    judged = draft_and_verify(target, drafter, rule, params, state)
    _, emitted = truncate(judged.draft, judged.verdict, state)
    seen = _look(rule, params, judged, emitted, round_keys(state, ACCEPT))
    return commit_round(target, drafter, params, state, judged), seen


def _look(rule, params, judged: VerifiedRound, emitted, keys) -> Seen:
    """The laws at every node, one after the other: they are as wide as the vocabulary."""
    draft, context, verdict = judged.draft, judged.context, judged.verdict
    batch, nodes = draft.tokens.shape
    rows, tokens = jnp.arange(batch)[:, None], jnp.maximum(draft.tokens, 0)
    target_law = TargetLaw(draft, judged.scores.logits, context)
    draft_law = DraftLaw(draft, judged.scores.logits.shape[-1])
    most = min(TOP, judged.scores.logits.shape[-1])
    last = walk.at_node(verdict.path, jnp.maximum(verdict.count, 0))

    def law(node):
        if context.sampling.greedy:
            return jax.nn.softmax(target_law.adjusted_at(node), axis=-1)
        return target_law(node)

    def at(index):
        node = jnp.full((batch,), index, jnp.int32)
        p = law(node)
        best = jax.lax.top_k(p, most)
        return p[rows, tokens], draft_law(node)[rows[:, 0], tokens[:, index]], best[1], best[0]

    after, q, best, best_p = jax.lax.map(at, jnp.arange(nodes))
    parent = jnp.broadcast_to(trees.parents(draft), (batch, nodes))
    rule = acceptance.choose(rule, draft, context.sampling.greedy)
    evidence = getattr(rule, "evidence", lambda *_: {})
    return Seen(
        draft=dataclasses.replace(draft, laws=None, parent=parent, topology=None),
        depth=jnp.broadcast_to(trees.depths(draft), (batch, nodes)),
        able=walk.eligible(draft),
        p=after[jnp.maximum(parent, ROOT), rows, jnp.arange(nodes)],
        q=q.T,
        top=(jnp.swapaxes(best, 0, 1), jnp.swapaxes(best_p, 0, 1)),
        verdict=verdict,
        behind=law(last)[rows[:, 0], jnp.maximum(verdict.token, 0)],
        emitted=emitted,
        evidence=evidence(params, draft, target_law, draft_law, keys),
        rule=rule,
    )


def record(
    target, drafter, rule, params, state: State, spell: Callable[[int], object] = str, row: int = 0
) -> Iterator[tuple[Round, State]]:
    """Runs rounds until row ``row`` has ended; yields what it did in each, and the state after.

    Args:
      state: from ``loop.start``; it is not given away.
      spell: a token's name in the sentences.
      row: which one; the others run along, and may have ended before or not yet.
    """
    while int(sharding.gather(state.budget)[row]) > 0:
        state, seen = advance(target, drafter, rule, params, state)
        seen, ended = sharding.gather((seen, state.ended))
        yield _round(seen, row, spell, ENDED[int(ended[row])]), state


def _round(seen: Seen, row: int, spell, reason: str) -> Round:
    one = jax.tree.map(lambda x: x[row], seen)
    count, token = int(one.verdict.count), int(one.verdict.token)
    path = [int(node) for node in one.verdict.path[: count + 1]]
    emitted = [int(t) for t in one.emitted if t >= 0]
    last = path[-1] if path else ROOT
    below = one.able & (one.draft.parent == last)
    kind = CORRECTION if below.any() else BONUS if count > 0 else OWN
    if token < 0:
        kind = NONE
    whole = Round(
        nodes=_nodes(one, path, spell),
        path=path,
        kind=kind,
        token=token,
        p=None if token < 0 else float(one.behind),
        emitted=emitted,
        from_draft=[i < count for i in range(len(emitted))],
        rule=one.rule.name,
        reason=reason,
    )
    return whole.cut(len(emitted), reason)


def _nodes(one: Seen, path: list[int], spell) -> list[Node]:
    """The nodes of one row, as if nothing were cut."""
    draft, tokens = one.draft, one.draft.tokens
    scored = np.ones(tokens.shape, bool) if draft.scored is None else draft.scored
    follows = dict(zip(path, path[1:], strict=False))  # of an accepted node: the accepted child
    said = {node: int(tokens[child]) for node, child in follows.items()}
    if path:
        said[path[-1]] = int(one.verdict.token)

    def fate(n: int, above: int) -> tuple[str, str]:
        if n == ROOT:
            return ROOT_NODE, "the last committed token: known, fed in this pass"
        if not scored[n]:
            return LEFT_OUT, "not proposed in this round: it did not go through the target"
        if tokens[n] < 0:
            return LEFT_OUT, "no token was left to propose here: the law has fewer than siblings"
        if not path:
            return SILENT, "a silent round: nothing is judged"
        if n in path:
            return ACCEPTED, words(explain.ACCEPTED, n, above)
        if not one.able[n]:
            return PASSENGER, "a passenger: scored for the drafter, it cannot be accepted"
        if above not in path:
            if nodes[above].status == BEYOND:  # nor is what stands below it looked at
                return BEYOND, explain.WHY[explain.BEYOND]
            return judged(explain.BEYOND, n, above)
        chosen = follows.get(above)
        if chosen is not None and tokens[chosen] == tokens[n]:
            return REJECTED, "its twin, the same token at the same place, was accepted"
        if one.q[n] == 0:
            return REJECTED, "no draw: its law has nothing left beside its earlier siblings"
        later = chosen is not None and chosen < n
        return judged(explain.LATER if later else explain.REJECTED, n, above)

    def judged(case: str, n: int, above: int) -> tuple[str, str]:
        status = REJECTED if explain.judges(one.rule, case) else BEYOND
        return status, words(case, n, above)

    def words(case: str, n: int, above: int) -> str:
        earlier = np.flatnonzero(one.able & (draft.parent == above))
        first = not earlier.size or earlier[0] == n
        numbers = {name: float(x[n]) for name, x in one.evidence.items()}
        name = spell(said[above]) if said.get(above, -1) >= 0 else "nothing"
        share = "p" if first else "what the siblings before it left of p"
        fields = {"p": float(one.p[n]), "q": float(one.q[n]), "said": name, "share": share}
        return explain.sentence(one.rule, case, **fields, **numbers)

    nodes = []
    for n in range(len(tokens)):
        above = int(draft.parent[n])
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
