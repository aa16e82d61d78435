"""Passes of a target over small random inputs: whole trees, and one token at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..types import Draft, PartialPass, Scores, Verdict

TREE = (-1, 0, 0, 1, 1, 2, 3)  # the parents of the scored draft's nodes
PATH = (0, 1, 4)  # the accepted nodes, which are not the first nodes of the draft
LENGTHS = (1, 4, 9)  # the number of committed tokens in each row


def verdict_of(path, count, token) -> Verdict:
    """Returns the verdict with these arrays of NumPy."""
    return Verdict(path=jnp.asarray(path), count=jnp.asarray(count), token=jnp.asarray(token))


class TargetPasses:
    """A target, small random inputs, and the passes over these inputs that checks compare.

    Args:
      target, params, inputs, tolerance, seed: see ``check_target``.

    Attributes:
      tokens: int32 ``[B, S]``, the texts of the rows.
      lengths: int32 ``[B]``, the numbers of committed tokens.
      nodes: int32 ``[B, N]``, the tokens of the scored tree.
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

    def _verify(self, cache, tokens, start, topology, partial=None, node=None, **settings):
        if node is not None:  # the one of each row whose logits are asked for
            settings["logits"] = node
        partial = None if partial is None else PartialPass(entries=partial)
        draft = Draft(start=start, tokens=tokens, topology=topology, partial=partial)
        return self.target.verify(self.params, cache, draft, **settings)

    @functools.cached_property
    def prefilled(self):
        """The cache of ``tokens[:length - 1]`` in each row, filled by one pass."""
        return self.rebuilt(self.tokens, self.lengths - 1)

    @functools.cached_property
    def draft(self) -> Draft:
        """The scored tree."""
        start = jnp.asarray(self.lengths - 1)
        return Draft(start=start, tokens=jnp.asarray(self.nodes), topology=TREE)

    @functools.cached_property
    def scores(self) -> Scores:
        """The scores of the tree."""
        return self.tree_scores()

    @functools.cached_property
    def logits(self) -> jax.Array:
        """The logits of the tree, float32 ``[B, N, V]``."""
        return required(self.scores.logits, "scores.logits")

    def tree_scores(self, **settings) -> Scores:
        """Returns the scores of the tree.

        Args:
          settings: further arguments of ``verify``, or ``partial``, the entries of a partial pass.
        """
        return self.verify(self.prefilled, self.nodes, self.lengths - 1, topology=TREE, **settings)

    def init(self):
        """Returns an empty cache."""
        return self.target.init(self.params, len(LENGTHS), self.capacity, self.inputs)

    def rebuilt(self, tokens, count, start: int = 0):
        """Returns the cache of the first ``count`` tokens of each row, filled by one pass.

        Args:
          tokens: int32 ``[B, T]``.
          count: int32 ``[B]``.
          start: the position of the first token.
        """
        chain = trees.chain_parents(tokens.shape[1] - 1)
        first = np.full(len(tokens), start, np.int32)
        cache = self.init()
        entries = self.verify(cache, tokens, first, topology=chain, logits=False).entries
        path = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        verdict = verdict_of(path, count.astype(np.int32) - 1, first)
        return self.commit(cache, entries, first, verdict)

    def one_by_one(self, cache, tokens, start, features=()):
        """Feeds tokens in one pass for each token.

        Args:
          cache: the cache before the tokens.
          tokens: int32 ``[B, T]``.
          start: int32 ``[B]``, the position of the first token.
          features: hidden states, see ``Target.verify``.

        Returns:
          the logits after each token, float32 ``[T, B, V]``; with ``features``, the hidden states,
          ``[T, B, F]``.
        """
        found, batch = [], len(tokens)
        for step in range(tokens.shape[1]):
            at = start + step
            own = tokens[:, step : step + 1]
            scores = self.verify(cache, own, at, topology=(-1,), features=features)
            numbers = scores.features if features else scores.logits
            found.append(required(numbers, "the scores")[:, 0])
            zeros = np.zeros((batch,), np.int32)
            verdict = verdict_of(np.zeros((batch, 1), np.int32), zeros, zeros)
            cache = self.commit(cache, scores.entries, at, verdict)
        return jnp.stack(found)

    def leaf_paths(self) -> list[list[int]]:
        """Returns the nodes from the root to each leaf of the tree."""
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
        """Yields each of ``leaf_paths``, and the result of ``one_by_one`` for its tokens."""
        for path in self.leaf_paths():
            tokens = self.nodes[:, path]
            yield path, self.one_by_one(self.prefilled, tokens, self.lengths - 1, features)

    def near(self, found, expected, what: str, things: str = "logits") -> str:
        """Returns how ``found`` differs from ``expected``; an empty text if they agree.

        Args:
          found, expected: arrays of one shape.
          what: the name of the compared case, for the text.
          things: the name of the compared numbers, for the text.
        """
        found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        if any(np.isnan(x).any() or np.isposinf(x).any() for x in (found, expected)):
            return f"{what}: {things} are not finite (NaN or +inf)"
        able = np.isfinite(expected)
        if (np.isfinite(found) != able).any():
            return f"{what}: other {things} are infinite or NaN"
        spread = max(float(np.std(expected[able])), 1e-30)
        off = float(np.max(np.abs(found - expected)[able], initial=0.0)) / spread
        if off > self.tolerance:
            return f"{what}: {things} differ by {off:.2g} of their standard deviation"
        return ""

    def committed(self, counts):
        """Returns the cache after ``counts`` int32 ``[B]`` nodes of ``PATH`` were accepted."""
        path = np.broadcast_to(np.asarray(PATH, np.int32), (len(LENGTHS), len(PATH)))
        verdict = verdict_of(path, counts, counts)
        return self.commit(self.prefilled, self.scores.entries, self.lengths - 1, verdict)

    def second_part(self, **settings) -> Scores:
        """Returns the scores of the nodes from 3 on, after a pass over the first three nodes."""

        @jax.jit
        def both(cache):
            first = trees.narrow(self.draft, 3)
            entries = self.target.verify(self.params, cache, first).entries
            more = settings | dict(since=3, entries=entries)
            return self.target.verify(self.params, cache, self.draft, **more)

        return both(self.prefilled)
