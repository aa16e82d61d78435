"""The inputs of the calculator: rates, shapes and costs, checked and in one form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .. import trees
from .tree_search import expected_tokens

Rates = float | Sequence[float] | Sequence[Sequence[float]]
ONE = (int, float, np.number)  # the types of one rate
TRUTH = (bool, np.bool_)  # which Python takes for numbers
LEAST_SECONDS = 1e-12  # of a pass
CLOSE = 1e-12  # the precision to which a rate is found from tau


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
        value = numbers[name]
        if isinstance(value, TRUTH) or not least <= value < math.inf:
            raise ValueError(f"{name}={value}: give a number from {least} on")
    if (most := numbers["most"]) >= trees.MOST_NODES:
        raise ValueError(f"most={most}: give a number from 1 to {trees.MOST_NODES - 1}")
    if isinstance(knee, TRUTH) or not knee >= 1:
        raise ValueError(f"knee={knee}: give a number of tokens from 1 on")
    if pass_seconds is not None and (
        isinstance(pass_seconds, TRUTH) or not LEAST_SECONDS <= pass_seconds < math.inf
    ):
        raise ValueError(
            f"pass_seconds={pass_seconds}: give seconds, at least {LEAST_SECONDS}, or None"
        )


def shape_of(acceptance, num_draft: int | None, tree) -> trees.Tree:
    """Returns the draft that is asked for."""
    whole = isinstance(num_draft, int | np.integer) and not isinstance(num_draft, TRUTH)
    if num_draft is not None and not (whole and num_draft >= 1):
        raise ValueError(f"num_draft={num_draft}: give a whole number of tokens from 1 on, or None")
    if tree is None:
        if num_draft is None:
            num_draft = len(acceptance) if isinstance(acceptance, Sequence | np.ndarray) else 4
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
    for name, value in (("acceptance", acceptance), ("tau", tau)):
        if isinstance(value, TRUTH):
            raise ValueError(f"{name}={value}: give a number")
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
    if shape.depth > rates.shape[0] or wide > rates.shape[1]:
        raise ValueError(
            f"acceptance={acceptance}: it has {rates.shape[0]} depths and {rates.shape[1]} ranks, "
            f"and the draft has {shape.depth} and {wide}; give a rate for each"
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
    """Returns measured costs of passes in ascending order of N."""
    known = tuple(sorted((given or {}).items()))
    if known and (known[0] != (1, 1.0) or not all(cost > 0 for _, cost in known)):
        raise ValueError(
            f"passes={given}: give costs above 0 relative to a pass over one node, {{1: 1.0, ...}}"
        )
    return known
