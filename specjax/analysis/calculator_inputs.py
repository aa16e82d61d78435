"""The inputs of the calculator: rates, shapes and costs, checked and in one form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import trees
from .._internal.keywords import counted
from .tree_search import expected_tokens

Rates = float | Sequence[float] | Sequence[Sequence[float]]
ONE = (int, float, np.integer, np.floating)  # the types of one rate
TRUTH = (bool, np.bool_)  # which Python takes for numbers
LEAST_SECONDS = LEAST_COST = 1e-12  # of a pass
CLOSE = 1e-12  # the precision to which a rate is found from tau
# sizes and costs beyond it say nothing of a machine; products of several of them stay finite
MOST = 1e15
WHOLE = ("batch", "prompt", "new_tokens", "most")

LEAST = {  # values of the numbers that have no other limit
    "draft_cost": 0,
    "overhead": 0,
    "draft_overhead": 0,
    "read_cost": 0,
    "batch": 1,
    "prompt": 0,
    "new_tokens": 1,
    "most": 1,
}


def check_ranges(knee, pass_seconds, **numbers) -> None:
    """Raises ``ValueError`` for the first number that is out of its range, by its name.

    Args:
      knee, pass_seconds: see ``calculate``.
      numbers: those of ``LEAST``.
    """
    for name, least in LEAST.items():
        value, kind = numbers[name], "whole number" if name in WHOLE else "number"
        last = trees.MOST_NODES - 1 if name == "most" else MOST
        if not _within(value, least, last, whole=name in WHOLE):
            raise ValueError(f"{name}={value!r:.60}: give a {kind} from {least} to {last:g}")
    if not _within(knee, 1, math.inf):
        raise ValueError(f"knee={knee!r:.60}: give a number of tokens from 1 on")
    if pass_seconds is not None and not _within(pass_seconds, LEAST_SECONDS, MOST):
        raise ValueError(
            f"pass_seconds={pass_seconds!r:.60}: give seconds, at least {LEAST_SECONDS} and at "
            f"most {MOST:g}, or None"
        )


def _within(value, least: float, most: float, whole: bool = False) -> bool:
    """Whether a value is a number from ``least`` to ``most``; ``whole``: a whole one."""
    kinds = (int, np.integer) if whole else ONE
    number = isinstance(value, kinds) and not isinstance(value, TRUTH)
    return number and bool(least <= value <= most)


def given_rates(acceptance) -> Any:
    """Returns rates as None, a number, or a list whose entries are numbers or lists of numbers.

    Raises:
      ValueError: they are something else.
    """
    given = acceptance.tolist() if hasattr(acceptance, "tolist") else acceptance
    if given is None or _is_rate(given):
        return given
    rows = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [None]
    rows = [list(row) if isinstance(row, list | tuple) else row for row in rows]
    if not all(_is_rate(one) for row in rows for one in (row if isinstance(row, list) else [row])):
        raise ValueError(
            f"acceptance={acceptance!r:.60}: give a number from 0 to 1, a list of such numbers, or "
            "for a tree a list for each depth"
        )
    if [] in rows:
        raise ValueError(f"acceptance={acceptance!r:.60}: give at least one rate for each depth")
    return rows


def _is_rate(value) -> bool:
    return isinstance(value, ONE) and not isinstance(value, TRUTH)


def shape_of(acceptance, num_draft: int | None, tree) -> trees.Tree:
    """Returns the draft that is asked for."""
    whole = isinstance(num_draft, int | np.integer) and not isinstance(num_draft, TRUTH)
    if num_draft is not None and not (whole and num_draft >= 1):
        raise ValueError(f"num_draft={num_draft}: give a whole number of tokens from 1 on, or None")
    if tree is None:
        if num_draft is None:
            num_draft = len(acceptance) if isinstance(acceptance, list) else 4
        return trees.chain(num_draft)
    if num_draft is not None:
        raise ValueError(f"num_draft={num_draft}, tree={tree!r}: give one of the two")
    shape = trees.parse(tree) if isinstance(tree, str) else tree
    if not isinstance(shape, trees.Tree):
        raise ValueError(
            f"tree={tree!r}: it grows during decoding, so its nodes have no fixed rates; give a "
            "static tree, such as '3x2x1'"
        )
    if shape.depth < 1:
        raise ValueError(f"tree={tree!r}: it has a root alone; give a tree with drafted tokens")
    return shape


def rates_of(acceptance, tau: float | None, shape: trees.Tree, most: int) -> np.ndarray:
    """Returns the rates by depth and rank, float ``[D, R]``."""
    if (acceptance is None) == (tau is None):
        given = "neither is given" if tau is None else f"{acceptance} and {tau}"
        raise ValueError(f"acceptance, tau: {given}; give one of the two, such as acceptance=0.8")
    wide = max(shape.ranks) + 1
    if tau is not None and not _is_rate(tau):
        raise ValueError(f"tau={tau!r:.60}: give a number")
    if tau is not None:
        if wide > 1:
            raise ValueError(f"tau={tau}: only a chain has one rate that follows from it")
        acceptance = rate_of(tau, shape.depth)
    if isinstance(acceptance, ONE) and wide > 1:
        raise ValueError(
            f"acceptance={acceptance}: siblings of a tree are accepted at different rates; give a "
            "rate for each rank of each depth, such as [[0.7, 0.1], [0.6, 0.1]] (--acceptance "
            "0.7,0.1 0.6,0.1)"
        )
    if isinstance(acceptance, ONE):
        given = [[acceptance]] * max(shape.depth, most)
    else:
        known = () if acceptance is None else acceptance
        given = [[r] if isinstance(r, ONE) else list(r) for r in known]
    ranks = max(map(len, given), default=0)
    rates = np.asarray([[*row, *[0.0] * (ranks - len(row))] for row in given], float)
    if rates.size == 0 or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"acceptance={acceptance}: give rates from 0 to 1")
    if (rates.sum(axis=1) > 1 + 1e-9).any():
        raise ValueError(
            f"acceptance={acceptance}: the rates of one depth sum to more than 1, and at most one "
            "sibling is right"
        )
    if shape.depth > len(given):
        raise ValueError(
            f"acceptance={acceptance}: it has rates for {len(given)} depths, and the draft has "
            f"{shape.depth}; give a rate for each"
        )
    for depth, row in enumerate(given[: shape.depth], start=1):
        pairs = zip(shape.depths, shape.ranks, strict=True)
        needed = 1 + max(rank for at, rank in pairs if at == depth)
        if needed > len(row):
            raise ValueError(
                f"acceptance={acceptance}: it has {counted(len(row), 'rate')} for depth {depth}, "
                f"at which the draft has {needed} ranks; give a rate for each"
            )
    return rates


def rate_of(tau: float, num_draft: int) -> float:
    """Returns the acceptance rate at every position with which a chain emits τ tokens per round.

    Args:
      tau: tokens per round, the target's own token included, in [1, num_draft + 1].
      num_draft: the length of the chain.

    Raises:
      ValueError: no rate gives this τ.
    """
    if not 1 <= tau <= num_draft + 1:
        raise ValueError(
            f"tau={tau}: a chain of {num_draft} emits from 1 to {num_draft + 1} tokens per round"
        )
    shape, low, high = trees.chain(num_draft), 0.0, 1.0
    while high - low > CLOSE:
        middle = (low + high) / 2
        tokens = expected_tokens(shape, np.full((num_draft, 1), middle))
        low, high = (middle, high) if tokens < tau else (low, middle)
    return high


def passes_of(given: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    """Returns measured costs of passes in ascending order of N.

    Raises:
      ValueError: a number is out of its range, or the first is not 1.0 for one node.
    """
    pairs = tuple(given.items()) if isinstance(given, Mapping) else ()
    able = given is None or isinstance(given, Mapping)
    able = able and all(
        _within(nodes, 1, MOST, whole=True) and _within(cost, LEAST_COST, MOST)
        for nodes, cost in pairs
    )
    known = tuple(sorted(pairs)) if able else ()
    if not able or (known and known[0] != (1, 1.0)):
        raise ValueError(
            f"passes={given}: give costs from {LEAST_COST:g} to {MOST:g}, relative to a pass over "
            "one node, by numbers of nodes: {1: 1.0, 4: 1.1}"
        )
    return known
