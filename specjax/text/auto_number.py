"""The values of ``Drafting.num``: a number, or ``"auto"``, where a policy chooses the number."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from .. import drafters
from ..drafters.draft_length import named_policy

AUTO, AUTO_DRAFTS = "auto", 7  # the number that a policy chooses, and the greatest such number
MOST_DRAFTS = 64  # levels of a draft; each is a part of the program: thousands compile for hours


def is_auto(num) -> TypeGuard[str]:
    """Returns whether a number of drafts is ``"auto"``, with or without a policy."""
    return isinstance(num, str) and num.partition(":")[0] == AUTO


def number_of(num) -> int:
    """Returns the number of drafts that ``num`` is.

    Raises:
      ValueError: ``num`` is no whole number from 1 to ``MOST_DRAFTS``.
    """
    whole = isinstance(num, int | np.integer) and num is not True
    if not whole or not 1 <= int(num) <= MOST_DRAFTS:
        raise ValueError(
            f"num={num!r}: the number of drafts is an integer from 1 to {MOST_DRAFTS}, "
            "or 'auto' with or without a policy; for plain decoding give drafter='none'"
        )
    return int(num)


def check_one_shape(num, tree) -> None:
    """Raises ``ValueError`` where both a number of drafts and a tree are given."""
    if num is not None and not is_auto(num) and tree is not None:
        raise ValueError(
            f"tree={tree!r:.60} and num={num!r}: give one of the two, or num='auto' and a tree"
        )


def auto_policy(num: str) -> drafters.DraftLengthPolicy:
    """Returns the policy of ``"auto"`` (goodput), ``"auto:NAME"`` or ``"auto:NAME:SETTINGS"``.

    Raises:
      ValueError: the policy or one of its settings is unknown.
    """
    _, chosen, name = num.partition(":")
    if chosen and not name:
        raise ValueError(f"num={num!r}: no policy is named; give 'auto', or 'auto:NAME'")
    try:
        return named_policy(name if chosen else drafters.Goodput.name)
    except ValueError as error:
        raise ValueError(f"num={num!r}: {error}") from None
