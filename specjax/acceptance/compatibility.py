"""Which drafts a rule can judge: a table of draws, laws and shapes.

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
``relaxed``   any; approximate            any                 any
fly           any; approximate            any                 chain
sprinter      any; approximate            any                 chain
============  ==========================  ==================  ==========

The line ``relaxed`` stands for the rules of ``relaxed.py``. A node without a law (``law = -1``)
has a point mass for its law, and ``rejection``, ``traversal`` and ``block`` judge it by that law.
Siblings drawn ``iid`` have one law, so they contain no such node.

At temperature 0 every lossless rule decides as ``greedy`` does, and admits every way of drawing.
"""

from __future__ import annotations

from .. import trees
from ..types import Draft


def need_chain(name: str, draft: Draft) -> None:
    """Raises ``ValueError`` if the draft is not a chain; ``name`` is the rule's."""
    if draft.topology != trees.chain_parents(draft.num_nodes - 1):
        raise ValueError(
            f"rule={name!r} judges chains; this draft is a tree: use rule='traversal', 'rejection' "
            "or 'delta', which judge trees"
        )


def need_draws(name: str, draft: Draft, draws: str | None) -> None:
    """Raises ``ValueError`` if siblings have no laws or were not drawn in the way ``draws``.

    Args:
      name: the rule's name, for the error.
      draft: the draft that the rule is to judge.
      draws: the way in which siblings must have been drawn, see ``Draft.draws``; None: any way.
    """
    if draft.laws is None:
        raise ValueError(
            f"rule={name!r} needs the laws that siblings were drawn from, and this draft has none "
            "(it is a function of the context): use rule='delta'"
        )
    if draws is not None and draft.draws != draws:
        way = (
            "" if draft.draws == "mixed" else f"use a drafter with sibling_sampling={draws!r}, or "
        )
        raise ValueError(
            f"rule={name!r} needs siblings that were drawn in the way {draws!r}; these were drawn "
            f"in the way {draft.draws!r}: {way}rule='rejection' or rule='traversal', which admit "
            "every way"
        )
