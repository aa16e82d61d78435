"""SAM decoding: copies after the longest match of the end of the text, wherever it stands.

The suffix automaton of the paper answers one question: the longest end of the text that occurred
before, and where first. The sorted index of ``context_index.py`` answers it in a compiled loop, for
matches of up to ``longest`` tokens. Alone, the drafter follows every match in the text; before
another drafter (``fallback.py``) it leaves matches of fewer than ``shortest_beside`` tokens to that
drafter.

Cost of a round and row, whatever the length n of the text: a search of ``longest * log2(n)``
comparisons, and ``num_draft * occurrences`` tokens read. The state is 4 bytes for each slot of the
token buffer.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context.

Example::

    specjax.generate(lm, "...", drafter="sam")
    drafter = SAM(num_draft=40, shortest=2)

Differs from the reference implementation: of more than ``occurrences`` longest matches the latest
are looked at, and the first of those is taken (there: the first of all).

References: SAM Decoding, arXiv 2411.10666, section 3.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from . import context_index, continuations
from .continuations import Proposal
from .indexed import IndexedDrafter


@dataclasses.dataclass(frozen=True)
class SAM(IndexedDrafter):
    """Copies what followed the longest match, of several the first; ``score`` is its length.

    A match that is followed by ``num_draft`` tokens goes before a longer one that is not.

    Attributes:
      num_draft: the most tokens proposed in a round.
      longest: how many of the last tokens are compared at most.
      shortest: the shortest match that is followed.
      shortest_beside: the same before another drafter, which drafts after shorter matches; at most
        ``longest`` counts.
      stretch: how many tokens are proposed at most for each matched token.
      table_bias: by how many tokens a match in a table must exceed one in the text itself.

    Raises:
      ValueError: not ``1 <= shortest <= longest``, or ``num_draft``, ``shortest_beside`` or
        ``stretch`` below 1.
    """

    num_draft: int = 15
    longest: int = 32
    shortest: int = 1
    shortest_beside: int = 5
    stretch: int = 4
    table_bias: int = 5
    name = "sam"

    def __post_init__(self):
        super().__post_init__()
        least = min(self.num_draft, self.shortest_beside, self.stretch)
        if not 1 <= self.shortest <= self.longest or least < 1:
            raise ValueError(
                f"SAM(num_draft={self.num_draft}, shortest={self.shortest}, longest="
                f"{self.longest}, shortest_beside={self.shortest_beside}, stretch={self.stretch}): "
                "need 1 <= shortest <= longest, and num_draft, shortest_beside and stretch of at "
                "least 1"
            )

    def score_beside(self, depth):
        return float(min(self.shortest_beside, self.longest))

    def propose(self, index, tokens, length, end, shared=False):
        places, matched = context_index.nearest(index, tokens, end, length, self.occurrences)
        after = continuations.following(tokens, places, length, self.num_draft)
        whole = (after[:, :, -1] >= 0) & (matched >= self.shortest)
        matched = jnp.where(jnp.any(whole, axis=1)[:, None] & ~whole, 0, matched)
        size = jnp.max(matched, axis=1)
        first = jnp.where(matched == size[:, None], places, tokens.shape[1])
        best = jnp.argmin(first, axis=1)[:, None]
        said = jnp.take_along_axis(after, best[:, :, None], axis=1)[:, 0]
        trusted = jnp.where(size >= self.shortest, self.stretch * size, 0)
        count = jnp.minimum(trusted, jnp.sum(said >= 0, axis=1, dtype=jnp.int32))
        score = jnp.where(count > 0, size - self.table_bias * shared, 0).astype(jnp.float32)
        return Proposal(tokens=said, parent=None, count=count, score=score)
