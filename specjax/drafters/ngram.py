"""Prompt lookup: copies what followed the last few tokens when they occurred before.

Of all earlier positions, the one with the longest match of the last ``longest`` tokens is taken,
and of several the most recent (``choice``). Where the match overlaps the end of the text, the copy
goes on periodically. A longer match is trusted further: at most ``stretch`` tokens are proposed for
each matched token, and none without a match of ``shortest`` tokens; a round is only as wide as what
is proposed.

A tree of ``trees.chains(k, n)`` follows the ``k`` best matches: each prefix that several share is
drafted once.

Cost of a round and row: one pass over the token buffer for each of ``longest`` tokens, of 4 bytes a
slot; a tree sorts out its ``k`` best.

Lossless: yes, under ``greedy`` and ``delta`` (the draft is a function of the context).

Example::

    specjax.generate(lm, "...", drafter="ngram")
    drafter = NGram(num_draft=7, longest=4)  # the same as an object, with settings
    drafter = NGram(topology=specjax.trees.chains(3, 7))  # three matches
    # what the reference implementation takes
    drafter = NGram(num_draft=10, longest=3, shortest=1, stretch=10, choice="earliest")

References: A. Saxena, prompt lookup decoding, 2023; LLMA, arXiv 2304.04487.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from .. import trees
from ..trees.copies import matches
from ..types import ROOT, Draft, PyTree
from . import continuations
from .base import ChainDrafter, check_topology


@dataclasses.dataclass(frozen=True)
class NGram(ChainDrafter):
    """Copies the continuation of an earlier occurrence of the last tokens.

    Attributes:
      num_draft: the most tokens of a match proposed in a round; with a tree, its number of nodes.
      longest: how many of the last tokens are compared at most.
      shortest: the shortest match that is followed.
      stretch: how many tokens are proposed at most for each matched token.
      choice: which of several longest matches is followed. ``"latest"``: the most recent, whose
        copy may run on periodically. ``"earliest"``: the first that is followed by ``num_draft``
        tokens and does not overlap the tokens compared.
      topology: None, a chain, or ``trees.chains(k, n)``: the ``k`` best matches, ``n`` tokens each.

    Raises:
      ValueError: not ``1 <= shortest <= longest``, ``stretch`` below 1, an unknown ``choice``, or
        another tree.
    """

    longest: int = 6
    shortest: int = 2
    stretch: int = 2
    choice: Literal["latest", "earliest"] = "latest"
    topology: trees.Topology | None = None
    name = "ngram"
    has_weights = False
    can_rest = True
    takes_topology = True

    def __post_init__(self):
        super().__post_init__()
        check_topology(self)
        if not 1 <= self.shortest <= self.longest or self.stretch < 1:
            raise ValueError(
                f"shortest={self.shortest}, longest={self.longest}, stretch={self.stretch}: need "
                "1 <= shortest <= longest and 1 <= stretch"
            )
        if self.choice not in ("latest", "earliest"):
            raise ValueError(f"choice={self.choice!r}: accepted are 'latest' and 'earliest'")
        shape = self.topology
        if shape is None:
            return
        if shape != trees.chains(self.branches, shape.depth):
            raise ValueError(
                f"NGram(topology={shape}): matches stand side by side; give trees.chains(k, n) "
                "(as words: '3x1x1x1' for three matches of four tokens), or a chain"
            )
        object.__setattr__(self, "num_draft", shape.num_nodes - 1)

    @property
    def branches(self) -> int:
        """How many matches are followed."""
        shape = self.topology
        return shape.parents.count(ROOT) if isinstance(shape, trees.Tree) else 1

    @property
    def depth(self) -> int:
        return self.num_draft // self.branches

    def draft_step(self, params, target_params, state, context):
        draft, _, state = self.scored_draft(params, state, context)
        return draft, state

    def scored_draft(self, params, state, context) -> tuple[Draft, jax.Array, PyTree]:
        """The draft; the number of tokens that are trusted after the match that it follows, float32
        ``[B]``; and the state."""
        matched = self.matches(context.tokens, context.length)
        if self.branches > 1:
            draft = self._several(context, matched)
            followed = self.followed(matched, context.length, self.depth)
            return draft, followed.astype(jnp.float32), state
        copied, count = self.copy(context.tokens, context.length, matched, self.num_draft)
        proposed = jnp.arange(self.num_draft) < count[:, None]
        draft = trees.chain_draft(context, copied, candidate=proposed, scored=proposed)
        return draft, count.astype(jnp.float32), state

    def score_beside(self, depth: int) -> float:
        """See ``IndexedDrafter``: any match that is followed goes before another drafter."""
        return 1.0

    def matches(self, tokens, length):
        """Counts how many tokens up to each index equal the last tokens of the text.

        Args:
          tokens: int32 ``[B, L]``.
          length: int32 ``[B]``; the first ``length`` tokens of a row are its text.

        Returns:
          int32 ``[B, L]``, at most ``longest``; 0 at the last token of the text and after it.
        """
        # before the beginning of the text stands its first token: no match is so long
        back = jnp.maximum(length[:, None] - 1 - jnp.arange(self.longest, dtype=jnp.int32), 0)
        end = jnp.take_along_axis(tokens, back, axis=1)
        return matches(tokens, length, end[:, None])[:, 0]

    def matches_after(self, tokens, length, matched):
        """``matches`` of the text with one more token, ``tokens[length]``, given those without."""
        last = jnp.take_along_axis(tokens, length[:, None], axis=1, mode="clip")
        before = jnp.pad(matched, ((0, 0), (1, 0)))[:, :-1]
        inside = jnp.arange(tokens.shape[1]) < length[:, None]
        return jnp.where(inside & (tokens == last), jnp.minimum(before + 1, self.longest), 0)

    def _trusted(self, run_length):
        """How many tokens to copy after a match; 0 if it is shorter than ``shortest``."""
        return jnp.where(run_length >= self.shortest, self.stretch * run_length, 0)

    def _preferred(self, matched, length, steps):
        """int32 ``[B, L]``: higher for the places that are followed first, below L for none."""
        size = matched.shape[1]
        index = jnp.arange(size, dtype=jnp.int32)
        if self.choice == "latest":
            return matched * size + index
        # no longer than what stands between the place's successor and the tokens compared
        apart = jnp.clip(length[:, None] - 2 - index, 0, matched)
        whole = index + 1 + steps <= length[:, None]
        return jnp.where(whole, apart, 0) * size + size - 1 - index

    def _places(self, key):
        """The place and the match of ``_preferred`` numbers ``[B, ...]`` of ``[B, L]`` places."""
        best, size = key
        place = best % size if self.choice == "latest" else size - 1 - best % size
        return place, best // size

    def followed(self, matched, length, steps):
        """int32 ``[B]``: how many tokens ``copy`` trusts, perhaps more than ``steps``; 0: it copies
        nothing."""
        best = jnp.max(self._preferred(matched, length, steps), axis=1)
        return self._trusted(self._places((best, matched.shape[1]))[1])

    def copy(self, tokens, length, matched, steps):
        """Copies what followed the longest match, of several the most recent.

        Returns:
          int32 ``[B, steps]``, periodic beyond the end of the text; and int32 ``[B]``, how many of
          these tokens are trusted.
        """
        size = tokens.shape[1]
        best = jnp.max(self._preferred(matched, length, steps), axis=1)
        end, run_length = self._places((best, size))
        period = jnp.maximum(length - 1 - end, 1)[:, None]
        where = end[:, None] + 1 + jnp.arange(steps, dtype=jnp.int32) % period
        copied = jnp.take_along_axis(tokens, where, axis=1, mode="clip")
        return copied, jnp.minimum(self._trusted(run_length), steps)

    def _several(self, context, matched):
        """The draft of the ``branches`` best matches, level by level."""
        count, steps, tokens = self.branches, self.depth, context.tokens
        preferred = self._preferred(matched, context.length, steps)
        few = min(count, tokens.shape[1])  # of a short buffer
        best = jnp.pad(jax.lax.top_k(preferred, few)[0], ((0, 0), (0, count - few)))
        places, run_length = self._places((best, tokens.shape[1]))
        after = continuations.following(tokens, places, context.length, steps)  # [B, k, n]
        trusted = jnp.minimum(self._trusted(run_length), steps)
        after = jnp.where(jnp.arange(steps) < trusted[:, :, None], after, -1)
        first = continuations.first_with_prefix(after)
        kept = (after >= 0) & (first == jnp.arange(count)[:, None])
        # level by level: token n of branch k is node `1 + n count + k`
        above = ROOT + 1 + jnp.arange(steps - 1) * count + first[:, :, :-1]
        above = jnp.pad(above, ((0, 0), (0, 0), (1, 0)), constant_values=ROOT)
        by_level = lambda x: jnp.swapaxes(x, 1, 2).reshape(len(x), -1)  # noqa: E731
        kept = by_level(kept)
        return trees.tree_draft(
            context,
            by_level(jnp.maximum(after, 0)),
            jnp.pad(by_level(above), ((0, 0), (1, 0)), constant_values=-1).astype(jnp.int32),
            candidate=kept,
            scored=kept,
            deepest=steps,
        )
