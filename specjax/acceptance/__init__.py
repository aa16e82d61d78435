"""Acceptance rules: which drafted tokens the target keeps, and the token that follows.

A rule is a frozen dataclass, one file each, registered here by one line. Its ``name`` says
``approximate`` if the output law is not the target's.
"""

from __future__ import annotations

import dataclasses

from ..types import Draft, Rule
from .block import BlockVerification
from .coupled import Coupled
from .delta import Delta
from .gls import ListCoupled
from .greedy import Greedy
from .hub import Hub
from .kseq import KSeq
from .lenience import Lenient
from .rejection import Rejection
from .threshold import Threshold
from .tolerance import Tolerance
from .top_k import TopK
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
        Coupled(),
        ListCoupled(),
        Typical(),
        Lenient(),
        TopK(),
        Tolerance(),
        Threshold(),
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

    A name may be followed by settings: ``approximate-tolerance:top_k=3,gap=1.5``.

    Raises:
      ValueError: an unknown name or setting, or a setting out of range.
      TypeError: neither a name nor a ``Rule``.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(
            f"rule={rule!r}: give a name ({', '.join(sorted(RULES))} or auto) or an instance of "
            "specjax.Rule"
        )
    name, _, settings = rule.partition(":")
    if name not in RULES and rule != "auto":
        raise ValueError(f"rule={rule!r} is unknown; known: auto, {', '.join(sorted(RULES))}")
    return _with_settings(rule, RULES[name], settings) if settings else RULES.get(name)


def _with_settings(given: str, rule: Rule, settings: str) -> Rule:
    """``rule`` with what ``settings`` says, a text such as ``top_k=3,gap=1.5``."""
    if not dataclasses.is_dataclass(rule):
        raise ValueError(f"rule={given!r}: {rule.name!r} has no settings")
    kinds = {field.name: type(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
    found = {}
    for setting in settings.split(","):
        name, _, value = setting.partition("=")
        try:
            found[name] = kinds[name](value)
        except (KeyError, ValueError):
            known = ", ".join(f"{n} ({kind.__name__})" for n, kind in kinds.items()) or "none"
            raise ValueError(
                f"rule={given!r}: {setting!r} is no setting of {rule.name!r}; its settings, as "
                f"name=value and separated by commas: {known}"
            ) from None
    return dataclasses.replace(rule, **found)


def exact(rule: Rule, greedy: bool) -> bool:
    """Whether ``rule`` keeps the target's law: always, or, where ``greedy``, at temperature 0."""
    return rule.lossless or (greedy and rule.exact_at_zero)
