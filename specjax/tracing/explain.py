"""Why a node of a draft was kept or not, in words: the sentences of ``specjax trace``.

A rule may have sentences of its own: ``why``, a mapping from the case of a node to a template. A
case for which a rule has a sentence is one that the rule judges; a node of the case ``later`` or
``beyond`` is otherwise reported as not looked at. Templates may name the fields that ``sentence``
takes, and the numbers by node that the rule's ``evidence`` returns.
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
    """Whether ``rule`` judges nodes of ``case`` at all."""
    return case in (ACCEPTED, REJECTED) or case in rule.why


def sentence(rule, case: str, **fields) -> str:
    """The sentence of ``rule`` about a node.

    Args:
      rule: the acceptance rule.
      case: ``accepted``; ``rejected``; ``later``, after the accepted sibling in draw order;
        ``beyond``, below a node that was not accepted.
      **fields: ``p`` and ``q`` of the node's token; ``said``, the token that follows the node's
        parent in the text; ``share``, what p is compared as: "p", or for a later sibling what the
        earlier siblings left of p; and the rule's evidence.

    Returns:
      One sentence, without a full stop.
    """
    return {**WHY, **rule.why}[case].format_map(fields)
