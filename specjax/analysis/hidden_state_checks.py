"""The checks of ``check_target`` for heads: hidden states, embeddings and the LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..decoding import contract_checks
from ..types import Draft, HeadTarget
from .target_passes import TargetPasses

Named = tuple[str, Callable[[], str]]  # a property, and a function that tells what is wrong


def hidden_state_checks(base: TargetPasses, target: HeadTarget) -> tuple[Named, ...]:
    """Returns the checks of a target for heads.

    Args:
      base: passes of the target over a small tree.
      target: the target.
    """
    checks = _HiddenStateChecks(base, target)
    return (
        ("shapes and dtypes of hidden states, embed, head and head_table", checks.shapes),
        ("a tree's hidden states are those of its paths, token by token", checks.tree),
        ("several hidden states stand side by side in the requested order", checks.order),
        ("a pass in two parts has the hidden states of the whole pass", checks.two_parts),
        ("head gives the logits of a pass from its last hidden state", checks.head),
        ("embed returns one column for each token, row by row", checks.embed),
    )


class _HiddenStateChecks:
    """The checks of hidden states, with the tree and the cache of ``base``."""

    def __init__(self, base: TargetPasses, target: HeadTarget):
        self.base, self.target, self.last = base, target, target.num_layers
        self.some = tuple(sorted({0, self.last // 2, self.last}))  # the compared hidden states

    def features(self, which: tuple[int, ...]) -> jax.Array:
        return required(self.base.tree_scores(features=which).features, "scores.features")

    def shapes(self) -> str:
        base, draft = self.base, self.base.draft
        size = self.target.hidden_size

        def run(cache, params):
            for which in ((self.last,), self.some):
                scores = contract_checks.verified(
                    self.target, params, cache, draft, features=which, logits=False
                )
                width = required(scores.features, "scores.features").shape[-1]
                if size is None and width % len(which):
                    raise ValueError(
                        f"verify: features are {width} wide: expected "
                        f"{len(which)} hidden states of one width side by side"
                    )

        jax.eval_shape(run, base.prefilled, base.params)
        contract_checks.check_head_target(self.target, base.params, len(base.lengths))
        return ""

    def tree(self) -> str:
        found = self.features(self.some)
        for path, expected in self.base.paths(features=self.some):
            mine = jnp.moveaxis(found[:, jnp.asarray(path)], 1, 0)
            if wrong := self.base.near(mine, expected, f"nodes {path}", "hidden states"):
                return wrong
        return ""

    def order(self) -> str:
        alone = {i: self.features((i,)) for i in self.some}
        for which in (self.some, self.some[::-1]):
            expected = jnp.concatenate([alone[i] for i in which], axis=-1)
            found = self.features(which)
            if found.shape != expected.shape:
                return f"features={which} have shape {found.shape}: expected {expected.shape}"
            if wrong := self.base.near(found, expected, f"features={which}", "hidden states"):
                return wrong
        return ""

    def two_parts(self) -> str:
        scores = self.base.second_part(features=(self.last,))
        found = required(scores.features, "scores.features")
        expected = self.features((self.last,))[:, 3:]
        if found.shape != expected.shape:
            return f"since=3 gives features of shape {found.shape}: expected {expected.shape}"
        return self.base.near(found, expected, "nodes 3 and on", "hidden states")

    def head(self) -> str:
        states = self.features((self.last,))
        batch, size = len(states), states.shape[-1]
        run = jax.jit(lambda params, x: self.target.head(params, x, batch))
        found = run(self.base.params, states.reshape(-1, size).T)
        return self.base.near(found, self.base.scores.logits, "head(the last hidden state)")

    def embed(self) -> str:
        tokens, run = self.base.nodes, jax.jit(self.target.embed)
        found = np.asarray(run(self.base.params, tokens), np.float64)
        alone = [np.asarray(run(self.base.params, own[None]), np.float64) for own in tokens]
        return self.base.near(found, np.concatenate(alone, axis=1), "each row alone", "columns")


def part_checks(base: TargetPasses) -> tuple[Named, ...]:
    """Returns the checks of sub-networks: an exit and a skipped sublayer, if the target has them.

    Args:
      base: passes of the target over a small tree.
    """
    last = base.target.num_layers - 1 if isinstance(base.target, HeadTarget) else 0
    found = []
    parts: tuple[dict[str, Any], ...] = {"exit": 1}, {"skip": (f"mlp.{last}",)}
    for which in parts:
        try:
            part = base.target.sub_network(**which)
        except ValueError:  # the target has no such part
            continue
        words = ", ".join(f"{name}={value}" for name, value in which.items())
        checks = _PartChecks(base, part)
        found += [
            (f"sub_network({words}): a tree's logits are those of its paths", checks.tree),
            (f"sub_network({words}): a pass in two parts is the whole pass", checks.two_parts),
        ]
        if part.hands_over:
            name = f"sub_network({words}): the target's pass continues from its partial pass"
            found.append((name, checks.handed_over))
    return tuple(found)


class _PartChecks:
    """The checks of one sub-network, with the tree and the cache of ``base``."""

    def __init__(self, base: TargetPasses, part):
        self.base, self.part = base, part
        self.verify = jax.jit(self._verify, static_argnames=("topology", "logits"))

    def _verify(self, params, cache, tokens, start, topology, logits=True):
        draft = Draft(start=start, tokens=tokens, topology=topology)
        own = self.part.select(cache, start)
        return contract_checks.verified_by_part(
            self.part, self.base.target, params, own, draft, logits=logits
        )

    def run(self, tokens, topology, **settings):
        base = self.base
        given = base.params, base.prefilled, tokens, base.lengths - 1
        return self.verify(*given, topology=topology, **settings)

    def tree(self) -> str:
        found = self.run(self.base.nodes, self.base.draft.topology).logits
        for path in self.base.leaf_paths():
            chain = trees.chain_parents(len(path) - 1)
            expected = self.run(self.base.nodes[:, path], chain).logits
            if wrong := self.base.near(found[:, jnp.asarray(path)], expected, f"nodes {path}"):
                return wrong
        return ""

    def two_parts(self) -> str:
        target, whole = self.base.target, self.base.draft

        @jax.jit
        def both(params, cache):
            verified = contract_checks.verified_by_part
            first, cache = trees.narrow(whole, 3), self.part.select(cache, whole.start)
            entries = verified(self.part, target, params, cache, first).entries
            later = dict(since=3, entries=entries)
            return verified(self.part, target, params, cache, whole, **later).logits

        expected = self.run(self.base.nodes, whole.topology).logits[:, 3:]
        return self.base.near(both(self.base.params, self.base.prefilled), expected, "nodes 3 on")

    def handed_over(self) -> str:
        base = self.base
        entries = self.run(base.nodes, base.draft.topology, logits=False).entries
        scores = base.tree_scores(partial=entries)
        contract_checks.check_same("the entries", scores.entries, base.scores.entries)
        return base.near(scores.logits, base.scores.logits, "with Draft.partial")
