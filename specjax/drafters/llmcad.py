"""A draft model that grows a tree until it is unsure of every branch: LLMCad.

A branch is a path from the root, and its confidence C the product of the draft model's
probabilities of its tokens. At each depth, a path is extended by the token that is most probable
after it. Every other token whose probability there is at least 0.3 begins a branch of its own
(``trees.Expand.branch``). The tree of a row grows until none of the paths of its last depth reaches
the threshold; then the target verifies it::

    max_i C_i < threshold

The threshold follows acceptance (``CumulativeStop``). With a static tree or a chain, a branch
stops by itself where the product of the greatest probabilities along it is below the threshold; the
token below it is still proposed.

Lossless: yes. A tree that is grown, threshold included, is a function of the text and of earlier
rounds, so ``greedy`` and ``delta`` judge it. In a static tree the tokens are drawn and their laws
stated; whether anything is drafted below a node depends on the laws above it, which are known
before the tokens are drawn, and on no token that is left out.

Example::

    drafter = LLMCad(model=small.target)  # for `specjax.decode`; weights as of `DraftModel`
    drafter = LLMCad(model=small.target, topology=trees.chain(8), stop=CumulativeStop(0.05))

Differs from the paper, which adds one token a pass to the branch that has the fewest for its
confidence: here a pass extends the ``width`` most probable paths by a token each, and the ``nodes``
most probable paths are verified. Its other schedule of the threshold is named in
``CumulativeStop``. The target does not verify while the draft model drafts on: see ``PEARL``.

References: LLMCad, arXiv 2309.04255, section 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..acceptance.walk import eligible
from .base import check_field
from .confidence_stop import CumulativeStop
from .draft_model import DraftModel, DraftModelState

BRANCH = 0.3  # so three branches at most open at a token
TREE = trees.Expand(3, 8, 16, branch=BRANCH)


@pytree_dataclass
class LLMCadState(DraftModelState):
    """The state of a draft model with a threshold.

    Attributes:
      threshold: float32 ``[B]``.
    """

    threshold: jax.Array


@dataclasses.dataclass(frozen=True)
class LLMCad(DraftModel):
    """Drafts a tree until no branch is sure; ``params["drafter"]`` holds the weights of ``model``.

    Attributes:
      num_draft: follows from the topology.
      model: the draft model.
      topology: the tree that is grown; any tree or chain of ``trees.topology``.
      sibling_sampling: as of ``DraftModel``.
      stop: where growing ends.
    """

    topology: trees.Topology | None = TREE
    stop: CumulativeStop = CumulativeStop()
    name = "llmcad"

    def __post_init__(self):
        super().__post_init__()
        accepted = "confidence_stop.CumulativeStop(threshold=...) of specjax.drafters"
        check_field(self, "stop", CumulativeStop, accepted)

    def init(self, params, target_params, batch, capacity, inputs=None):
        state = super().init(params, target_params, batch, capacity, inputs)
        threshold = self.stop.init(batch)
        return LLMCadState(cache=state.cache, filled=state.filled, threshold=threshold)

    def draft_step(self, params, target_params, state, context):
        return self._drafted(params, state, context, state.threshold)

    def observe(self, params, target_params, state, segment):
        state = super().observe(params, target_params, state, segment)
        if segment.round is None:
            return state
        draft, verdict, _ = segment.round
        deepest = jnp.max(jnp.where(eligible(draft), trees.depths(draft), 0), axis=1)
        offered = jnp.where(segment.num > 0, deepest, 0)
        threshold = self.stop.update(state.threshold, offered, jnp.maximum(verdict.count, 0))
        return dataclasses.replace(state, threshold=threshold)
