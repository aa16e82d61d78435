"""Suffix: as many tokens as the end of the text has in common with an earlier place of the text.

    width of a row = min(depth, floor(factor * m + offset))

``m`` is the length of the longest end of the committed text that stands earlier in that text. Where
the text repeats itself, the drafter is trusted further; where nothing is repeated and ``offset`` is
0, nothing is drafted. Within the draft a row stops where the product of the greatest probabilities
of the drafter's laws falls below ``min_probability``.

Reads: the committed text and the laws of the draft. It knows no costs and counts no acceptance.

Lossless: yes; ``m`` is a function of committed tokens, and the product does not look at the tokens
that were drawn.

Differs from the reference, where this length belongs to a drafter that copies and the probabilities
are shares of counts: here both bound any drafter. There all lengths of a match compete; the longest
one has the greatest budget. Without a match the reference drafts nothing, whatever the offset.

Example::

    drafting = specjax.Drafting(num="auto:suffix:offset=2")
    specjax.generate(lm, "...", drafter="draft", drafting=drafting)
    drafter = Adaptive(DraftModel(7, model=small), policy=SuffixMatch(offset=2.0))

References: SuffixDecoding, arXiv 2411.04975, section 3; ``max_spec_factor``, ``max_spec_offset``
and ``min_token_prob`` of snowflakedb/ArcticInference.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from ...types import Confidence
from .. import continuations
from ..ngram import NGram
from .policy import DraftLengthPolicy, Outcome, check_settings

LONGEST = 64  # tokens of a match that are compared at most


@dataclasses.dataclass(frozen=True)
class SuffixMatch(DraftLengthPolicy):
    """A length in proportion to the match of the text's end, and a least path probability.

    Attributes:
      factor: tokens for each token of the match, above 0.
      offset: tokens beside those, for rows without a match too.
      min_probability: in [0, 1]; paths that are less probable are not drafted. 0: no such bound.

    Raises:
      ValueError: a setting is out of range.
    """

    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1
    name = "suffix"

    @property
    def can_rest(self) -> bool:
        return False

    def __post_init__(self):
        check_settings(self, ("factor", "offset"))
        if not self.factor > 0:
            raise ValueError(f"SuffixMatch(factor={self.factor}): it must be above 0")
        _ = self.confidence  # refuses what is no probability

    @property
    def confidence(self):
        least = self.min_probability
        return Confidence(least, along="path", keeps_last=False) if least else None

    def init(self, batch: int, depth: int):
        return ()

    def choose(self, memory, widths, costs, budget):
        return jnp.asarray(widths[-1], jnp.int32), memory

    def limit(self, tokens, length, depth):
        enough = max(depth - self.offset, 1) / self.factor  # a longer match adds nothing
        most = math.ceil(min(enough, LONGEST, tokens.shape[1]))
        matched = NGram(longest=most, shortest=1).matches(tokens, length)
        budgets = continuations.budgets(most, depth, self.factor, self.offset)
        without = jnp.clip(jnp.floor(jnp.asarray([self.offset])), 0, depth).astype(jnp.int32)
        return jnp.concatenate([without, budgets])[jnp.max(matched, axis=1)]

    def update(self, memory, outcome: Outcome):
        return memory
