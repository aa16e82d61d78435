"""Token-level intersection: a draft model with another vocabulary draws tokens that both share.

    q'(x | ...) = q(x | ...) / sum of q over the shared tokens,   0 elsewhere

The draft model's logits are cut to the shared tokens before the request's settings apply, so the
law that the draft states is the one from which its tokens were drawn, and every rule that is exact
for draft models is exact here. Tokens that the drafter lacks are never drafted: they come from the
target's own law, as corrections or bonus tokens.

Lossless: yes (the draft states its laws), whatever the two vocabularies have in common; a small
intersection costs accepted tokens alone.

Example::

    specjax.generate(lm, "...", drafter="tli:path/to/model")

References: Timor et al., arXiv 2502.05202, algorithm 4.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ..trees import expand
from ..trees.levels import Words
from .translation import TranslatedDraftModel, drafted_by, end_round


@dataclasses.dataclass(frozen=True)
class TLI(TranslatedDraftModel):
    """Drafts a chain or a tree of tokens that its model shares with the target.

    ``params["drafter"] = {"model": weights, "tables": VocabularyTables}``; see ``text.translated``.
    Its fields are those of ``DraftModel``, and ``ratio``.
    """

    name = "tli"

    def draft_step(self, params, target_params, state, context):
        state, text = self.begin_round(params, state, context)
        tables = params["tables"]

        def level(entries, grown, since):
            # all but the root are shared: one token of the model stands for each
            own = jnp.maximum(tables.pieces[grown.tokens, 0], 0).at[:, 0].set(text.last)
            grown = dataclasses.replace(grown, start=text.length - 1, tokens=own)
            logits, entries = self.look(
                params["model"], state.model.cache, text.before, grown, since, entries
            )
            return logits[:, :, tables.own], entries

        draft, entries, place = expand.expand(
            self.topology,
            context,
            level,
            None,
            sibling_sampling=self.picks,
            words=Words(tables.shared, len(tables.pieces)),
        )
        return drafted_by(draft, text.drafts), end_round(state, entries, place, ran=text.drafts)

    def kept(self, state, segment):
        verdict = segment.round[1]
        # the last accepted token may not have gone through the model
        return verdict.path[:, :-1], jnp.maximum(verdict.count - 1, 0)
