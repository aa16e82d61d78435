"""Why a node was kept or not, in words: for ``specjax trace``.

A rule may say it in words of its own: an attribute ``why``, sentences by what became of a node
whose parent was accepted (and ``beyond``, whose parent was not). A case for which it has words is
one that it judges: without them a node that is ``later`` or ``beyond`` was not looked at. The
fields they may name are those of ``sentence``, and the numbers by node that its method
``evidence`` returns, if it has one:
``evidence(params, draft, target_law, draft_law, key) -> {name: float32 [B, N]}``, with the
arguments of the rule itself.
"""

from __future__ import annotations

ACCEPTED, REJECTED, LATER, BEYOND = "accepted", "rejected", "later", "beyond"
WHY = {
    ACCEPTED: "the rule kept it (p {p:.3g}, q {q:.3g})",
    REJECTED: "the rule did not keep it (p {p:.3g}, q {q:.3g})",
    LATER: "not looked at: a sibling before it was accepted",
    BEYOND: "not looked at: its parent was not accepted",
}


def judges(rule, case: str) -> bool:
    """Whether ``rule`` judges nodes of this case at all."""
    return case in (ACCEPTED, REJECTED) or case in getattr(rule, "why", {})


def sentence(rule, case: str, **fields) -> str:
    """What ``rule`` says of a node.

    Args:
      case: ``accepted``; ``rejected``; ``later``, behind the accepted sibling in draw order;
        ``beyond``, below a node that was not accepted.
      fields: ``p``, ``q`` of the node's token; ``said``, the token that follows its parent in the
        text; ``share``, "p", or for a later sibling what the earlier ones left of it; and the
        rule's evidence.
    """
    return {**WHY, **getattr(rule, "why", {})}[case].format_map(fields)
