"""The exact law of the tokens that an acceptance rule emits, on toys, without any draws.

A rule tests each node at most once, against a uniform number of its own, with a threshold that
depends on the draft only. The thresholds are found by bisection, and the rule is run for each
pattern of nodes that pass. The law is the sum over all drafts and patterns, with their
probabilities.

A rule is enumerable if it takes its uniforms from ``sampling.drawing.uniforms`` and its tokens from
``sampling.drawing.draw``, which are replaced while it is traced. The draws are summed over as if
they were independent of all tests: whether a rule uses a uniform twice is not seen here, so
``specjax.audit_rule`` also runs the rule with its own random numbers. ``specjax.audit_rule`` and
the project's own tests are made of these functions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from ..acceptance import walk
from ..acceptance.node_laws import DraftLaw
from ..sampling import drawing
from ..types import ROOT, Draft

ALMOST = 1 - 2.0**-24  # the greatest uniform
SCALE = 2**30  # the scale of weights that are returned as integers


class Table:
    """A random law for every prefix, or one given law for all: ``table(prefix) -> [V]``.

    Args:
      seed: the seed of the random laws.
      vocab: V, the size of the vocabulary.
      law: float ``[V]``, the law after every prefix; None: random laws.
    """

    def __init__(self, seed=0, vocab=3, law=None):
        self.random, self.laws = np.random.default_rng(seed), {}
        self.vocab, self.law = vocab if law is None else len(law), law

    def __call__(self, prefix):
        if prefix not in self.laws and self.law is not None:
            return np.asarray(self.law)
        if prefix not in self.laws:
            law = self.random.dirichlet(np.full(self.vocab, 0.7)) + 1e-3
            self.laws[prefix] = law / law.sum()
        return self.laws[prefix]


def joint(p, size):
    """Returns the law of the first ``size`` tokens by ``p``, probabilities ``[V, ..., V]``."""
    law = np.zeros((p.vocab,) * size)
    for tokens in itertools.product(range(p.vocab), repeat=size):
        law[tokens] = np.prod([p(tokens[:i])[x] for i, x in enumerate(tokens)])
    return law


def prefixes(tokens, parent):
    """Returns for each node the tokens on the path from the root, which is excluded, to the node.

    Args:
      tokens: the tokens of the nodes.
      parent: the parents of the nodes.
    """
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parent[node]], int(tokens[node])))
    return paths


def given(q, earlier, draws):
    """Returns the law of a further draw from ``q`` after the draws ``earlier``.

    Args:
      q: probabilities ``[V]``.
      earlier: the tokens of earlier siblings.
      draws: how siblings are drawn, see ``Draft.draws``.
    """
    hub = int(np.argmax(q))
    if not earlier or draws == "iid":
        return q
    if draws == "hub" and earlier[0] != hub:
        return np.eye(len(q))[hub]
    rest = np.where(np.isin(np.arange(len(q)), earlier), 0, q)
    return rest / rest.sum() if rest.sum() > 0 else rest


def drafts(q, topology, draws):
    """Returns all drafts and their probabilities.

    Args:
      q: the drafter's laws, a ``Table``.
      topology: the parents of the nodes.
      draws: how siblings are drawn, see ``Draft.draws``.

    Returns:
      a ``Draft`` with one row for each of R drafts, and the probabilities ``[R]``, which may be 0.
    """
    rows, weights = [], []
    first = [topology.index(above) for above in topology]  # siblings share the law of the first
    for said in itertools.product(range(q.vocab), repeat=len(topology) - 1):
        tokens, weight = (0, *said), 1.0
        paths = prefixes(tokens, topology)
        for node in range(1, len(topology)):
            earlier = [tokens[n] for n in range(first[node], node) if topology[n] == topology[node]]
            weight *= given(q(paths[topology[node]]), earlier, draws)[tokens[node]]
        laws = [q(paths[above]) for above in topology[1:]]
        rows.append((tokens, [n - 1 for n in first], laws))
        weights.append(weight)
    tokens, law, laws = (np.asarray(x) for x in zip(*rows, strict=True))
    law[:, ROOT] = -1
    arrays: dict[str, Any] = dict(
        start=np.zeros(len(rows), np.int32),
        tokens=tokens.astype(np.int32),
        candidate=np.ones(tokens.shape, bool),
        law=law.astype(np.int32),
        laws=laws.astype(np.float32),
    )
    return Draft(**arrays, topology=topology, draws=draws), np.asarray(weights)


def fixed_drafts(q, topology):
    """Returns drafts without laws, each with the same probability: ``(Draft, [R])``.

    Siblings are the most probable tokens by ``q``, the least probable ones, and tokens 0, 1, ...
    """
    above = [topology[:node].count(parent) for node, parent in enumerate(topology)]
    rows = []
    for order in (lambda law: np.argsort(-law), np.argsort, lambda law: np.arange(len(law))):
        tokens = [0]
        for node in range(1, len(topology)):
            path = prefixes(tokens, topology)[topology[node]]
            tokens.append(int(order(q(path))[above[node]]))
        rows.append(tokens)
    arrays: dict[str, Any] = dict(
        start=np.zeros(len(rows), np.int32), tokens=np.asarray(rows, np.int32)
    )
    return Draft(**arrays, topology=topology), np.full(len(rows), 1 / len(rows))


def with_passengers(draft, weights):
    """Returns each draft with each node in turn as a passenger, and as one that is not scored.

    What hangs below the node is like the node.
    """
    kept = []
    for node in range(1, draft.num_nodes):
        gone = [False] * draft.num_nodes
        for other in range(node, draft.num_nodes):
            gone[other] = other == node or gone[draft.topology[other]]
        kept.append(np.logical_not(gone))
    kept, size = np.asarray(kept), 2 * len(kept)
    every = np.ones_like(kept)
    many = jax.tree.map(lambda x: np.repeat(x, size, axis=0), draft)
    many = dataclasses.replace(
        many,
        candidate=np.tile(np.concatenate([kept, every]), (len(weights), 1)),
        scored=np.tile(np.concatenate([every, kept]), (len(weights), 1)),
    )
    return many, np.repeat(weights, size) / size


class NodeLaw:
    """The target's law after a node, as a rule is given it: ``law(node int32 [B]) -> [B, V]``.

    Args:
      laws: probabilities float32 ``[B, N, V]``, after each node.
    """

    def __init__(self, laws):
        self.laws = laws

    def __call__(self, node):
        return walk.at_node(self.laws, node)

    def adjusted(self):
        """Returns logits float32 ``[B, N, V]``."""
        return jnp.log(self.laws)


def target_of(p, draft):
    """Returns for each row and node the tokens down to it, and the target's law after it.

    A node that may not be accepted has a wrong law, so that a rule that accepts it is biased.
    """
    parents = draft.parent if draft.topology is None else [draft.topology]
    parents = np.broadcast_to(parents, draft.tokens.shape)
    paths = [prefixes(*row) for row in zip(np.asarray(draft.tokens), parents, strict=True)]
    laws = np.asarray([[p(path) for path in row] for row in paths], np.float32)
    able = np.array(walk.eligible(draft))
    able[:, ROOT] = True
    return paths, np.where(able[..., None], laws, np.roll(laws, 1, axis=-1))


def product(one, other):
    """Combines two independent drafts; the rows are all pairs of the rows of both."""
    (a, u), (b, v) = one, other
    a = jax.tree.map(lambda x: np.repeat(x, len(v), axis=0), a)
    b = jax.tree.map(lambda x: np.tile(x, (len(u),) + (1,) * (x.ndim - 1)), b)
    return a, b, np.outer(u, v).reshape(-1)


@functools.partial(jax.jit, static_argnums=0)
def _judge(rule, draft, p, uniform):
    def whole(weights, uniform):
        share = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        return jnp.round(share * SCALE).astype(jnp.int32)

    # the rule gets uniforms instead of the key, and returns the last law instead of the last token
    with (
        mock.patch.object(drawing, "uniforms", lambda key, count: key),
        mock.patch.object(drawing, "draw", whole),
    ):
        q = DraftLaw(draft, p.shape[-1])
        verdict = rule({}, draft, NodeLaw(p), q, uniform)
    node = jnp.take_along_axis(verdict.path, verdict.count[:, None], axis=1)[:, 0]
    return node, verdict.token


def outcome(rule, draft, weights, p, depth):
    """Returns the exact law of the tokens that a rule emits, by its tests.

    Args:
      rule: the acceptance rule.
      draft, weights: all drafts and their probabilities, from ``drafts``.
      p: the target's laws, a ``Table``.
      depth: the depth of the draft.

    Returns:
      the law of the next ``depth + 1`` tokens, ``[V, ..., V]``, and the expected number of accepted
      tokens.

    Raises:
      ValueError: the rule cannot be enumerated.
    """
    count, nodes = draft.tokens.shape
    tests = nodes - 1
    paths, laws = target_of(p, draft)

    patterns = np.asarray(list(itertools.product((0.0, ALMOST), repeat=tests)))
    searches = [(n, *u) for n in range(tests) for u in patterns if u[n] == 0]
    at = np.asarray([s[0] for s in searches])
    others = np.asarray([s[1:] for s in searches])
    size = max(len(searches), len(patterns))  # one shape, one compilation
    wide = jax.tree.map(lambda x: jnp.asarray(np.repeat(x, size, axis=0)), (draft, laws))

    def judge(uniform):
        """Returns final nodes ``[R, K]`` and laws ``[R, K, V]`` for uniforms ``[R, K, tests]``."""
        given = np.zeros((count, size, nodes), np.float32)
        given[:, : uniform.shape[1], 1:] = uniform
        node, rest = _judge(rule, *wide, jnp.asarray(given.reshape(-1, nodes)))
        shape = (count, size)
        return (np.asarray(x).reshape(*shape, -1)[:, : uniform.shape[1]] for x in (node, rest))

    def search(values):
        uniform = np.broadcast_to(others, (count, *others.shape)).copy()
        np.put_along_axis(
            uniform, np.broadcast_to(at, values.shape)[..., None], values[..., None], 2
        )
        return next(judge(uniform))[..., 0]

    low, high = np.zeros((count, len(at))), np.full((count, len(at)), ALMOST)
    passes, fails = search(low), search(high)
    for _ in range(26):
        middle = (low + high) / 2
        same = search(middle) == passes
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    matters = passes != fails
    chance = np.zeros((count, tests))
    for n in range(tests):
        found = np.ma.masked_array(high, ~(matters & (at == n)))
        spread = np.ma.filled(found.max(axis=1) - found.min(axis=1), 0)
        if not np.all(spread < 1e-5):
            raise ValueError(
                "the rule cannot be enumerated: the threshold of a test depends on more than the "
                "draft"
            )
        chance[:, n] = np.ma.filled(found.min(axis=1), 0.5)

    node, rest = judge(np.broadcast_to(patterns, (count, *patterns.shape)))
    law, accepted = np.zeros((p.vocab,) * (depth + 1)), 0.0
    pending = {}
    passed = np.where(patterns == 0, chance[:, None], 1 - chance[:, None]).prod(axis=2)
    for row, k in itertools.product(range(count), range(len(patterns))):
        path = paths[row][node[row, k, 0]]
        weight = weights[row] * passed[row, k]
        accepted += weight * len(path)
        pending[path] = pending.get(path, 0) + weight * rest[row, k] / SCALE
    for path, last in pending.items():
        left = depth - len(path)
        for tokens in itertools.product(range(p.vocab), repeat=left + 1):
            whole = path + tokens
            after = [p(whole[: len(path) + i])[x] for i, x in enumerate(tokens)][1:]
            law[whole] += last[tokens[0]] * np.prod(after)
    return law, accepted


def distance(law, p):
    """Returns the total variation between ``law`` and the law of the target ``p``."""
    return 0.5 * np.abs(law - joint(p, law.ndim)).sum()


@functools.partial(jax.jit, static_argnums=0)
def _follow(rule, draft, p, said):
    with (
        mock.patch.object(drawing, "uniforms", lambda key, count: key),
        mock.patch.object(drawing, "draw", lambda weights, uniform: uniform.astype(jnp.int32)),
    ):
        q = DraftLaw(draft, p.shape[-1])
        return rule({}, draft, NodeLaw(p), q, said)


def saying(rule, draft, weights, p, depth):
    """Returns the result of ``outcome`` for a rule that draws a token at each visited node.

    The function sums over all combinations of these tokens, with their probabilities. Its arguments
    are those of ``outcome``.
    """
    count, nodes = draft.tokens.shape
    said = np.asarray(list(itertools.product(range(p.vocab), repeat=nodes)))
    paths, laws = target_of(p, draft)
    wide = jax.tree.map(lambda x: jnp.asarray(np.repeat(x, len(said), axis=0)), (draft, laws))
    verdict = _follow(rule, *wide, jnp.asarray(np.tile(said, (count, 1)), jnp.float32))
    node = np.take_along_axis(np.asarray(verdict.path), np.asarray(verdict.count)[:, None], 1)
    token = np.asarray(verdict.token).tolist()
    law, accepted = np.zeros((p.vocab,) * (depth + 1)), 0.0
    for row, k in itertools.product(range(count), range(len(said))):
        at = row * len(said) + k
        path = paths[row][node[at, 0]]
        weight = weights[row] * np.prod(laws[row, np.arange(nodes), said[k]])
        accepted += weight * len(path)
        begin = (*path, token[at])
        for rest in itertools.product(range(p.vocab), repeat=depth - len(path)):
            after = [p(begin + rest[:i])[x] for i, x in enumerate(rest)]
            law[begin + rest] += weight * np.prod(after)
    return law, accepted
