"""List coupling (GLS): each path of a tree has noise of its own, and the target uses all of it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from ..sampling.noise import Noise, least
from ..types import Draft, Rule, Verdict
from .walk import depth_of, follow, verdict


@dataclasses.dataclass(frozen=True)
class ListCoupled(Rule):
    """Takes the token x with the least ``min_k E^k_x / p(x)``, with k over the paths below.

    Each path from the root to a leaf of a static tree has exponential variables ``E^k`` of its own,
    which depend on the row, the position and the path. The drafter takes for each node the least
    variables of the paths through that node, so K chains side by side are K independent drafts.
    The target takes at a node the least variables of the paths through that node; these are the
    paths that agree with the text so far.

    The guarantee is weaker than that of ``coupled``: the text is a function of the seed, the target
    AND the drafts, so two drafters or two trees give different texts of the same law. A chain has
    one path, and its text, like the text without drafts, is that of ``coupled``.

    Lossless: yes, for every draft over a static tree; other trees are refused.

    Cost: V random numbers for each path of the tree at each visited node.

    References: Rowan, Phan and Khisti, List-Level Distribution Coupling with Applications to
    Speculative Decoding and Lossy Compression, arXiv 2506.05632, algorithms 1 and 2.
    """

    name = "gls"
    lossless = True
    noise = "path"
    _other = "the noise of these paths and p select {said} here"
    why = {
        "accepted": "the noise of these paths and p select this very token",
        "rejected": _other,
        "later": _other,
    }

    def check(self, draft: Draft, greedy: bool) -> None:
        chain = draft.topology == trees.chain_parents(draft.num_nodes - 1)
        if not greedy and (draft.topology is None or (draft.scored is not None and not chain)):
            raise ValueError(
                "rule='gls' gives each path of a static tree noise of its own; this draft's tree "
                "differs by row or from round to round: use rule='coupled', or draft a static tree"
            )

    def __call__(self, params, draft: Draft, target_law, draft_law, key: Noise) -> Verdict:
        through = jnp.asarray(trees.paths_through(draft.topology or (-1,)))

        def say(node):
            p = target_law(node)
            position = draft.start + 1 + depth_of(draft, node)
            return least(p, key.least_of(position, p.shape[-1], through[node]))

        return verdict(draft, *follow(draft, say))
