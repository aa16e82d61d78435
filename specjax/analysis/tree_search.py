"""Which tree to draft: how often a drafter's r-th choice is right, and the tree that pays most.

``measure`` counts, on the target's own text, at which rank of the drafter's choices the true next
token stood, at each depth below true tokens. From these shares grow static trees: ``grow_greedy``
(Medusa), ``grow_optimal`` (Sequoia's dynamic programme, with limits on depth and on siblings), and
``grow_fastest`` weighs them against what a pass over N nodes costs.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..decoding import loop
from ..decoding.inputs import prepare_inputs
from ..drafters.base import ChainDrafter
from ..drafters.plain import Plain
from ..sampling.distribution import Sampling
from ..types import Drafter

CONFIDENCE_Z = 1.96  # of the 95 % intervals


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """Attributes:
    hits: int ``[D, R]``, how often the true token ``d + 1`` places below the root was the
      drafter's choice of rank ``r``, given the true tokens before it.
    trials: int ``[D]``, how often that was looked at.
    """

    hits: np.ndarray
    trials: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """float ``[D, R]``, shares; a row sums to at most 1."""
        return self.hits / np.maximum(self.trials, 1)[:, None]

    def interval(self, depth: int, rank: int) -> tuple[float, float]:
        """Wilson's 95 % interval of a share."""
        n, z = max(int(self.trials[depth]), 1), CONFIDENCE_Z
        share = self.hits[depth, rank] / n
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))

    def __str__(self) -> str:
        rows = []
        for depth, trials in enumerate(self.trials):
            shares = " ".join(f"{rate:6.1%}" for rate in self.rates[depth, :6])
            rows.append(f"depth {depth + 1}: {shares}  of {trials}")
        return "\n".join(rows)


def expected_tokens(shape: trees.Tree, rates: np.ndarray) -> float:
    """Tokens a round that a static tree is expected to give, the target's own included: 1 plus the
    sum over nodes of the product of ``rates [D, R]`` on the path to the node."""
    return float(sum(_values(shape, np.asarray(rates, float))))


def _values(shape: trees.Tree, rates) -> list[float]:
    values = [1.0]
    for node in range(1, shape.num_nodes):
        depth, rank = shape.depths[node], shape.ranks[node]
        inside = depth <= rates.shape[0] and rank < rates.shape[1]
        here = rates[depth - 1, rank] if inside else 0.0
        values.append(values[shape.parents[node]] * here)
    return values


# ------------------------------------------------------------------------------------ growing


def grow_greedy(acceptance: Acceptance | np.ndarray, nodes: int) -> trees.Tree:
    """The static tree with ``nodes`` drafted nodes that is expected to give most tokens.

    Adds the node of the greatest value, the product of the shares on its path, again and again; as
    values fall along a path, and should fall with the rank, that is the best tree of its size.

    Raises:
      ValueError: as ``_checked`` says: too little was counted, or there are too few nodes.

    References: Medusa, arXiv 2401.10774, section 2.3.3.
    """
    rates = _rates(acceptance)
    depths, ranks = rates.shape
    parents = [-1]
    heap = [(-rates[0, 0], 0, 0, 0, 1.0)]  # value, parent, depth of the node, rank, parent's value
    while heap and len(parents) <= nodes:
        value, parent, depth, rank, above = heapq.heappop(heap)
        parents.append(parent)
        if rank + 1 < ranks:
            heapq.heappush(heap, (-above * rates[depth, rank + 1], parent, depth, rank + 1, above))
        if depth + 1 < depths:
            below = value * rates[depth + 1, 0]
            heapq.heappush(heap, (below, len(parents) - 1, depth + 1, 0, -value))
    return _checked(trees.Tree(tuple(parents)), acceptance, nodes)


