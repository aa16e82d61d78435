"""Which drafts a rule may judge: a table over (how siblings were drawn, laws, chain or tree).

============  ==========================  ==================  ==========
rule          siblings with laws, drawn   drafts without laws  shape
============  ==========================  ==================  ==========
greedy        (at temperature 0) any      any                 any
delta         any                         any                 any
rejection     any                         any                 any
traversal     any                         any                 any
block         any                         any                 chain
kseq          ``iid``                     no                  any
hub           ``hub``                     no                  two children
coupled       any                         any                 any
gls           any                         any                 static
typical       any; approximate            any                 any
lenience      any; approximate            any                 any
relaxed ones  any; approximate            any                 any
============  ==========================  ==================  ==========

A node without a law (``law = -1``) is a point mass, which ``rejection``, ``traversal`` and
``block`` judge as such. ``iid`` promises that siblings have one law, so it holds none.

At temperature 0 every lossless rule is the greedy one, and how tokens were drawn is no matter.
"""

from __future__ import annotations

from .. import trees
from ..types import Draft


def need_chain(name: str, draft: Draft) -> None:
    """Raises ``ValueError`` if the draft is not a chain."""
    if draft.topology != trees.chain_parents(draft.num_nodes - 1):
        raise ValueError(
            f"rule={name!r} judges chains; this draft is a tree: use rule='traversal' (its like on "
            "trees), 'rejection' or 'delta'"
        )


def need_draws(name: str, draft: Draft, draws: str | None) -> None:
    """Raises ``ValueError`` if siblings have no laws or were drawn otherwise than ``draws``; None:
    any way."""
    if draft.laws is None:
        raise ValueError(
            f"rule={name!r} needs the laws that siblings were drawn from, and this draft has none "
            "(it is a function of the context): use rule='delta'"
        )
    if draws is not None and draft.draws != draws:
        way = (
            "" if draft.draws == "mixed" else f"take a drafter with sibling_sampling={draws!r}, or "
        )
        raise ValueError(
            f"rule={name!r} needs siblings drawn {draws!r}, not {draft.draws!r}; {way}"
            "rule='rejection' or 'traversal', which admit all draws"
        )
