"""Prompt lookup: copies what followed the last few tokens when they occurred before.

Of all earlier positions, the one with the longest match of the last ``longest`` tokens is taken,
and of several the most recent. Where the match overlaps the end of the text, the copy goes on
periodically. A longer match is trusted further: at most ``stretch`` tokens are proposed for each
matched token, and none without a match of ``shortest`` tokens; a round is only as wide as what is
proposed.

Lossless: yes, under ``greedy`` and ``delta`` (the draft is a function of the context).

Example::

    specjax.generate(lm, "...", drafter="ngram")
    drafter = NGram(num_draft=7, longest=4)  # the same as an object, with settings

Differs from the reference implementation, which takes the earliest full match.

References: A. Saxena, prompt lookup decoding, 2023; LLMA, arXiv 2304.04487.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from .base import ChainDrafter


@dataclasses.dataclass(frozen=True)
class NGram(ChainDrafter):
    """Copies the continuation of an earlier occurrence of the last tokens.

    Attributes:
      num_draft: the most tokens proposed in a round.
      longest: how many of the last tokens are compared at most.
      shortest: the shortest match that is followed.
      stretch: how many tokens are proposed at most for each matched token.

    Raises:
      ValueError: not ``1 <= shortest <= longest``, or ``stretch`` below 1.
    """

    longest: int = 6
    shortest: int = 2
    stretch: int = 2
    name = "ngram"
    can_rest = True

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.shortest <= self.longest or self.stretch < 1:
            raise ValueError(
                f"shortest={self.shortest}, longest={self.longest}, stretch={self.stretch}: need "
                "1 <= shortest <= longest and 1 <= stretch"
            )

    def draft_step(self, params, target_params, state, context):
        matched = self.matches(context.tokens, context.length)
        copied, count = self.copy(context.tokens, context.length, matched, self.num_draft)
        proposed = jnp.arange(self.num_draft) < count[:, None]
        return trees.chain_draft(context, copied, candidate=proposed, scored=proposed), state

    def matches(self, tokens, length):
        """Counts how many tokens up to each index equal the last tokens of the text.

        Args:
          tokens: int32 ``[B, L]``.
          length: int32 ``[B]``; the first ``length`` tokens of a row are its text.

        Returns:
          int32 ``[B, L]``, at most ``longest``; 0 at the last token of the text and after it.
        """
        size = tokens.shape[1]
        index = jnp.arange(size, dtype=jnp.int32)
        run = jnp.ones(tokens.shape, bool)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.longest):  # does token[i - back] equal token[length - 1 - back]?
            tail = jnp.maximum(length - 1 - back, 0)[:, None]
            wanted = jnp.take_along_axis(tokens, tail, axis=1)
            shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
            run &= (shifted == wanted) & (index - back >= 0) & (length[:, None] - 1 - back >= 0)
            matched += run
        return jnp.where(index < length[:, None] - 1, matched, 0)

    def matches_after(self, tokens, length, matched):
        """``matches`` of the text with one more token, ``tokens[length]``, given those without."""
        last = jnp.take_along_axis(tokens, length[:, None], axis=1, mode="clip")
        before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
        inside = jnp.arange(tokens.shape[1]) < length[:, None]
        return jnp.where(inside & (tokens == last), jnp.minimum(before + 1, self.longest), 0)

    def trusted(self, matched):
        """int32 ``[B]``: how many tokens to copy; 0 without a match of ``shortest`` tokens."""
        run_length = jnp.max(matched, axis=1)
        return jnp.where(run_length >= self.shortest, self.stretch * run_length, 0)

    def copy(self, tokens, length, matched, steps):
        """Copies what followed the longest match, of several the most recent.

        Returns:
          int32 ``[B, steps]``, periodic beyond the end of the text; and int32 ``[B]``, how many of
          these tokens are trusted.
        """
        size = tokens.shape[1]
        index = jnp.arange(size, dtype=jnp.int32)
        end = jnp.max(matched * size + index, axis=1) % size
        period = jnp.maximum(length - 1 - end, 1)[:, None]
        where = end[:, None] + 1 + jnp.arange(steps, dtype=jnp.int32) % period
        copied = jnp.take_along_axis(tokens, where, axis=1, mode="clip")
        return copied, jnp.minimum(self.trusted(matched), steps)