def grow_optimal(
    acceptance: Acceptance | np.ndarray,
    nodes: int,
    *,
    depth: int | None = None,
    siblings: int | None = None,
) -> trees.Tree:
    """The best static tree of at most ``nodes`` drafted nodes, ``depth`` levels, ``siblings``.

    A dynamic programme over (nodes, level, siblings): the best way to spend ``m`` nodes on the
    children from rank ``r`` on of a node at level ``d`` is to give the child of rank ``r`` some of
    them, itself included, and the later siblings the rest.

    Raises:
      ValueError: as for ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.1 and algorithm 1; there a sibling's share does
    not depend on the depth, here it may.
    """
    rates = _rates(acceptance)
    levels = min(rates.shape[0], depth or rates.shape[0])
    ranks = min(rates.shape[1], siblings or rates.shape[1])

    @functools.cache
    def best(m: int, d: int, r: int) -> tuple[float, int]:
        """Expected tokens of ``m`` nodes spent on children ``r ...`` at level ``d``, and how many
        of them go to child ``r`` (0: nothing more is added)."""
        if not m or d == levels or r == ranks:
            return 0.0, 0
        found = (0.0, 0)
        for own in range(1, m + 1):
            worth = rates[d, r] * (1 + best(own - 1, d + 1, 0)[0]) + best(m - own, d, r + 1)[0]
            if worth > found[0]:
                found = worth, own
        return found

    parents = [-1]

    def build(parent, m, d, r):
        _, own = best(m, d, r)
        if own:
            parents.append(parent)
            build(len(parents) - 1, own - 1, d + 1, 0)
            build(parent, m - own, d, r + 1)

    build(0, nodes, 0, 0)
    return _checked(trees.Tree(tuple(parents)), acceptance, None)


@dataclasses.dataclass(frozen=True)
class Choice:
    """``shape``: the tree, None if plain decoding is faster than any. ``ratio``: its expected
    tokens a second over plain decoding's. ``tokens``: expected a round."""

    shape: trees.Tree | None
    ratio: float
    tokens: float


def grow_fastest(
    acceptance: Acceptance | np.ndarray,
    passes: Mapping[int, float],
    level: float = 0.0,
    *,
    node: float = 0.0,
    rest: float = 0.0,
    siblings: int | None = None,
) -> Choice:
    """The tree that gives most tokens a second, of every size whose pass was timed.

    Args:
      passes: seconds of the target's pass over N nodes, the root counted; 1 must be among them.
      level, node: seconds that a round takes for each depth and for each drafted node, beyond the
        pass.
      rest: seconds of a round besides, in plain decoding too.

    Raises:
      ValueError: no time of a pass over 1 node; as for ``grow_greedy``.

    References: Sequoia, arXiv 2402.12374, section 3.3.
    """
    if 1 not in passes:
        raise ValueError(
            f"passes has sizes {sorted(passes)}: 1, plain decoding, must be among them"
        )
    plain = passes[1] + rest
    found = Choice(None, 1.0, 1.0)
    rates = _rates(acceptance)
    for size, seconds in sorted(passes.items()):
        for depth in range(1, min(rates.shape[0], size - 1) + 1):
            shape = grow_optimal(rates, size - 1, depth=depth, siblings=siblings)
            tokens = expected_tokens(shape, rates)
            ratio = tokens * plain / (seconds + rest + depth * level + (size - 1) * node)
            if shape.depth == depth and ratio > found.ratio:
                found = Choice(shape, ratio, tokens)
    if found.shape is not None:
        _checked(found.shape, acceptance, None)
    return found


def _rates(acceptance) -> np.ndarray:
    rates = (
        acceptance.rates if isinstance(acceptance, Acceptance) else np.asarray(acceptance, float)
    )
    if rates.ndim != 2 or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"shares of shape {rates.shape}: give [D, R], each from 0 to 1")
    return rates


def _checked(shape: trees.Tree, acceptance, nodes: int | None) -> trees.Tree:
    """Raises ValueError where the tree asked for is larger than what was counted: fewer nodes to
    choose from, or a node on whose place no true token was ever seen."""
    if nodes is not None and shape.num_nodes - 1 < nodes:
        depths, ranks = _rates(acceptance).shape
        raise ValueError(
            f"nodes={nodes}: {depths} depths of {ranks} ranks have only {shape.num_nodes - 1}; "
            "measure more ranks, or ask for fewer nodes"
        )
    if isinstance(acceptance, Acceptance):
        for depth, rank in sorted({*zip(shape.depths[1:], shape.ranks[1:], strict=True)}):
            if not acceptance.hits[depth - 1, rank]:
                low, high = acceptance.interval(depth - 1, rank)
                raise ValueError(
                    f"the tree of {shape.num_nodes - 1} nodes has choices of rank {rank} at depth "
                    f"{depth}, of which none was right in {acceptance.trials[depth - 1]} trials: "
                    f"their share lies anywhere in [{low:.4f}, {high:.4f}] (95 %). Measure on more "
                    "text, or ask for fewer nodes"
                )
    return shape


