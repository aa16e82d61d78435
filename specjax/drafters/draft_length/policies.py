"""The one place where a draft-length policy is registered, and what reads its name.

A class in ``POLICIES`` is known by its ``name`` to ``Adaptive(policy=...)``,
``Drafting(num="auto:NAME")``, ``--num-draft auto:NAME``, and to the tests of the project. Its
fields are the settings that may follow the name. A policy from outside of this package is
registered at run time::

    specjax.drafters.POLICIES[MyPolicy.name] = MyPolicy
"""

from __future__ import annotations

import dataclasses
import difflib

from ..._internal.keywords import checks_arguments
from ..._internal.named_settings import parse_settings
from .exllama import ExLlama
from .goodput import Goodput
from .huggingface import HuggingFace
from .policy import DraftLengthPolicy
from .schedule import Schedule
from .suffix import SuffixMatch

POLICIES: dict[str, type[DraftLengthPolicy]] = {
    Goodput.name: checks_arguments(Goodput),
    HuggingFace.name: checks_arguments(HuggingFace),
    ExLlama.name: checks_arguments(ExLlama),
    SuffixMatch.name: checks_arguments(SuffixMatch),
    Schedule.name: checks_arguments(Schedule),
}


def named_policy(policy: str | DraftLengthPolicy) -> DraftLengthPolicy:
    """Returns the policy of a name such as ``"exllama"`` or ``"exllama:skip=0,probe=8"``.

    Args:
      policy: a name in ``POLICIES``, with or without settings; or a policy, which is returned.

    Raises:
      ValueError: no policy has the name, or the policy has no such setting or not such a value.
      TypeError: ``policy`` is neither a text nor a policy.
    """
    if not isinstance(policy, str):
        if isinstance(policy, DraftLengthPolicy):
            return policy
        raise TypeError(
            f"policy={policy!r:.60}: give a specjax.drafters.DraftLengthPolicy, or one of the "
            f"names {', '.join(POLICIES)}"
        )
    name, _, text = policy.partition(":")
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"policy={policy!r} is unknown{meant}; known: {', '.join(POLICIES)}")
    kind = POLICIES[name]
    if not text:
        return kind()
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    kinds = {field.name: type(field.default) for field in fields}
    return kind(**parse_settings(f"policy={policy!r}", text, name, kinds))
