"""Jacobi decoding: guesses of the next tokens, replaced by what the target says after each of them.

The guesses of a round are a chain. Its pass gives the target's most probable token after every
guess, right or wrong, and these tokens are the guesses of the next round:

    y_i  <-  argmax p(. | text, y_1 ... y_{i-1})        for all positions i of a window at once

The guesses that agree with the target are accepted, all of a round at once. So every round settles
one token at least, and a fixed point is what greedy decoding says. No model drafts.

``mode`` says where the window ends. ``whole``: ``num_draft`` positions, as far as the row has
still to go; the window slides along with the text. ``blocks``: at the end of the current block
(Gauss-Seidel between blocks of ``num_draft`` tokens, Jacobi within one). ``hybrid``: as ``blocks``
for the first ``until`` tokens of the text, and plain decoding after them.

Cost of a round and row, whatever the context: the target's pass has as many nodes as guesses, and
the most probable token is found at each of them. The state is ``4 num_draft + 8`` bytes a row.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context; the
guesses are that function (of the rounds before).

Example::

    specjax.generate(lm, "...", drafter="jacobi:mode=blocks", drafting=specjax.Drafting(num=3))
    drafter = Jacobi(num_draft=7)

Differs from the reference implementation: a round accepts all leading guesses that agree, and the
token after them (there: one token; CLLM's code does it as here); new positions begin with the last
tokens of the text (there: padding; CLLM: tokens drawn from the text); ``whole`` needs no length
that is known beforehand; above temperature 0 the guesses stay the most probable tokens (there:
greedy only).

References: Santilli et al., arXiv 2305.10427, algorithms 1 (PJ: whole), 2 (PGJ: blocks) and 3 (HGJ:
hybrid); CLLM, arXiv 2403.00835.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..sampling import drawing
from ..types import Context
from .base import ChainDrafter

MODES = ("whole", "blocks", "hybrid")


@pytree_dataclass
class JacobiState:
    """The guesses of each row.

    Attributes:
      guesses: int32 ``[B, K]``, of the tokens after the root; -1 where there is none yet.
      left: int32 ``[B]``, how many positions after the root are in the window.
      emitted: int32 ``[B]``, tokens of the rounds since the last prompt.
    """

    guesses: jax.Array
    left: jax.Array
    emitted: jax.Array


@dataclasses.dataclass(frozen=True)
class Jacobi(ChainDrafter):
    """Drafts what the target said in the last round after its own guesses.

    Attributes:
      num_draft: guesses in a round: the window of ``whole``, else the length of a block.
      mode: where the window ends: ``whole``, ``blocks`` or ``hybrid``.
      until: of ``hybrid``, how many new tokens are guessed before plain decoding goes on.

    Raises:
      ValueError: an unknown mode, or a number below 1.
    """

    num_draft: int = 3
    mode: Literal["whole", "blocks", "hybrid"] = "whole"
    until: int = 511
    name = "jacobi"
    has_weights = False
    can_rest = True
    reads_nodes = True
    can_rewind = False

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"Jacobi(mode={self.mode!r}): accepted are {', '.join(MODES)}")
        if min(self.num_draft, self.until) < 1:
            raise ValueError(
                f"Jacobi(num_draft={self.num_draft}, until={self.until}): each must be at least 1"
            )

    def init(self, params, target_params, batch, capacity, inputs=None):
        emitted = jnp.zeros((batch,), jnp.int32)
        return JacobiState(
            guesses=jnp.full((batch, self.num_draft), -1, jnp.int32),
            left=self._window(emitted),
            emitted=emitted,
        )

    def _window(self, emitted):
        """int32 ``[B]``: the positions of a new window after ``emitted`` tokens."""
        most = jnp.full_like(emitted, self.num_draft)
        return jnp.clip(self.until - emitted, 0, most) if self.mode == "hybrid" else most

    def draft_step(self, params, target_params, state, context):
        fresh = last_of_text(context, self.num_draft)
        guesses = jnp.where(state.guesses < 0, fresh, state.guesses)
        # beyond the budget no guess can be accepted
        inside = jnp.arange(self.num_draft) < jnp.minimum(state.left, context.budget)[:, None]
        return trees.chain_draft(context, guesses, candidate=inside, scored=inside), state

    def readout(self, draft, scores):
        return drawing.argmax(required(scores.logits, "scores.logits"))

    def observe(self, params, target_params, state, segment):
        if segment.round is None:  # a prompt: the guesses were about another text
            more = segment.num > 0
            begun = jnp.zeros_like(state.emitted)
            return JacobiState(
                guesses=jnp.where(more[:, None], -1, state.guesses),
                left=jnp.where(more, self._window(begun), state.left),
                emitted=jnp.where(more, begun, state.emitted),
            )
        draft, _, said = segment.round
        num, size = segment.num, self.num_draft
        said = said if draft.scored is None else jnp.where(draft.scored, said, -1)
        said = jnp.pad(said, ((0, 0), (0, size + 1 - said.shape[1])), constant_values=-1)
        # entry i of each is about the token i + 1 places after the root
        guessed = jnp.pad(state.guesses, ((0, 0), (0, 1)), constant_values=-1)
        latest = jnp.where(said >= 0, said, guessed)
        after = jnp.arange(size) + num[:, None]
        moved = jnp.take_along_axis(latest, jnp.minimum(after, size), axis=1)
        moved = jnp.where(after <= size, moved, -1)
        emitted, left = state.emitted + num, state.left - num
        ended = (left <= 0) | (self.mode == "whole")
        left = jnp.where(ended, self._window(emitted), left)
        return JacobiState(
            guesses=jnp.where(num[:, None] > 0, moved, state.guesses),
            left=jnp.where(num > 0, left, state.left),
            emitted=emitted,
        )


def last_of_text(context: Context, count: int) -> jax.Array:
    """int32 ``[B, count]``, the last tokens of each row's text, which begins anew where it is
    shorter than ``count``: guesses where nothing is known yet."""
    size = context.length[:, None]
    where = (size - count + jnp.arange(count, dtype=jnp.int32)) % size
    return jnp.take_along_axis(context.tokens, where, axis=1)