# ---------------------------------------------------------------------------------- measuring


@dataclasses.dataclass(frozen=True)
class _Followed(ChainDrafter):
    """Drafts nothing; counts where the true tokens stood among the choices of ``inner``, whose
    topology is ``trees.Follow``. ``params``: the weights of ``inner``, and the true text with its
    lengths."""

    num_draft: int = 0
    inner: Drafter = None
    name = "followed"

    @property
    def features(self):
        return self.inner.features

    def init(self, params, target_params, batch, capacity, inputs=None):
        follow = self.inner.topology
        counts = jnp.zeros((batch, follow.depth, follow.ranks), jnp.int32)
        trials = jnp.zeros((batch, follow.depth), jnp.int32)
        return self.inner.init(params[0], target_params, batch, capacity, inputs), counts, trials

    def draft_step(self, params, target_params, state, context):
        inner, counts, trials = state
        follow, (own, (truth, ends)) = self.inner.topology, params
        inner = self.inner.sync(own, target_params, inner, context, before="draft")
        seen = dataclasses.replace(context, tokens=truth)
        draft, inner = self.inner.draft_step(own, target_params, inner, seen)
        choices = draft.tokens[:, 1:].reshape(-1, follow.depth, follow.ranks)
        where = context.length[:, None] + jnp.arange(follow.depth)
        said = jnp.take_along_axis(truth, where, axis=1, mode="clip")
        known = (where < ends[:, None]) & (context.budget > 0)[:, None]
        hit = (choices == said[:, :, None]) & known[:, :, None]
        plain = trees.chain_draft(context, jnp.zeros((len(truth), 0), jnp.int32))
        return plain, (inner, counts + hit, trials + known)

    def observe(self, params, target_params, state, segment):
        inner = self.inner.observe(params[0], target_params, state[0], segment)
        return inner, *state[1:]


def measure(
    target,
    drafter,
    params,
    tokens: jax.typing.ArrayLike,
    lengths: jax.typing.ArrayLike,
    *,
    max_new_tokens: int = 64,
    key: jax.Array | None = None,
    sampling: Sampling = Sampling(),
    depth: int | None = None,
    ranks: int = 8,
    capacity: int | None = None,
    stops: Sequence[int] = (),
) -> Acceptance:
    """Where the target's own next tokens stand among a drafter's choices.

    The target continues the prompts plainly; then, at each token of that text, the drafter is asked
    for its choices below the true tokens, as deep as ``depth``.

    Args:
      drafter: one with a ``topology`` (a draft model, heads), of which only the depth counts.
      params: as for ``decode``.
      tokens, lengths: prompts, int32 ``[B, T]`` and ``[B]``.
      key: one random key; needed above temperature 0.
      depth: at most the drafter's own; default: that of its topology.
      ranks: choices looked at, R.

    Raises:
      ValueError: a drafter without a topology, or a depth beyond its own.
    """
    if drafter.topology is None:
        raise ValueError(
            f"measure: {drafter.name} has no choices to rank; give one with a topology"
        )
    follow = trees.Follow(depth or drafter.topology.depth, ranks)
    followed = _Followed(
        inner=dataclasses.replace(drafter, topology=follow, sibling_sampling="top")
    )
    key = jax.random.key(0) if key is None else key

    def run(drafter, params):
        request, slots = prepare_inputs(
            target, drafter, tokens, lengths, key, max_new_tokens, sampling, capacity, stops
        )
        state = loop.jit_start(target, drafter, "auto", slots, params, request)
        return loop.jit_burst(target, drafter, "auto", 10**9, params, state)

    said = run(Plain(), params)
    truth = said.tokens, said.length
    _, hits, trials = run(followed, {**params, "drafter": (params.get("drafter"), truth)}).drafter
    return Acceptance(np.asarray(hits).sum(axis=0), np.asarray(trials).sum(axis=0))
