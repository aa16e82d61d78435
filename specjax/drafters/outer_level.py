"""The contract between a ``Cascade`` and its outer level, whose model decodes a text of its own."""

from __future__ import annotations

import abc

import jax

from ..types import Context, PyTree, Target
from .model_passes import ModelPassDrafter


class OuterLevel(ModelPassDrafter):
    """A drafter each of whose tokens is drawn from the law of one model, given the text before it.

    The model generates a text, then, and a ``Cascade`` has another drafter draft for it. The text
    of a round begins with a cache of all tokens before the root, which the round may write.

    Attributes:
      keeps_text: whether ``end_text`` keeps the cache, which then ``rewind`` takes back; False: it
        is made anew in each round.
    """

    keeps_text: bool

    @property
    @abc.abstractmethod
    def text_model(self) -> Target:
        """The model whose text the draft is.

        Raises:
          ValueError: no model of its own writes the draft of this drafter.
        """

    @abc.abstractmethod
    def text_params(self, params: PyTree, target_params: PyTree) -> PyTree:
        """The weights of ``text_model``; the arguments are those of ``draft_step``."""

    @abc.abstractmethod
    def begin_text(
        self, params: PyTree, target_params: PyTree, state: PyTree, context: Context
    ) -> tuple[PyTree, PyTree]:
        """Begins the text of a round.

        Args:
          state: after ``read_until`` was asked for all tokens before the root.

        Returns:
          the cache of ``text_model`` with these tokens, and the state.
        """

    @abc.abstractmethod
    def end_text(self, state: PyTree, cache: PyTree, length: jax.Array, ran: jax.Array) -> PyTree:
        """Ends the text of a round.

        Args:
          state: what ``begin_text`` returned.
          cache: of the text, without its last token.
          length: int32 ``[B]``, the tokens of the text.
          ran: bool ``[B]``, rows in which there is more text than was committed.

        Returns:
          the state between rounds.
        """

    def read_until(
        self, params: PyTree, state: PyTree, tokens: jax.Array, until: jax.Array, chunk: int
    ) -> PyTree:
        """Reads what is lacking of the committed ``tokens[:until]``, ``until`` int32 ``[B]``,
        ``chunk`` tokens a pass. Default: nothing is ever lacking."""
        return state
