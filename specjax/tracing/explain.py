"""The sentences of ``specjax trace``: why a node of a draft was accepted or not.

A rule may have sentences of its own: ``Rule.why`` maps the case of a node to a template. If a rule
has a sentence for a case, it judges nodes of this case; otherwise a node of the case ``later`` or
``beyond`` is reported as not tested. Templates may name the fields that ``sentence`` takes, and the
numbers that the rule's ``evidence`` returns.
"""

from __future__ import annotations

ACCEPTED, REJECTED, LATER, BEYOND = "accepted", "rejected", "later", "beyond"
WHY = {
    ACCEPTED: "the rule kept it (p {p:.3g}, q {q:.3g})",
    REJECTED: "the rule did not keep it (p {p:.3g}, q {q:.3g})",
    LATER: "not tested: a sibling before it was accepted",
    BEYOND: "not tested: its parent was not accepted",
}


def judges(rule, case: str) -> bool:
    """Returns whether ``rule`` judges nodes of ``case``."""
    return case in (ACCEPTED, REJECTED) or case in rule.why


def sentence(rule, case: str, **fields) -> str:
    """Returns the sentence of ``rule`` about a node, without a full stop.

    Args:
      rule: the acceptance rule.
      case: ``accepted``; ``rejected``; ``later``, for a node after the accepted sibling in draw
        order; ``beyond``, for a node below one that was not accepted.
      **fields: ``p`` and ``q`` of the node's token; ``said``, the token that follows the node's
        parent in the text; ``share``, the name of the number that the rule compares with u q: "p",
        or for a later sibling the residual of p; and the rule's evidence.
    """
    return {**WHY, **rule.why}[case].format_map(fields)
