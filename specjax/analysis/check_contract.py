"""Checks of a target or a drafter of one's own against what the contract promises.

They run the object on small random inputs and compare what it returns with what the slow, obvious
way returns. Whoever writes a target or a drafter runs them once, and in a test.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..acceptance.walk import eligible
from ..decoding import contract_checks, loop, stepwise
from ..decoding.inputs import check_objects
from ..decoding.round import draft_step, round_context
from ..drafters.plain import Plain
from ..sampling.distribution import Sampling
from ..types import POINT_MASS, Draft, Drafter, PyTree, Target, Verdict

TREE = (-1, 0, 0, 1, 1, 2, 3)  # nodes of the draft that is scored
PATH = (0, 1, 4)  # of which these are accepted: no prefix of the nodes
LENGTHS = (1, 4, 9)  # committed tokens of each row
SIGMAS = 6  # how far a count may be from what its law says


@dataclasses.dataclass(frozen=True)
class Check:
    """One property: its ``name``, whether it ``passed``, and what was found where it did not."""

    name: str
    passed: bool
    found: str = ""


@dataclasses.dataclass(frozen=True)
class ContractReport:
    """What ``check_target`` or ``check_drafter`` found. True where every check passed.

    Attributes:
      subject: what was checked.
      checks: one ``Check`` for each property.
    """

    subject: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'all checks passed' if self else 'WRONG'}"]
        for check in self.checks:
            mark = "ok   " if check.passed else "WRONG"
            lines.append(f"  {mark} {check.name}" + (f": {check.found}" if check.found else ""))
        return "\n".join(lines)

    def raise_if_wrong(self) -> None:
        """Raises ``AssertionError`` with the whole report unless every check passed."""
        if not self:
            raise AssertionError(str(self))


def check_target(
    target: Target, params: PyTree, *, inputs: PyTree = None, tolerance: float = 1e-3, seed: int = 0
) -> ContractReport:
    """Checks a target against what ``specjax.Target`` promises.

    A tree of seven nodes in a batch of three rows of different lengths is compared with passes one
    token at a time; the cache after a commit with one that was built anew.

    Args:
      params: the target's weights, which are ``params["target"]`` of ``decode``.
      inputs: what the target's ``init`` takes, for a batch of three rows, or None.
      tolerance: the largest difference of logits, as a part of their standard deviation. Use 0.05
        or so in bfloat16.
      seed: of the random tokens.

    Returns:
      a report; ``print`` it, or call its ``raise_if_wrong``.

    Raises:
      TypeError: ``target`` is no ``Target``.

    Example::

        print(specjax.check_target(MyTarget(), weights))
    """
    check_objects(target, Plain())
    return _TargetChecks(target, params, inputs, tolerance, seed).report()


class _TargetChecks:
    """The parts of ``check_target``."""

    def __init__(self, target, params, inputs, tolerance, seed):
        self.target, self.params, self.inputs = target, params, inputs
        self.tolerance, self.capacity = tolerance, max(LENGTHS) + len(TREE) + 1
        random, batch = np.random.default_rng(seed), len(LENGTHS)
        size = (batch, self.capacity)
        self.tokens = random.integers(0, target.vocab_size, size).astype(np.int32)
        self.nodes = random.integers(0, target.vocab_size, (batch, len(TREE))).astype(np.int32)
        self.lengths = np.asarray(LENGTHS, np.int32)
        self.nodes[:, 0] = self.tokens[np.arange(batch), self.lengths - 1]  # the roots
        self.verify = jax.jit(self._verify, static_argnames=("topology", "logits"))
        self.commit = jax.jit(target.commit)

    def _verify(self, cache, tokens, start, topology, **settings):
        draft = Draft(start=start, tokens=tokens, topology=topology)
        return self.target.verify(self.params, cache, draft, **settings)

    def report(self) -> ContractReport:
        checks = []
        for name, run in (
            ("shapes and dtypes of init, verify and commit", self.shapes),
            ("the target is hashable", lambda: hash(self.target) and None),
            ("a tree's logits are those of its paths, token by token", self.tree),
            ("the cache after a commit is the one that is built anew", self.cache),
            ("commit leaves a row with count -1 as it is", self.untouched),
            ("entries beyond the committed tokens are not seen", self.unseen),
            ("a pass in two parts (since, entries) is the whole pass", self.parts),
            ("a node at a negative position does not exist", self.before_the_text),
            ("a row's logits do not depend on the other rows", self.rows),
            ("verify is pure: the same twice, the entries also without logits", self.pure),
        ):
            checks.append(_checked(name, run))
            if not checks[0].passed:  # nothing else could run
                break
        return ContractReport(type(self.target).__name__, tuple(checks))

    @functools.cached_property
    def prefilled(self):
        """The cache of ``tokens[:length - 1]`` of each row, built in one pass."""
        return self.rebuilt(self.tokens, self.lengths - 1)

    @functools.cached_property
    def scores(self):
        return self.verify(self.prefilled, self.nodes, self.lengths - 1, topology=TREE)

    def init(self):
        return self.target.init(self.params, len(LENGTHS), self.capacity, self.inputs)

    def rebuilt(self, tokens, count):
        """The cache of the first ``count`` int32 ``[B]`` of ``tokens``."""
        chain = trees.chain_parents(tokens.shape[1] - 1)
        zeros = np.zeros(len(tokens), np.int32)
        cache = self.init()
        entries = self.verify(cache, tokens, zeros, topology=chain, logits=False).entries
        path = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        verdict = Verdict(path=path, count=count.astype(np.int32) - 1, token=zeros)
        return self.commit(cache, entries, zeros, verdict)

    def one_by_one(self, cache, tokens, start):
        """float32 ``[T, B, V]``: logits after each of ``tokens`` int32 ``[B, T]``."""
        found, batch = [], len(tokens)
        for step in range(tokens.shape[1]):
            at = start + step
            scores = self.verify(cache, tokens[:, step : step + 1], at, topology=(-1,))
            found.append(scores.logits[:, 0])
            zeros = np.zeros((batch,), np.int32)
            verdict = Verdict(path=np.zeros((batch, 1), np.int32), count=zeros, token=zeros)
            cache = self.commit(cache, scores.entries, at, verdict)
        return jnp.stack(found), cache

    def near(self, found, expected, what: str) -> str:
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        able = np.isfinite(expected)
        if (np.isfinite(found) != able).any():
            return f"{what}: other logits are infinite or NaN"
        spread = max(float(np.std(expected[able])), 1e-30)
        off = float(np.max(np.abs(found - expected)[able], initial=0.0)) / spread
        if off > self.tolerance:
            return f"{what}: logits differ by {off:.2g} of their standard deviation"
        return ""

    def shapes(self) -> str:
        batch, start = len(LENGTHS), jnp.asarray(self.lengths - 1)
        draft = Draft(start=start, tokens=jnp.asarray(self.nodes), topology=TREE)

        def run():
            cache = self.init()
            contract_checks.check_leads("init: the cache", cache, batch)
            scores = self.target.verify(self.params, cache, draft)
            contract_checks.check_scores(self.target, scores, draft, ())
            path = jnp.broadcast_to(jnp.asarray(PATH, jnp.int32), (batch, len(PATH)))
            verdict = Verdict(path=path, count=start * 0 + 2, token=start)
            kept = self.target.commit(cache, scores.entries, start, verdict)
            contract_checks.check_same("commit: the cache", kept, cache)

        jax.eval_shape(run)
        return ""

    def tree(self) -> str:
        for leaf in range(1, len(TREE)):
            if leaf in TREE:
                continue
            path = [leaf]
            while TREE[path[0]] >= 0:
                path.insert(0, TREE[path[0]])
            expected, _ = self.one_by_one(self.prefilled, self.nodes[:, path], self.lengths - 1)
            found = jnp.moveaxis(self.scores.logits[:, jnp.asarray(path)], 1, 0)
            if wrong := self.near(found, expected, f"nodes {path}"):
                return wrong
        return ""

    def committed(self, counts):
        path = np.broadcast_to(np.asarray(PATH, np.int32), (len(LENGTHS), len(PATH)))
        verdict = Verdict(path=path, count=counts, token=counts)
        return self.commit(self.prefilled, self.scores.entries, self.lengths - 1, verdict)

    def cache(self) -> str:
        counts = np.asarray([2, 1, 0], np.int32)
        kept, rows = self.committed(counts), np.arange(len(LENGTHS))[:, None]
        text = self.tokens.copy()
        text[rows, self.lengths[:, None] - 1 + np.arange(3)] = self.nodes[:, list(PATH)]
        anew, at = self.rebuilt(text, self.lengths + counts), self.lengths + counts
        after = text[rows, at[:, None]]
        found = self.verify(kept, after, at, topology=(-1,)).logits
        expected = self.verify(anew, after, at, topology=(-1,)).logits
        return self.near(found, expected, "the next token")

    def untouched(self) -> str:
        kept = self.committed(np.asarray([-1, 1, -1], np.int32))
        for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(self.prefilled), strict=True):
            for row in (0, 2):
                if not np.array_equal(new[row], old[row]):
                    return f"row {row} was written to"
        return ""

    def unseen(self) -> str:
        more, _ = self.committed(np.zeros(len(LENGTHS), np.int32)), None
        found = self.verify(more, self.nodes, self.lengths - 1, topology=TREE).logits
        return self.near(found, self.scores.logits, "with one entry more in the cache")

    def parts(self) -> str:
        draft = dict(tokens=self.nodes, start=self.lengths - 1)

        @jax.jit
        def both(cache, tokens, start):
            whole = Draft(start=start, tokens=tokens, topology=TREE)
            first = trees.narrow(whole, 3)
            entries = self.target.verify(self.params, cache, first).entries
            return self.target.verify(self.params, cache, whole, since=3, entries=entries)

        scores = both(self.prefilled, **draft)
        expected = self.scores.logits[:, 3:]
        if jnp.shape(scores.logits) != jnp.shape(expected):
            return f"since=3 gives logits of shape {scores.logits.shape}: expected {expected.shape}"
        contract_checks.check_same("the entries", scores.entries, self.scores.entries)
        return self.near(scores.logits, expected, "nodes 3 and on")

    def before_the_text(self) -> str:
        batch = len(LENGTHS)
        start, first = np.full(batch, -1, np.int32), np.full((batch, 1), self.tokens[0, 0])
        cache, own = self.init(), self.tokens[:, :1]
        other = self.tokens[:, 1:2]
        found = self.verify(cache, np.hstack([first, own]), start, topology=(-1, 0)).logits
        again = self.verify(cache, np.hstack([other, own]), start, topology=(-1, 0)).logits
        expected = self.verify(cache, own, start + 1, topology=(-1,)).logits
        wrong = self.near(again[:, 1], found[:, 1], "another token at position -1")
        return wrong or self.near(found[:, 1], expected[:, 0], "position 0 after position -1")

    def rows(self) -> str:
        if self.inputs is not None:
            return ""
        chain = trees.chain_parents(self.capacity - 1)
        for row in range(len(LENGTHS)):
            zeros = np.zeros((1,), np.int32)
            empty = self.target.init(self.params, 1, self.capacity, None)
            text = self.tokens[row : row + 1]
            alone = self.verify(empty, text, zeros, topology=chain).entries
            path = np.arange(self.capacity, dtype=np.int32)[None]
            count = self.lengths[row : row + 1] - 2
            cache = self.commit(empty, alone, zeros, Verdict(path=path, count=count, token=zeros))
            start = self.lengths[row : row + 1] - 1
            found = self.verify(cache, self.nodes[row : row + 1], start, topology=TREE).logits
            if wrong := self.near(found[0], self.scores.logits[row], f"row {row} alone"):
                return wrong
        return ""

    def pure(self) -> str:
        again = self.verify(self.prefilled, self.nodes, self.lengths - 1, topology=TREE)
        if not np.array_equal(again.logits, self.scores.logits, equal_nan=True):
            return "a second pass gives other logits"
        bare = self.verify(
            self.prefilled, self.nodes, self.lengths - 1, topology=TREE, logits=False
        )
        contract_checks.check_same("the entries", bare.entries, self.scores.entries)
        pairs = zip(
            jax.tree.leaves(bare.entries), jax.tree.leaves(self.scores.entries), strict=True
        )
        if not all(np.allclose(x, y, rtol=1e-3, atol=1e-3) for x, y in pairs):
            return "logits=False gives other entries"
        return ""


def check_drafter(
    target: Target,
    drafter: Drafter,
    params: PyTree,
    *,
    tokens=None,
    max_new_tokens: int = 24,
    draws: int = 2000,
    inputs: PyTree = None,
    seed: int = 0,
) -> ContractReport:
    """Checks a drafter against what ``specjax.Drafter`` promises.

    Greedy output is compared with plain decoding, and drawn tokens with the laws that their draft
    states, which is what makes sampling lossless under ``rejection``.

    Args:
      target: the target that the drafter drafts for.
      params: those of ``decode``: ``{"target": ..., "drafter": ...}``.
      tokens: prompts int32 ``[B, T]``, at least two rows; None: random ones.
      max_new_tokens: how far the greedy comparison goes.
      draws: rows that draw from one prompt.
      inputs: what ``decode`` takes, or None; not for drawn tokens.
      seed: of random prompts and draws.

    Returns:
      a report; ``print`` it, or call its ``raise_if_wrong``.

    Raises:
      TypeError: ``target`` or ``drafter`` lacks its base class.

    Example::

        params = {"target": weights, "drafter": None}
        print(specjax.check_drafter(target, MyDrafter(3), params))
    """
    check_objects(target, drafter)
    if tokens is None:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, target.vocab_size, (3, 6)).astype(np.int32)
    tokens = np.asarray(tokens, np.int32)
    lengths = np.maximum(1, tokens.shape[1] - np.arange(len(tokens)))
    key = jax.random.key(seed)
    common = dict(max_new_tokens=max_new_tokens, key=key, inputs=inputs)

    def state_of(tokens, lengths, temperature):
        sampling = Sampling(temperature=temperature)
        return stepwise.init_state(
            target, drafter, params, tokens, lengths, sampling=sampling, **common
        )

    @jax.jit
    def drafted(params, state):
        """The draft; tokens that no rule looks at are -1."""
        context = round_context(params, state)
        draft = draft_step(drafter, params, state.drafter_state, context)[0]
        return dataclasses.replace(draft, tokens=jnp.where(eligible(draft), draft.tokens, -1))

    def shapes():
        def one_round(params):
            state = state_of(tokens, lengths, 0.0)
            return loop.burst(target, drafter, "auto", 1, params, state)

        jax.eval_shape(one_round, params)
        return ""

    def greedy():
        found = loop.decode(target, drafter, params, tokens, lengths, **common)
        plain = {**params, "drafter": None}
        wanted = loop.decode(target, Plain(), plain, tokens, lengths, **common)
        for row in range(len(tokens)):
            size = int(wanted.lengths[row])
            pair = np.asarray(found.tokens[row, :size]), np.asarray(wanted.tokens[row, :size])
            if not np.array_equal(*pair):
                at = int(np.flatnonzero(pair[0] != pair[1])[0])
                return f"row {row}: token {at} is {pair[0][at]}, plain decoding says {pair[1][at]}"
        return ""

    def rows():
        state = state_of(tokens, lengths, 1.0)
        whole = drafted(params, state)
        for row in range(len(tokens)):
            alone = drafted(params, jax.tree.map(lambda x, r=row: x[r : r + 1], state))
            if not np.array_equal(alone.tokens[0], whole.tokens[row]):
                return f"row {row} drafts {alone.tokens[0]} alone, {whole.tokens[row]} in the batch"
        return ""

    def buffer():
        state = state_of(tokens, lengths, 0.0)
        beyond = jnp.arange(state.tokens.shape[1]) >= state.length[:, None]
        filled = jnp.where(beyond, (state.tokens + 1) % target.vocab_size, state.tokens)
        other = drafted(params, dataclasses.replace(state, tokens=filled))
        if not np.array_equal(other.tokens, drafted(params, state).tokens):
            return "what the buffer holds after the last committed token changes the draft"
        return ""

    def laws():
        if inputs is not None:
            return ""
        many = np.repeat(tokens[:1], draws, axis=0)
        draft = drafted(params, state_of(many, np.full(draws, tokens.shape[1]), 1.0))
        return "" if draft.laws is None else _wrong_law(draft, target.vocab_size)

    checks = []
    for name, run in (
        ("the drafter is hashable", lambda: hash(drafter) and None),
        ("shapes and dtypes of a round, the state keeps its structure", shapes),
        ("greedy output is identical to plain decoding", greedy),
        ("a row's draft does not depend on the other rows", rows),
        ("a draft depends on committed tokens alone", buffer),
        ("drawn tokens follow the laws that the draft states", laws),
    ):
        checks.append(_checked(name, run))
        if not checks[-1].passed and run is shapes:
            break
    return ContractReport(f"{type(drafter).__name__} ({drafter.name})", tuple(checks))


def _wrong_law(draft: Draft, vocab: int) -> str:
    """What is wrong with how often each node's tokens were drawn; nodes that are the first drawn
    of their siblings, whose law is the stated one."""
    tokens, index = np.asarray(draft.tokens), np.asarray(draft.law)
    parent = np.broadcast_to(np.asarray(trees.parents(draft)), tokens.shape)
    rows = np.arange(len(tokens))
    for node in range(1, tokens.shape[1]):
        here = (parent[:, 1:node] == parent[:, node : node + 1]).any(axis=1)
        able = ~here & (index[:, node] != POINT_MASS) & (tokens[:, node] >= 0)
        if not able.any():
            continue
        q = np.zeros((len(tokens), vocab))
        stated = np.asarray(draft.laws)[rows, np.maximum(index[:, node], 0)]
        if draft.vocab is None:
            q[:] = stated
        else:
            np.add.at(q, (rows[:, None], np.asarray(draft.vocab)), stated)
        q = q[able]
        if not np.allclose(q.sum(axis=1), 1, atol=1e-3):
            return f"node {node}: its law sums to {q.sum(axis=1).min():.3g}, not to 1"
        counts = np.bincount(tokens[able, node], minlength=vocab)
        expected, variance = q.sum(axis=0), (q * (1 - q)).sum(axis=0)
        off = np.abs(counts - expected) / np.sqrt(variance + 1)
        if off.max() > SIGMAS:
            token = int(off.argmax())
            return (
                f"node {node}: token {token} was drawn {counts[token]} times in {len(q)}, its law "
                f"says {expected[token]:.0f}"
            )
    return ""


def _checked(name: str, run) -> Check:
    try:
        found = run() or ""
    except Exception as error:  # whatever a user's own code raises is a finding
        found = f"{type(error).__name__}: {error}"
    return Check(name, not found, found)
