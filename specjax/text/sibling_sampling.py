"""How named and loaded drafters choose the children of a node above temperature 0.

Heads draw them from their own law: see docs/methods/eagle_mtp.md for what was measured.
"""

from __future__ import annotations

import numpy as np

from .. import acceptance
from ..drafters.drawn_or_top import LEARNED, DrawnOrTop
from ..drafters.heads import HeadDrafter
from ..drafters.hybrid import drafts_chains
from ..sampling.distribution import Sampling
from ..types import Drafter
from .options import Drafting

DRAWN, DRAWN_CHAINS = "drawn", "drawn chains"  # as suits the tree; where it is a chain


def wanted(drafting: Drafting, sampling: Sampling) -> str | None:
    """Returns how siblings are chosen: the drafting's way, else the way that its rule needs, else
    ``DRAWN`` under the rule ``"auto"``; None: in the drafter's own way.

    Where some rows are greedy, chains alone are drawn: a greedy row has one token that can be
    drawn below a node, so that a drawn tree would be a chain there.
    """
    if sampling.greedy:
        return None
    if drafting.sibling_sampling is not None:
        return drafting.sibling_sampling
    rule = acceptance.named(drafting.rule)
    if rule is not None:
        return rule.sibling_sampling
    return DRAWN if np.all(np.asarray(sampling.temperature) > 0) else DRAWN_CHAINS


def learning(drafter: Drafter) -> DrawnOrTop:
    """Returns the drafter that learns how to choose the tokens of a chain.

    Raises:
      ValueError: the drafter drafts trees.
    """
    if not drafts_chains(drafter):
        raise ValueError(
            f"sibling_sampling={LEARNED!r}: it chooses between one drawn token and the most "
            f"probable one, and {drafter.name} drafts trees; give num= in place of tree=, or "
            "another sibling_sampling"
        )
    return DrawnOrTop(drafter)


def of_model(how: str | None) -> str | None:
    """Returns the setting of a draft model, which draws by itself."""
    return None if how in (DRAWN, DRAWN_CHAINS, LEARNED) else how


def of_heads(how: str | None, heads: Drafter) -> str | None:
    """Returns the setting of heads; None: their own, as where it is not the default."""
    if how not in (DRAWN, DRAWN_CHAINS):
        return how
    if not isinstance(heads, HeadDrafter) or heads.sibling_sampling != "top":
        return None
    drawing = heads.drawing
    return drawing if how == DRAWN or drawing == "iid" else None
