"""The contract of the policies of ``Adaptive``, which choose the number of drafted tokens.

``Goodput`` (``goodput.py``) is the one to use; ``HuggingFace`` and ``ExLlama``
(``draft_length_baselines.py``) are published heuristics to compare it with.
"""

from __future__ import annotations

import abc

import jax

from .._internal.pytree import PyTree, pytree_dataclass


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

    A policy decides once a round for the whole batch, since the widest row sets the cost of a pass.
    It learns only from what was committed: a decision that looked at drafted tokens before they are
    verified would change their law, and with it that of the output.

    Attributes:
      name: what results call the policy.
    """

    name: str

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

    @abc.abstractmethod
    def update(self, memory: PyTree, outcome: Outcome) -> PyTree:
        """Returns the memory after a round."""
