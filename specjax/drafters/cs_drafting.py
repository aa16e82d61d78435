"""CS Drafting, vertical and horizontal, built from its matrix of lengths.

    [[5, 14, 10],     the target's draft: 5 tokens of a, 14 further ones of b, 10 of the table
     [0,  1, 10],     what drafts for a:  1 token of b, 10 of the table
     [0,  0, 10]]     what drafts for b:  10 tokens of the table

Vertical: the text of a draft model is itself drafted for by cheaper drafters (``cascade.py``).
Horizontal: within a draft, the better drafters draft the first tokens, on which all others depend,
and cheaper ones those after them (``horizontal.py``).

Lossless: yes, as these two are.

Differs from CS Drafting as released, which is greedy only, may review leniently between drafters
(here ``Cascade(rule=...)`` does, at temperature 0), whose last drafter always copies 10 tokens, and
which may draft more tokens than its matrix says; here the lengths hold exactly.

Example::

    three = DraftModel(model=a), DraftModel(model=b), NGram(choice="earliest")
    matrix = [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
    drafter, own = cs_drafting(matrix, three, (weights_of_a, weights_of_b, None))
    params = {"target": weights, "drafter": own}

References: CS Drafting, arXiv 2312.11462, sections 3.1 and 3.2 and algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..types import Drafter, PyTree
from .cascade import Cascade
from .draft_model import DraftModel
from .horizontal import Horizontal


def cs_drafting(
    lengths: Sequence[Sequence[int]], drafters: Sequence[Drafter], weights: Sequence[PyTree]
) -> tuple[Drafter, PyTree]:
    """Builds CS Drafting, vertical and horizontal, from its matrix of lengths.

    Row 0 is the draft of the target: ``lengths[0][0]`` tokens of the first drafter, then
    ``lengths[0][1]`` FURTHER tokens of the second, and so on (the released code counts them so).
    The text of drafter ``j`` is itself drafted for by the drafters after it, with the lengths of
    row ``j + 1``; the last drafter, and one that drafts a single token, is run as it is.

    A drafter that stands at several places of the matrix has a state, such as a cache, for each;
    its weights are shared.

    Args:
      lengths: K, n rows of n integers of at least 0, and 0 below the diagonal.
      drafters: n drafters, the best first. All but the last are draft models; the last is usually a
        table, and any drafter of chains with a ``num_draft``. Their own ``num_draft`` is not read.
      weights: n weights, None for a drafter without.

    Returns:
      the drafter and its weights, ``params["drafter"]``.

    Raises:
      TypeError: a drafter that is served is no ``DraftModel``.
      ValueError: the matrix is no such matrix, or a row that drafts for the target or for a draft
        model drafts nothing.

    References: CS Drafting, arXiv 2312.11462, algorithm 1.
    """
    count = len(drafters)
    rows = [list(row) for row in lengths]
    what = f"cs_drafting(lengths={rows})"
    if not count or len(weights) != count or [len(row) for row in rows] != [count] * count:
        raise ValueError(
            f"{what} with {count} drafters and {len(weights)} weights: give a row and a column for "
            "each drafter, and weights for each (None for one without)"
        )
    for i, row in enumerate(rows):
        for j, num in enumerate(row):
            if not isinstance(num, int | np.integer) or isinstance(num, bool) or num < 0:
                raise ValueError(f"{what}: [{i}][{j}] is {num!r}; give integers of at least 0")
            if j < i and num:
                raise ValueError(
                    f"{what}: [{i}][{j}] is {num}, below the diagonal; row {i} drafts for drafter "
                    f"{i - 1}, so only drafters from {i} on can draft in it: give 0"
                )
    for i, drafter in enumerate(drafters[:-1]):
        if not isinstance(drafter, DraftModel):
            raise TypeError(
                f"cs_drafting(drafters[{i}]={drafter!r}): all but the last have a model that is "
                "drafted for; give a specjax.drafters.DraftModel"
            )

    def sized(j: int, num: int) -> Any:
        one: Any = drafters[j]
        settings: dict[str, Any] = {"num_draft": num}
        if any(field.name == "topology" for field in dataclasses.fields(one)):
            settings["topology"] = None  # it would state another number
        return dataclasses.replace(one, **settings)

    def level(i: int) -> tuple[Drafter, PyTree]:
        """The drafters of row ``i`` in turn, each served by the rows after its own."""
        found = []
        for j in range(i, count):
            num = int(rows[i][j])
            if not num:
                continue
            own, given = sized(j, num), weights[j]
            if j + 1 < count and num > 1:
                inner, of_inner = level(j + 1)
                own, given = Cascade(own, inner), {"outer": given, "inner": of_inner}
            found.append((own, given))
        if not found:
            served = "the target" if i == 0 else f"drafter {i - 1}"
            raise ValueError(f"{what}: row {i} drafts nothing for {served}; give it some tokens")
        if len(found) == 1:
            return found[0]
        made, given = zip(*found, strict=True)
        return Horizontal(drafters=made), given

    return level(0)
