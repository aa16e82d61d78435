"""Acceptance rules: which drafted tokens the target keeps, and the token that follows.

A rule is a frozen dataclass, one file each, registered here by one line. Its ``name`` says
``approximate`` if the output law is not the target's.
"""

from __future__ import annotations

from ..types import Draft, Rule
from .block import BlockVerification
from .delta import Delta
from .greedy import Greedy
from .hub import Hub
from .kseq import KSeq
from .rejection import Rejection
from .traversal import Traversal
from .typical import Typical

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Greedy(),
        Rejection(),
        Traversal(),
        BlockVerification(),
        Delta(),
        KSeq(),
        Hub(),
        Typical(),
    )
}


def choose(rule: str | Rule, draft: Draft, greedy: bool) -> Rule:
    """The rule object for ``rule`` (``auto``, a name, or an object), checked against the draft.

    ``auto``: greedy sampling takes ``greedy``; a draft with proposal laws ``rejection``; a draft
    that is a function of the context ``delta``.

    Raises:
      ValueError: an unknown name, or a rule that would change the target's law on this draft.
    """
    chosen = named(rule)
    if chosen is None:  # auto
        chosen = RULES["greedy" if greedy else "delta" if draft.laws is None else "rejection"]
    chosen.check(draft, greedy)
    # at temperature 0 such a rule is the greedy one, without its randomness
    return RULES["greedy"] if greedy and exact(chosen, greedy) else chosen


def named(rule: str | Rule) -> Rule | None:
    """The rule object of a name; None for ``auto``, which the draft decides.

    Raises:
      ValueError: an unknown name.
      TypeError: neither a name nor a ``Rule``.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(
            f"rule={rule!r}: give a name ({', '.join(sorted(RULES))} or auto) or an instance of "
            "specjax.Rule"
        )
    if rule != "auto" and rule not in RULES:
        raise ValueError(f"rule={rule!r} is unknown; known: auto, {', '.join(sorted(RULES))}")
    return RULES.get(rule)


def exact(rule: Rule, greedy: bool) -> bool:
    """Whether ``rule`` keeps the target's law: always, or, where ``greedy``, at temperature 0."""
    return rule.lossless or (greedy and rule.exact_at_zero)
