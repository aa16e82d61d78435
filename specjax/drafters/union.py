"""Several drafters at once, their trees merged into one: SpecInfer.

Equal prefixes are verified once. A token that two drafters draw stays two siblings, each judged
against the law from which it was drawn: ``rejection`` is SpecInfer's multi-step speculative
sampling.

Lossless: yes, under the rules under which each of the drafters is; all must draw siblings in the
same way (see ``Draft.draws``).

Example::

    drafter = Union(drafters=(DraftModel(3, model=a), NGram(4)))
    params = {"target": weights, "drafter": (weights_of_a, None)}

References: SpecInfer, arXiv 2305.09781, algorithms 2 (merging) and 3 (sampling).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..types import ROOT, Draft, Drafter, PyTree, Segment, Verdict
from .base import CombinedDrafter


@pytree_dataclass
class UnionState:
    """``inner``: a state for each drafter; ``drafts``: what each proposed, None between rounds."""

    inner: tuple[PyTree, ...]
    drafts: tuple[Draft, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Union(CombinedDrafter):
    """Several drafters that all propose below the same root.

    ``params["drafter"]`` is a tuple, the weights of each. A drafter that lags reads what the others
    had accepted.

    Attributes:
      drafters: at least two drafters.

    Raises:
      ValueError: there are fewer than two, or one of them reads all nodes (``reads_nodes``).
    """

    num_draft: int = 0
    drafters: tuple[Drafter, ...] = ()

    def __post_init__(self):
        if len(self.drafters) < 2:
            raise ValueError(f"Union of {len(self.drafters)} drafters: give at least two")
        for drafter in self.drafters:
            if drafter.reads_nodes:
                raise ValueError(
                    f"Union: {drafter.name} reads all nodes of a round (reads_nodes), which are "
                    "no longer its own once drafts are merged"
                )
        object.__setattr__(self, "num_draft", sum(d.num_draft for d in self.drafters))

    @property
    def name(self) -> str:
        return f"union({', '.join(d.name for d in self.drafters)})"

    @property
    def depth(self) -> int:
        return max(d.depth for d in self.drafters)

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafters

    def init(self, params, target_params, batch, capacity, inputs=None):
        if not isinstance(params, tuple | list) or len(params) != len(self.drafters):
            raise ValueError(
                f"params['drafter'] of a Union must be a tuple of {len(self.drafters)}, the "
                "weights of each drafter (None for one without)"
            )
        states = (
            drafter.init(own, target_params, batch, capacity, inputs)
            for drafter, own in zip(self.drafters, params, strict=True)
        )
        return UnionState(inner=tuple(states))

    def draft_step(self, params, target_params, state, context):
        drafts, states = [], []
        for i, (drafter, own) in enumerate(zip(self.drafters, params, strict=True)):
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.key, i)
            here, inner = dataclasses.replace(context, key=keys), state.inner[i]
            inner = drafter.sync(own, target_params, inner, here, before="draft")
            draft, inner = drafter.draft_step(own, target_params, inner, here)
            drafts.append(draft)
            states.append(inner)
        return trees.merge_drafts(*drafts), UnionState(inner=tuple(states), drafts=tuple(drafts))

    def observe(self, params, target_params, state, segment):
        taps, first, states = len(self.features), 0, []
        for i, (drafter, own) in enumerate(zip(self.drafters, params, strict=True)):
            mine = segment
            if segment.features is not None:
                size = segment.features.shape[-1] // taps
                last = first + size * len(drafter.features)
                features = segment.features[..., first:last] if last > first else None
                mine, first = dataclasses.replace(mine, features=features), last
            if segment.round is not None:
                mine = round_of(mine, state.drafts[i])
            states.append(drafter.observe(own, target_params, state.inner[i], mine))
        return UnionState(inner=tuple(states))

    def sync(self, params, target_params, state, context, *, before="prompt"):
        states = (
            drafter.sync(own, target_params, inner, context, before=before)
            for drafter, own, inner in zip(self.drafters, params, state.inner, strict=True)
        )
        return UnionState(inner=tuple(states))


def round_of(segment: Segment, draft: Draft) -> Segment:
    """The segment for a drafter whose ``draft`` was only one of several: its verdict reaches as far
    as its own nodes are what was committed."""
    verdict = required(segment.round, "segment.round")[1]
    deepest = trees.max_depth(draft)
    above = jnp.broadcast_to(trees.parents(draft), draft.tokens.shape)
    index = jnp.arange(draft.num_nodes)
    node = jnp.zeros_like(verdict.count)
    going = verdict.count > 0
    path, count = [node], jnp.minimum(verdict.count, 0)
    for depth in range(1, deepest + 1):
        said = segment.tokens[:, min(depth, segment.tokens.shape[1] - 1)]
        mine = (above == node[:, None]) & (draft.tokens == said[:, None]) & (index > ROOT)
        going &= jnp.any(mine, axis=1) & (depth <= verdict.count)
        node = jnp.where(going, jnp.argmax(mine, axis=1).astype(jnp.int32), node)
        count = count + going
        path.append(node)
    own = Verdict(path=jnp.stack(path, axis=1), count=count, token=verdict.token)
    return dataclasses.replace(segment, round=(draft, own, None))
