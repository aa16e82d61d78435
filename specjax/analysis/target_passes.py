"""Passes of a target over small random inputs, by the slow, obvious way and by others."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..types import Draft, PartialPass, Scores, Verdict

TREE = (-1, 0, 0, 1, 1, 2, 3)  # nodes of the draft that is scored
PATH = (0, 1, 4)  # the nodes that are accepted: no prefix of all nodes
LENGTHS = (1, 4, 9)  # committed tokens of each row


class TargetPasses:
    """A target, small random inputs for it, and the passes over them that checks compare.

    Args:
      target, params, inputs, tolerance, seed: as ``check_target`` takes them.

    Attributes:
      tokens: int32 ``[B, S]``, the texts of the rows.
      lengths: int32 ``[B]``, their committed tokens.
      nodes: int32 ``[B, N]``, the tokens of the tree that is scored.
    """

    def __init__(self, target, params, inputs, tolerance, seed):
        self.target, self.params, self.inputs = target, params, inputs
        self.tolerance, self.capacity = tolerance, max(LENGTHS) + len(TREE) + 1
        random, batch = np.random.default_rng(seed), len(LENGTHS)
        size = (batch, self.capacity)
        self.tokens = random.integers(0, target.vocab_size, size).astype(np.int32)
        self.nodes = random.integers(0, target.vocab_size, (batch, len(TREE))).astype(np.int32)
        self.lengths = np.asarray(LENGTHS, np.int32)
        self.nodes[:, 0] = self.tokens[np.arange(batch), self.lengths - 1]  # the roots
        static = ("topology", "logits", "features")
        self.verify = jax.jit(self._verify, static_argnames=static)
        self.commit = jax.jit(target.commit)

    def _verify(self, cache, tokens, start, topology, partial=None, **settings):
        partial = None if partial is None else PartialPass(entries=partial)
        draft = Draft(start=start, tokens=tokens, topology=topology, partial=partial)
        return self.target.verify(self.params, cache, draft, **settings)

    @functools.cached_property
    def prefilled(self):
        """The cache of ``tokens[:length - 1]`` of each row, built in one pass."""
        return self.rebuilt(self.tokens, self.lengths - 1)

    @functools.cached_property
    def draft(self) -> Draft:
        """The tree that is scored."""
        start = jnp.asarray(self.lengths - 1)
        return Draft(start=start, tokens=jnp.asarray(self.nodes), topology=TREE)

    @functools.cached_property
    def scores(self) -> Scores:
        """The scores of the tree."""
        return self.tree_scores()

    def tree_scores(self, **settings) -> Scores:
        """The scores of the tree, with settings of ``verify`` or ``partial``, entries of a part."""
        return self.verify(self.prefilled, self.nodes, self.lengths - 1, topology=TREE, **settings)

    def init(self):
        """An empty cache."""
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

    def one_by_one(self, cache, tokens, start, features=()):
        """float32 ``[T, B, V]``: logits after each of ``tokens`` int32 ``[B, T]``; or the hidden
        states ``features`` there, ``[T, B, F]``."""
        found, batch = [], len(tokens)
        for step in range(tokens.shape[1]):
            at = start + step
            own = tokens[:, step : step + 1]
            scores = self.verify(cache, own, at, topology=(-1,), features=features)
            found.append((scores.features if features else scores.logits)[:, 0])
            zeros = np.zeros((batch,), np.int32)
            verdict = Verdict(path=np.zeros((batch, 1), np.int32), count=zeros, token=zeros)
            cache = self.commit(cache, scores.entries, at, verdict)
        return jnp.stack(found)

    def leaf_paths(self) -> list[list[int]]:
        """The nodes from the root to each leaf of the tree."""
        found = []
        for leaf in range(1, len(TREE)):
            if leaf in TREE:
                continue
            path = [leaf]
            while TREE[path[0]] >= 0:
                path.insert(0, TREE[path[0]])
            found.append(path)
        return found

    def paths(self, features=()) -> Iterator[tuple[list[int], jax.Array]]:
        """Yields each of ``leaf_paths``, and what ``one_by_one`` gives of its tokens."""
        for path in self.leaf_paths():
            tokens = self.nodes[:, path]
            yield path, self.one_by_one(self.prefilled, tokens, self.lengths - 1, features)

    def near(self, found, expected, what: str, things: str = "logits") -> str:
        """What is wrong with ``found``, if it is not ``expected``; empty: nothing is."""
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        able = np.isfinite(expected)
        if (np.isfinite(found) != able).any():
            return f"{what}: other {things} are infinite or NaN"
        spread = max(float(np.std(expected[able])), 1e-30)
        off = float(np.max(np.abs(found - expected)[able], initial=0.0)) / spread
        if off > self.tolerance:
            return f"{what}: {things} differ by {off:.2g} of their standard deviation"
        return ""

    def committed(self, counts):
        """The cache after ``counts`` int32 ``[B]`` nodes of ``PATH`` were accepted."""
        path = np.broadcast_to(np.asarray(PATH, np.int32), (len(LENGTHS), len(PATH)))
        verdict = Verdict(path=path, count=counts, token=counts)
        return self.commit(self.prefilled, self.scores.entries, self.lengths - 1, verdict)

    def second_part(self, **settings) -> Scores:
        """The scores of the tree's nodes from 3 on, after a pass over the first three."""

        @jax.jit
        def both(cache):
            first = trees.narrow(self.draft, 3)
            entries = self.target.verify(self.params, cache, first).entries
            more = settings | dict(since=3, entries=entries)
            return self.target.verify(self.params, cache, self.draft, **more)

        return both(self.prefilled)
