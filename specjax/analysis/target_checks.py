"""``check_target``: tests whether a target keeps the contract of ``specjax.Target``.

The target runs on small random inputs, and its results are compared with those of passes over one
token at a time. The check is meant for authors of targets and their tests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..decoding import contract_checks
from ..decoding.inputs import check_objects
from ..drafters.plain import Plain
from ..types import HeadTarget, PyTree, Target, Verdict
from .contract_report import ContractReport, run_check
from .hidden_state_checks import hidden_state_checks, part_checks
from .target_passes import LENGTHS, PATH, TREE, TargetPasses, verdict_of

ONE_STATE = (
    "verify reads the entries of positions below draft.start alone, which may be fewer than were "
    "committed. A recurrent model keeps one state for each position: with a single state it may "
    "decode rightly, but is a poor draft model (see 'Recurrent models' in docs/extend/target.md)"
)


def check_target(
    target: Target, params: PyTree, *, inputs: PyTree = None, tolerance: float = 1e-3, seed: int = 0
) -> ContractReport:
    """Checks whether a target keeps the contract of ``specjax.Target``.

    A tree of seven nodes in a batch of three rows of different lengths is compared with passes one
    token at a time; the logits after a commit with those of one pass over the whole text. For a
    ``specjax.HeadTarget`` the hidden states, ``embed``, ``head`` and ``head_table`` are checked
    too, and for a target with sub-networks the passes of two of them.

    Args:
      target: the target.
      params: the target's weights, ``params["target"]`` of ``decode``.
      inputs: ``inputs`` of the target's ``init`` for a batch of three rows, or None.
      tolerance: the greatest accepted difference of logits, in units of their standard deviation.
        Use about 0.05 in bfloat16.
      seed: the seed of the random tokens.

    Returns:
      a report; ``print`` it, or call its ``raise_if_wrong``.

    Raises:
      TypeError: ``target`` is not a ``specjax.Target``.

    Example::

        print(specjax.check_target(MyTarget(), weights))
    """
    check_objects(target, Plain())
    return TargetChecks(target, params, inputs, tolerance, seed).report()


class TargetChecks(TargetPasses):
    """The checks of ``check_target``."""

    def report(self) -> ContractReport:
        more = hidden_state_checks(self, self.target) if isinstance(self.target, HeadTarget) else ()
        checks = []
        for name, run in (
            ("shapes and dtypes of init, verify and commit", self.shapes),
            ("the target is hashable", lambda: hash(self.target) and None),
            ("the cache after a commit gives the logits of one pass over the text", self.cache),
            ("a tree's logits are those of its paths, token by token", self.tree),
            ("commit leaves a row with count -1 as it is", self.untouched),
            ("entries beyond the committed tokens are not seen", self.unseen),
            ("a pass in two parts (since, entries) is the whole pass", self.parts),
            ("a node at a negative position does not exist", self.before_the_text),
            ("a row's logits do not depend on the other rows", self.rows),
            ("verify is pure: the same twice, the entries also without logits", self.pure),
            *more,
            *part_checks(self),
        ):
            checks.append(run_check(name, run))
            if not checks[0].passed:  # the other checks could not run
                break
        return ContractReport(type(self.target).__name__, tuple(checks))

    def shapes(self) -> str:
        batch, draft = len(LENGTHS), self.draft
        start = draft.start

        def run():
            cache = self.init()
            contract_checks.check_leads("init: the cache", cache, batch)
            scores = contract_checks.verified(self.target, self.params, cache, draft)
            path = jnp.broadcast_to(jnp.asarray(PATH, jnp.int32), (batch, len(PATH)))
            verdict = Verdict(path=path, count=start * 0 + 2, token=start)
            kept = self.target.commit(cache, scores.entries, start, verdict)
            hook = f"{type(self.target).__name__}.commit: the cache"
            contract_checks.check_same(hook, kept, cache)

        jax.eval_shape(run)
        return ""

    def tree(self) -> str:
        for path, expected in self.paths():
            found = jnp.moveaxis(self.logits[:, jnp.asarray(path)], 1, 0)
            if wrong := self.near(found, expected, f"nodes {path}"):
                return wrong
        return ""

    def cache(self) -> str:
        counts = np.asarray([2, 1, 0], np.int32)
        kept, rows = self.committed(counts), np.arange(len(LENGTHS))[:, None]
        text = self.tokens.copy()
        text[rows, self.lengths[:, None] - 1 + np.arange(3)] = self.nodes[:, list(PATH)]
        at = self.lengths + counts
        found = self.verify(kept, text[rows, at[:, None]], at, topology=(-1,)).logits[:, 0]
        chain = trees.chain_parents(self.capacity - 1)
        whole = self.verify(self.init(), text, np.zeros_like(at), topology=chain).logits
        wrong = self.near(found, np.asarray(whole)[rows[:, 0], at], "the next token")
        pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(self.prefilled), strict=True)
        if wrong and all(np.array_equal(new, old, equal_nan=True) for new, old in pairs):
            return f"commit returned the cache as it was; {wrong}"
        return wrong

    def untouched(self) -> str:
        kept = self.committed(np.asarray([-1, 1, -1], np.int32))
        for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(self.prefilled), strict=True):
            for row in (0, 2):
                if not np.array_equal(new[row], old[row]):
                    return f"row {row} was written to"
        return ""

    def unseen(self) -> str:
        more = self.committed(np.zeros(len(LENGTHS), np.int32))
        found = self.verify(more, self.nodes, self.lengths - 1, topology=TREE).logits
        wrong = self.near(found, self.logits, "with one entry more in the cache")
        return f"{wrong}; {ONE_STATE}" if wrong else ""

    def parts(self) -> str:
        scores = self.second_part()
        expected = self.logits[:, 3:]
        found = required(scores.logits, "scores.logits")
        if found.shape != expected.shape:
            return f"since=3 gives logits of shape {found.shape}: expected {expected.shape}"
        contract_checks.check_same("the entries", scores.entries, self.scores.entries)
        return self.near(found, expected, "nodes 3 and on")

    def before_the_text(self) -> str:
        batch = len(LENGTHS)
        start, first = np.full(batch, -1, np.int32), np.full((batch, 1), self.tokens[0, 0])
        cache, own = self.init(), self.tokens[:, :1]
        other = self.tokens[:, 1:2]
        found = self.verify(cache, np.hstack([first, own]), start, topology=(-1, 0)).logits
        again = self.verify(cache, np.hstack([other, own]), start, topology=(-1, 0)).logits
        expected = self.verify(cache, own, start + 1, topology=(-1,)).logits
        wrong = self.near(again[:, 1], found[:, 1], "another token at position -1")
        wrong = wrong or self.near(found[:, 1], expected[:, 0], "position 0 after position -1")
        if wrong:
            return wrong
        later = np.roll(self.tokens, 3, axis=1)  # three tokens before the text, as drafters do
        kept = self.rebuilt(later, self.lengths - 1 + 3, start=-3)
        found = self.verify(kept, self.nodes, self.lengths - 1, topology=TREE).logits
        return self.near(found, self.logits, "after a commit that begins at position -3")

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
            cache = self.commit(empty, alone, zeros, verdict_of(path, count, zeros))
            start = self.lengths[row : row + 1] - 1
            found = self.verify(cache, self.nodes[row : row + 1], start, topology=TREE).logits
            if wrong := self.near(found[0], self.logits[row], f"row {row} alone"):
                return wrong
        return ""

    def pure(self) -> str:
        again = self.verify(self.prefilled, self.nodes, self.lengths - 1, topology=TREE)
        if not np.array_equal(again.logits, self.logits, equal_nan=True):
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
        return self.picked()

    def picked(self) -> str:
        """What is wrong with the logits of single nodes, where the target gives them."""
        if not self.target.picks_logits:
            return ""
        last = self.nodes.shape[1] - 1
        node = (np.arange(len(self.nodes)) % 2 * last).astype(np.int32)  # the root, the last node
        given = self.prefilled, self.nodes, self.lengths - 1
        found = self.verify(*given, topology=TREE, node=node).logits
        expected = self.logits[np.arange(len(node)), node]
        return self.near(found[:, 0], expected, "logits of one node of each row")
