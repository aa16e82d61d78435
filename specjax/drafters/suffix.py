"""Suffix decoding: what followed the end of the text before, weighed by how often.

Where the last tokens occurred before, the tokens that followed most often are drafted. All lengths
of the match compete: one of ``m`` tokens may propose ``factor * m + offset`` of them, and the one
whose proposal is expected to have most accepted wins (``continuations.py``). The draft is a chain,
or with a tree of ``trees.Expand`` the most frequent paths.

Cost of a round and row, whatever the length n of the text: a search of ``longest * log2(n)``
comparisons (``context_index.py``), and ``num_draft * occurrences * (longest + 1) * occurrences``
multiplications for the counts. The state is 4 bytes for each slot of the token buffer.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context.

Example::

    specjax.generate(lm, "...", drafter="suffix")
    drafter = Suffix(topology=specjax.trees.Expand(8, 8, 24))  # a tree of at most 24 tokens

Differs from the reference implementation: counts are exact up to ``occurrences`` matches of one
length; of more, those with the longest match are counted. Of equally frequent tokens the one of the
longest, then latest match comes first (there: an order of insertion). ``factor`` is 4 unless it is
given (there: 1): a round has the same width whatever a match may propose, so that tokens beyond the
length of the match cost nothing.

References: SuffixDecoding, arXiv 2411.04975, algorithm 1; snowflakedb/ArcticInference.
"""

from __future__ import annotations

import dataclasses

from .. import trees
from .._internal.optional import required
from . import context_index, continuations
from .indexed import IndexedDrafter


@dataclasses.dataclass(frozen=True)
class Suffix(IndexedDrafter):
    """Drafts what followed the end of the text most often.

    Attributes:
      num_draft: the most tokens of a chain; that of a tree follows from the topology.
      topology: None or a chain; or ``trees.Expand``, whose ``depth`` and ``nodes`` bound a tree of
        the most frequent paths (its width does not: all paths are looked at).
      factor, offset: a match of ``m`` tokens proposes at most ``factor * m + offset`` tokens.
      min_probability: a path that is less probable is not drafted.
      longest, occurrences, block: see ``IndexedDrafter``.

    Raises:
      ValueError: a setting is out of range, or the tree is neither a chain nor ``trees.Expand``
        without settings beside its sizes.
    """

    num_draft: int = 16
    topology: trees.Topology | None = None
    factor: float = 4.0
    offset: float = 0.0
    min_probability: float = 0.1
    name = "suffix"
    takes_topology = True

    def __post_init__(self):
        super().__post_init__()
        if self.topology is None and self.num_draft < 1:
            raise ValueError(f"Suffix(num_draft={self.num_draft}): must be at least 1")
        shape = self.topology or trees.chain(self.num_draft)
        chain = isinstance(shape, trees.Tree) and shape.is_chain
        if not chain and (not isinstance(shape, trees.Expand) or shape.settings):
            raise ValueError(
                f"Suffix(topology={shape}): the text says how a tree grows; give a chain, or "
                "trees.Expand(width, depth, nodes) without further settings"
            )
        if not (0 <= self.min_probability <= 1 and self.factor >= 0):
            raise ValueError(
                f"Suffix(min_probability={self.min_probability}, factor={self.factor}): "
                "min_probability must be from 0 to 1, factor at least 0"
            )
        object.__setattr__(self, "topology", shape)
        object.__setattr__(self, "num_draft", shape.num_nodes - 1)

    @property
    def depth(self) -> int:
        return required(self.topology, "topology").depth

    def propose(self, index, tokens, length, end, shared=False):
        places, matched = context_index.nearest(index, tokens, end, length, self.occurrences)
        after = continuations.following(tokens, places, length, self.depth)
        budget = continuations.budgets(self.longest, self.num_draft, self.factor, self.offset)
        if isinstance(self.topology, trees.Tree):
            return continuations.chain(after, matched, budget, self.min_probability)
        nodes = self.num_draft
        return continuations.tree(after, matched, budget, self.min_probability, nodes)
