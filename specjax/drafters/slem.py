"""String-level exact match: a draft model with another vocabulary proposes a string.

The model drafts its most probable tokens, whatever they are. The bytes that they spell are cut into
tokens of the target by tables (``strings.retokenize``), and the target judges these as it judges
copied text: as point masses.

Lossless: yes, whatever is drafted and however it was cut, under ``greedy`` and ``delta`` (which
``auto`` takes) and every other rule that judges drafts without laws.

What tables do not do: they cut greedily, the longest token first. Where the target's own tokenizer
would cut otherwise, the target, which has learned to write as its tokenizer cuts, rejects the
draft. Nor is a token that was committed ever cut anew; a draft goes on from where the last one
ends.

Example::

    specjax.generate(lm, "...", drafter="slem:path/to/model")

References: Timor et al., arXiv 2502.05202, algorithm 2 (there, the tokenizers themselves cut a
string that begins some tokens before the draft).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..sampling.distribution import Sampling
from ..trees import expand
from ..types import Context
from .strings import StringTables, retokenize
from .translation import TranslatedDraftModel, VocabularyTables, end_round


@pytree_dataclass
class SLEMTables(VocabularyTables):
    """The tables of ``SLEM``: those of every translated draft model, and ``strings``."""

    strings: StringTables

    @property
    def ratio(self) -> float:
        """How many tokens of the draft model stand for one of the target's in a text, about."""
        return super().ratio / max(float(self.strings.each), 1.0)


@dataclasses.dataclass(frozen=True)
class SLEM(TranslatedDraftModel):
    """Drafts a chain of tokens that spell what its model says.

    ``params["drafter"] = {"model": weights, "tables": SLEMTables}``; see ``text.translated``.

    Attributes:
      num_draft: tokens of the target that are proposed at most.
      passes: tokens of its own that the model drafts; 0: as many as spell ``num_draft`` tokens of
        the target, about (``ratio``).

    Raises:
      ValueError: a tree, or siblings, are to be drafted; or as ``DraftModel`` does.
    """

    passes: int = 0
    name = "slem"
    takes_sibling_sampling = False
    can_rewind = False  # a string that is cut is no beginning of the tokens of a longer one

    def __post_init__(self):
        if self.topology is not None and self.topology != trees.chain(self.topology.depth):
            raise ValueError(
                f"slem: topology={self.topology}: a string is a chain of tokens; leave the tree "
                "out, or take the drafter 'tli', which drafts trees"
            )
        if self.sibling_sampling is not None:
            raise ValueError(
                f"slem: sibling_sampling={self.sibling_sampling!r}: a string has no siblings; "
                "leave it out, or take the drafter 'tli'"
            )
        super().__post_init__()

    @property
    def own_depth(self) -> int:
        return self.passes or max(1, math.ceil(self.num_draft * self.ratio))

    def draft_step(self, params, target_params, state, context):
        state, text = self.begin_round(params, state, context)
        width, most = context.width, self.own_depth
        if width is not None:  # in passes, as many as spell so many tokens
            width = (width * most + self.num_draft - 1) // self.num_draft
        own = Context(
            tokens=state.tokens,
            length=text.length,
            budget=context.budget,
            key=context.key,
            sampling=Sampling().rows(len(text.length)),
            width=width,
            confidence=context.confidence,
        )

        def level(entries, grown, since):
            model, before = params["model"], text.before
            return self.look(model, state.model.cache, before, grown, since, entries)

        chain, entries, place = expand.expand(trees.chain(most), own, level, None)
        passes = jnp.full(text.length.shape, most if width is None else width, jnp.int32)
        if context.confidence is not None:
            passes = jnp.sum(required(chain.candidate, "candidate"), axis=1, dtype=jnp.int32) - 1
        drafted = jnp.where(jnp.arange(most) < passes[:, None], chain.tokens[:, 1:], -1)
        tokens, count = retokenize(params["tables"].strings, drafted, self.num_draft)
        kept = (jnp.arange(self.num_draft) < count[:, None]) & text.drafts[:, None]
        draft = trees.chain_draft(context, tokens, candidate=kept, scored=kept)
        known = dict(drafted=drafted, passes=passes)
        return draft, end_round(state, entries, place, ran=text.drafts, **known)

    def kept(self, state, segment):
        """Those that stand in the text, whatever string they were committed in."""
        steps = jnp.arange(self.own_depth, dtype=jnp.int32)
        where = required(state.length, "length")[:, None] + steps
        there = jnp.take_along_axis(state.tokens, where, axis=1, mode="fill", fill_value=-1)
        same = (there == state.drafted) & (steps < required(state.passes, "passes")[:, None] - 1)
        path = jnp.broadcast_to(steps, same.shape)
        return path, jnp.sum(jnp.cumprod(same, axis=1), axis=1, dtype=jnp.int32)
