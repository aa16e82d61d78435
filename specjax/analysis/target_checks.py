"""``check_target``: a target of one's own against what the contract promises.

The target runs on small random inputs, and its results are compared with those of the slow,
obvious way. Whoever writes a target runs the checks once, and in a test.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..decoding import contract_checks
from ..decoding.inputs import check_objects
from ..drafters.plain import Plain
from ..types import Draft, PyTree, Target, Verdict
from .contract_report import ContractReport, run_check

TREE = (-1, 0, 0, 1, 1, 2, 3)  # nodes of the draft that is scored
PATH = (0, 1, 4)  # the nodes that are accepted: no prefix of all nodes
LENGTHS = (1, 4, 9)  # committed tokens of each row


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
            checks.append(run_check(name, run))
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
