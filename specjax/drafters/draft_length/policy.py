"""The contract of the policies of ``Adaptive``, which choose the number of drafted tokens.

A policy is one file with one class, and one line in ``policies.py``, which names it.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import numpy as np

from ..._internal.pytree import PyTree, pytree_dataclass
from ...types import Confidence


@pytree_dataclass
class Outcome:
    """The outcome of a round, row by row.

    Attributes:
      width: int32 ``[B]``, how many tokens were asked for, the same in every row.
      offered: int32 ``[B]``, the depth of the draft; 0 where the drafter proposed nothing, which is
        no evidence about acceptance.
      accepted: int32 ``[B]``, how many drafted tokens were accepted.
      live: bool ``[B]``, whether the row took part.
    """

    width: jax.Array
    offered: jax.Array
    accepted: jax.Array
    live: jax.Array


class DraftLengthPolicy(abc.ABC):
    """Decides how many tokens to draft. Hashable and without arrays: a small frozen dataclass.

    A policy has four ways to decide, all of which run inside of the compiled loop:

    - ``choose``, before the round and once for the whole batch, since the widest row sets the cost
      of a pass. It learns from what was committed.
    - ``limit``, before the round and for each row, from the committed text.
    - ``confidence``, within the round and for each row, from the laws of the draft.
    - ``costs_within``, within the round and once for the whole batch, from what a drafter knows of
      its chances.

    None of them sees a drafted token before it is verified: a length that looks at a token which it
    may then drop changes the law of the output (see ``specjax.types.Confidence``).

    Attributes:
      name: what users type, and what results call the policy.
      reads_costs: whether ``choose`` reads its ``costs``. Where it does not,
        ``params["drafter"]["costs"]`` may be left out, and nothing is measured.
      can_rest: whether ``choose`` may return 0; heads then make room for what such rounds commit.
      learns_from_rests: whether ``update`` is called after rounds that were to draft nothing, too.
      confidence: where a row stops drafting by the laws of its draft; None: nowhere.
    """

    name: str
    reads_costs: bool = False
    learns_from_rests: bool = True

    @property
    def can_rest(self) -> bool:
        return True

    @property
    def confidence(self) -> Confidence | None:
        return None

    @abc.abstractmethod
    def init(self, batch: int, depth: int) -> PyTree:
        """Returns what the policy remembers; every leaf leads with B. ``depth``: of the drafter."""

    @abc.abstractmethod
    def choose(
        self, memory: PyTree, widths: tuple[int, ...], costs: jax.Array, budget: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Decides the width of the next round.

        Args:
          memory: what the policy remembers.
          widths: the widths whose cost is known, increasing from 0.
          costs: float32 ``[W]``, the time of a round at each of them, in any unit.
          budget: int32 ``[B]``, tokens that a row may still emit; 0 where it is finished.

        Returns:
          int32 scalar from 0 to ``widths[-1]``, and the memory.
        """

    def may_pay(self, widths: tuple[int, ...], costs: np.ndarray) -> bool:
        """Returns whether any width can be faster than plain rounds, whatever is accepted; where
        none can, ``generate`` decodes plainly. Asked of policies that read costs. Default: True.

        Args:
          widths, costs: as of ``choose``, on the host.
        """
        return True

    def limit(self, tokens: jax.Array, length: jax.Array, depth: int) -> jax.Array | None:
        """Bounds the depth of each row's draft. Default: None, the width that ``choose`` gave.

        Args:
          tokens: int32 ``[B, L]``, of which the first ``length`` of a row are committed.
          length: int32 ``[B]``.
          depth: of the drafter.

        Returns:
          int32 ``[B]``, or None.
        """
        return None

    def costs_within(
        self, widths: tuple[int, ...], costs: jax.Array, depth: int
    ) -> jax.Array | None:
        """Returns ``Context.costs`` of a round. Default: None, costs end no draft within a round.

        Args:
          widths, costs: as of ``choose``.
          depth: of the drafter.

        Returns:
          float32 ``[depth + 1]``, the cost of a round at each depth, or None.
        """
        return None

    @abc.abstractmethod
    def update(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """Returns the memory after a round."""


GREATEST = float(np.finfo(np.float32).max)  # beyond it a setting is infinite on the device
MOST_ROUNDS = 2**30  # twice as many are more than an int32 holds


def check_settings(
    policy: Any, numbers: tuple[str, ...] = (), rounds: tuple[str, ...] = ()
) -> None:
    """Refuses settings that the compiled loop cannot hold; ranges are checked by the policies.

    Args:
      policy: an object with the settings as attributes.
      numbers: the names of settings that must be finite.
      rounds: the names of settings that count rounds.

    Raises:
      ValueError: a number is NaN or infinite, also where it is rounded to a float32, or a number of
        rounds is too large.
    """
    for name in numbers:
        if not abs(value := getattr(policy, name)) <= GREATEST:
            raise ValueError(
                f"{type(policy).__name__}({name}={value}): it must be a finite number, of at most "
                f"{GREATEST:.1e}"
            )
    for name in rounds:
        if getattr(policy, name) >= MOST_ROUNDS:
            raise ValueError(
                f"{type(policy).__name__}({name}={getattr(policy, name)}): give fewer than "
                f"{MOST_ROUNDS} rounds"
            )


def confidence_at(threshold: float, *, keeps_last: bool) -> Confidence | None:
    """The ``confidence`` of a policy with the setting ``threshold``; None where that is 0."""
    return Confidence(threshold, keeps_last=keeps_last) if threshold else None
