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
import numpy as np

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..types import Draft, PyTree
from .base import SeveralDrafters
from .shared_round import round_of, scores_of


@pytree_dataclass
class UnionState:
    """``inner``: a state for each drafter; ``drafts``: what each proposed, None between rounds."""

    inner: tuple[PyTree, ...]
    drafts: tuple[Draft, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Union(SeveralDrafters):
    """Several drafters that all propose below the same root.

    ``params["drafter"]`` is a tuple, the weights of each. A drafter that lags reads what the others
    had accepted, and one that reads all nodes (``reads_nodes``) is shown its own.

    Attributes:
      drafters: at least two drafters.

    Raises:
      ValueError: there are fewer than two.
    """

    @property
    def name(self) -> str:
        return f"union({', '.join(d.name for d in self.drafters)})"

    @property
    def depth(self) -> int:
        return max(d.depth for d in self.drafters)

    @property
    def can_rest(self) -> bool:
        return all(drafter.can_rest for drafter in self.drafters)

    def rewindable(self, num_tokens):
        drafters = tuple(drafter.rewindable(num_tokens) for drafter in self.drafters)
        return dataclasses.replace(self, drafters=drafters)

    def init(self, params, target_params, batch, capacity, inputs=None):
        states = (
            drafter.init(own, target_params, batch, capacity, inputs)
            for drafter, own in self.with_weights(params)
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

    def readout(self, draft, scores):
        """The scores at the nodes of each drafter that reads them; None for the others."""
        found, begin = [], 0
        for i, (drafter, taps) in enumerate(
            zip(self.drafters, self._taps(scores.features), strict=True)
        ):
            mine = slice(begin, begin + taps)
            begin += taps
            found.append(scores_of(scores, self._nodes(i), mine) if drafter.reads_nodes else None)
        return tuple(found)

    def observe(self, params, target_params, state, segment):
        first, states = 0, []
        for i, (drafter, own) in enumerate(zip(self.drafters, params, strict=True)):
            mine = segment
            if segment.features is not None:
                last = first + self._taps(segment.features)[i]
                features = segment.features[..., first:last] if last > first else None
                mine, first = dataclasses.replace(mine, features=features), last
            if segment.round is not None:
                draft = None if state.drafts is None else state.drafts[i]
                mine = round_of(drafter, mine, draft, segment.round[2][i], self._nodes(i))
            states.append(drafter.observe(own, target_params, state.inner[i], mine))
        return UnionState(inner=tuple(states))

    def _nodes(self, i: int) -> np.ndarray:
        """Where the nodes of drafter ``i`` stand in a round, the root first."""
        before = sum(drafter.num_draft for drafter in self.drafters[:i])
        return np.append(0, 1 + before + np.arange(self.drafters[i].num_draft))

    def _taps(self, features) -> list[int]:
        """How many of the hidden states ``[..., F]`` each drafter asked for."""
        size = 0 if features is None else features.shape[-1] // max(len(self.features), 1)
        return [size * len(drafter.features) for drafter in self.drafters]

    def sync(self, params, target_params, state, context, *, before="prompt"):
        states = (
            drafter.sync(own, target_params, inner, context, before=before)
            for drafter, own, inner in zip(self.drafters, params, state.inner, strict=True)
        )
        return UnionState(inner=tuple(states))

    def rewind(self, state, length):
        pairs = zip(self.drafters, state.inner, strict=True)
        return UnionState(inner=tuple(drafter.rewind(own, length) for drafter, own in pairs))
