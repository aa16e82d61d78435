"""How drafters that are given by name choose the children of a node above temperature 0.

Heads draw them from their own law. On the embedded target, drawn tokens are accepted more often
than the most probable ones at every temperature that was tried, in chains and in trees (see
docs/methods/eagle_mtp.md).
"""

from __future__ import annotations

from .. import acceptance
from ..sampling.distribution import Sampling
from ..types import Drafter
from .options import Drafting

DRAWN = "drawn"  # in the way that suits the tree


def wanted(drafting: Drafting, sampling: Sampling) -> str | None:
    """Returns how siblings are chosen: the drafting's way, else the way that its rule needs, else
    ``DRAWN`` under the rule ``"auto"``; None: in the drafter's own way."""
    if sampling.greedy:
        return None
    if drafting.sibling_sampling is not None:
        return drafting.sibling_sampling
    rule = acceptance.named(drafting.rule)
    return DRAWN if rule is None else rule.sibling_sampling


def of_model(how: str | None) -> str | None:
    """Returns the setting of a draft model, which draws by itself."""
    return None if how == DRAWN else how


def of_heads(how: str | None, heads: Drafter) -> str | None:
    """Returns the setting of heads; None: their own."""
    return getattr(heads, "drawing", None) if how == DRAWN else how
