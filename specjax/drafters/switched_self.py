"""The target drafts for itself with the sublayers that an array says.

As ``self_draft``, but the skipped sublayers are ``params["drafter"]``, and no program is compiled
when they change: a search may run one set after the other, between two requests as well. A
sublayer that is skipped is not computed. Since no program knows which layers are whole, nothing is
handed over to the target's pass.

Lossless: yes, as ``SelfDraft``.

Example::

    drafter = SwitchedSelfDraft(num_draft=4, target=lm.target)
    specjax.generate(lm, "...", drafter=drafter, drafter_params=drafter.params_of("mlp.3-5"))

References: Draft & Verify, arXiv 2309.08168, and SWIFT, arXiv 2410.06916, which search such sets.
"""

from __future__ import annotations

import dataclasses
import functools

from .. import trees
from .._internal.optional import unset
from ..decoding import contract_checks as checks
from ..models.sub_network import switches_of
from ..types import HeadTarget, SubNetwork
from .confidence_stop import ConfidenceStop
from .model_passes import ModelPassDrafter
from .part_passes import check_stop, draft_by_part, observe_stop


@dataclasses.dataclass(frozen=True)
class SwitchedSelfDraft(ModelPassDrafter):
    """Drafts a chain or a tree with some of the target's sublayers.

    ``params["drafter"]`` is ``{"switches": bool [L, 2]}``, whether the attention and the MLP of
    each layer run; ``params_of`` makes it.

    Attributes:
      num_draft, topology, sibling_sampling, stop: as of ``SelfDraft``.
      target: the target, whose layers draft.

    Raises:
      ValueError: there is no target or nothing to draft, the target has no such part, or a tree is
        to be stopped.
    """

    target: HeadTarget = unset(repr=False)
    topology: trees.Topology = unset()
    sibling_sampling: str | None = None
    stop: ConfidenceStop | None = None
    name = "switched-self"

    def __post_init__(self):
        super().__post_init__()
        self._complete(self.target, "target", "the target")
        check_stop(self)
        _ = self.part  # refuses targets that have no such part

    @property
    def part(self) -> SubNetwork:
        """The sub-network that drafts."""
        try:
            return self.target.sub_network(switched=True)
        except TypeError:
            raise ValueError(
                f"SwitchedSelfDraft(target={type(self.target).__name__}): its sub_network takes no "
                "switches; take SelfDraft, whose set of layers does not change"
            ) from None

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def params_of(self, skip=()) -> dict:
        """Returns ``params["drafter"]`` for a set of skipped sublayers.

        Args:
          skip: see ``models.sub_network.skipped_sublayers``; empty: everything runs.

        Raises:
          ValueError: a layer does not exist, or nothing would be left.
        """
        return {"switches": switches_of(self.target, skip)}

    def init(self, params, target_params, batch, capacity, inputs=None):
        return () if self.stop is None else self.stop.init(batch)

    def observe(self, params, target_params, state, segment):
        return observe_stop(self, state, segment, self.depth)

    def draft_step(self, params, target_params, state, context):
        weights = target_params, params["switches"]
        given = self.part, self.target, weights, context.cache
        run = functools.partial(checks.verified_by_part, *given)
        draft, _, _, state = draft_by_part(run, self, state, context)
        return draft, state
