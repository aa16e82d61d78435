"""Acceptance rules: they decide which drafted tokens are kept and which token follows them.

Each rule is a frozen dataclass in a file of its own; one line here registers it. The ``name`` of a
rule begins with ``approximate`` if the law of its output is not the target's law.
"""

from __future__ import annotations

import dataclasses

from .._internal.hashable import check_hashable
from .._internal.keywords import checks_arguments, did_you_mean
from .._internal.named_settings import ACCEPTED, parse_settings
from .._internal.own_objects import find_own, instance, is_own, lacking_defaults
from ..types import Draft, Rule
from .block import BlockVerification
from .coupled import Coupled
from .delta import Delta
from .fly import Fly
from .gls import ListCoupled
from .greedy import Greedy
from .hub import Hub
from .kseq import KSeq
from .lenience import Lenient
from .rejection import Rejection
from .sprinter import Sprinter
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
        Fly(),
        Sprinter(),
    )
}


for _rule in RULES.values():
    checks_arguments(type(_rule))


def choose(rule: str | Rule, draft: Draft, greedy: bool) -> Rule:
    """Returns the rule object for ``rule`` after a check that the rule admits the draft.

    ``auto`` selects ``greedy`` where ``greedy`` is True, otherwise ``rejection`` for a draft with
    laws and ``delta`` for a draft that is a function of the context. At temperature 0 a rule that
    is exact there is replaced by ``greedy``, which needs no random numbers.

    Args:
      rule: ``"auto"``, the name of a rule, with or without settings, or a ``Rule``.
      draft: the draft that the rule is to judge; only its static facts are used.
      greedy: whether the temperature is the number 0.

    Raises:
      ValueError: the name is unknown, or the rule would change the target's law on this draft.
      TypeError: ``rule`` is neither a name nor a ``Rule``.
    """
    chosen = named(rule)
    if chosen is None:  # auto
        chosen = RULES["greedy" if greedy else "delta" if draft.laws is None else "rejection"]
    chosen.check(draft, greedy)
    return RULES["greedy"] if greedy and exact(chosen, greedy) else chosen


def named(rule: str | Rule) -> Rule | None:
    """Returns the rule object of a name; None for ``"auto"``, whose rule depends on the draft.

    A name may be followed by settings: ``approximate-tolerance:top_k=3,gap=1.5``. A rule of one's
    own is named by its module, ``my_module:MyRule`` or ``my_module:MyRule:scale=2``.

    Args:
      rule: ``"auto"``, the name of a rule, with or without settings, or a ``Rule``, which is
        returned as it is.

    Raises:
      ValueError: a name or a setting is unknown, or a setting is out of range; a module cannot be
        imported, or has no such rule; a rule of one's own is not lossless, and its name does not
        say ``approximate``.
      TypeError: ``rule`` is neither a name nor a ``Rule``, or an object that cannot be hashed.
    """
    if isinstance(rule, Rule):
        return _checked(rule)
    if not isinstance(rule, str):
        raise TypeError(
            f"rule={rule!r}: give a name ({', '.join(sorted(RULES))} or auto) or an instance of "
            "specjax.Rule"
        )
    name, _, settings = rule.partition(":")
    known = ("auto", *sorted(RULES))
    if name not in known and is_own(rule):
        return _own(rule, known)
    if name not in RULES and rule != "auto":
        meant = did_you_mean(name, known, repr)
        raise ValueError(
            f"rule={rule!r} is unknown: {meant}{'Known' if meant else 'known'} are "
            f"{', '.join(known)}, and module:Object for a rule of your own"
        )
    return _with_settings(rule, RULES[name], settings) if settings else RULES.get(name)


def _own(given: str, known: tuple[str, ...]) -> Rule:
    """Returns the rule of a name such as ``my_module:MyRule:scale=2``."""
    found, settings = find_own(f"rule={given!r}", given, Rule, known)
    if isinstance(found, type) and (lacking := lacking_defaults(found)):
        raise ValueError(
            f"rule={given!r}: the field {lacking[0]!r} of {found.__name__} has no default; a rule "
            "that is named by its class is made without arguments, so give each field a default"
        )
    rule = instance(found) if isinstance(found, type) else found
    return _checked(_with_settings(given, rule, settings) if settings else rule)


def _checked(rule: Rule) -> Rule:
    """Returns ``rule``; raises ``ValueError`` if its name does not say that it is approximate, and
    ``TypeError`` if it cannot be hashed."""
    if not rule.lossless and "approximate" not in rule.name:
        raise ValueError(
            f"rule={rule.name!r} has lossless=False, and its name does not say so: put "
            "'approximate' into the name"
        )
    check_hashable("rule", rule)
    return rule


def _with_settings(given: str, rule: Rule, settings: str) -> Rule:
    """Returns ``rule`` with the values that ``settings``, such as ``top_k=3,gap=1.5``, sets."""
    if not dataclasses.is_dataclass(rule):
        raise ValueError(f"rule={given!r}: {rule.name!r} has no settings")
    kinds = {field.name: type(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
    kinds = {name: kind for name, kind in kinds.items() if kind in ACCEPTED}
    found = parse_settings(f"rule={given!r}", settings, rule.name, kinds)
    return dataclasses.replace(rule, **found)


def exact(rule: Rule, greedy: bool) -> bool:
    """Returns whether ``rule`` keeps the target's law; with ``greedy``, at temperature 0."""
    return rule.lossless or (greedy and rule.exact_at_zero)
