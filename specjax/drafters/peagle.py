"""P-EAGLE: all depths of an EAGLE-3 head from one pass.

    depth 1:      [norm(e(root)); norm(g)],  g = fc(features of the token before the root)
    depth k > 1:  [norm(e(mask)); norm(g')], g' = fc(mask_hidden)

The pairs of the further depths all have the same token and the same hidden state, both learned;
only their positions differ, each one further. They see all pairs of committed tokens and those of
the depths before. The logits are equal to those of github.com/vllm-project/speculators' ``peagle``
for random weights (``tests/golden/features/peagle``).

With ``config.dependency_size``, which is an addition of this project, the pass is the same, and a
small layer then gives each further depth the token that was drafted before it (``dependency.py``).

Lossless: yes, as ``eagle3.py``.

Example::

    heads = specjax.load_drafter("path/to/p-eagle-head", lm)  # a file with mask_hidden
    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(num=7))

References: P-EAGLE, arXiv 2602.01469.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .._internal.optional import required
from ..trees.levels import depth_of
from .eagle3 import Eagle3
from .heads import independent_level, states_of_parents


@dataclasses.dataclass(frozen=True)
class PEagle(Eagle3):
    """Drafts with an EAGLE-3 head whose ``config.mask_token`` is set, in one pass a round.

    That is the pass which reads what the last round accepted, wider by one column for each depth
    but the first. Without a dependency nothing of the draft is read, so that a tree has the same
    tokens below every node of a depth. Any depth can be drafted; depths that were not trained are
    seldom accepted.

    Raises:
      ValueError: the head has no mask token, so it was not trained to draft all depths at once.
    """

    name = "p-eagle"
    parallel = True

    def make_level(self, params, target_params, state, context, caught=None):
        head, (found, _) = self.heads(params), required(caught, "caught")
        if head.dependency is None:
            return independent_level(lambda: found)

        def level(above, grown, since):
            """``above``: the states of the nodes of each depth above, ``[H, B * W]`` each."""
            tokens = grown.tokens[:, since:]
            here = jnp.repeat(found[:, :, depth_of(grown, since)], tokens.shape[1], axis=1)
            if since:
                embedded = head.embed(tokens, self.target, target_params)
                here = head.dependency(embedded, here, states_of_parents(above[-1], grown, since))
            return head.say(here, len(tokens), self.target, target_params), (*above, here)

        return level, ()

    def _root(self, head, target_params, cache, features, tokens, start, count):
        """As ``FeatureReader._root``, with logits ``[B, D, V]`` of all depths, or with their normed
        states ``[H, B, D]`` where logits depend on the draft: one pass over pairs and masks."""
        (batch, pairs), masks = tokens.shape, self.depth - 1
        blank = jnp.broadcast_to(head.mask_hidden[...], (batch, masks, features.shape[2]))
        features = jnp.concatenate([features, blank.astype(features.dtype)], axis=1)
        tokens = jnp.pad(tokens, ((0, 0), (0, masks)), constant_values=self.config.mask_token)
        # masks follow the last true pair, in whichever column that is
        index, last = jnp.arange(pairs + masks, dtype=jnp.int32), jnp.maximum(count - 1, 0)[:, None]
        place = jnp.where(index < pairs, index, last + 1 + index - pairs)  # [B, column]
        true = (index <= last) | (index >= pairs)
        own = index[:, None] == index
        sees = ((place[:, :, None] <= place[:, None, :]) & true[:, :, None]) | own
        hidden = head.read(features.reshape(batch * (pairs + masks), -1).T)
        embedded = head.embed(tokens, self.target, target_params)
        out, entries = head.run(
            head.enter(embedded, hidden),
            start[:, None] + place,
            sees,
            batch=batch,
            prefix=cache[0],
            length=jnp.maximum(start, 0),
        )
        out = out.reshape(len(out), batch, -1)
        where = jnp.concatenate([last, jnp.broadcast_to(index[pairs:], (batch, masks))], axis=1)
        out = jnp.take_along_axis(out, where[None], axis=2)
        found = head.norm(out.reshape(len(out), -1))
        if head.dependency is None:
            found = head.say(found, batch, self.target, target_params)
        else:
            found = found.reshape(out.shape)
        kept = tuple(tuple(x[:, :, :pairs] for x in layer) for layer in entries)
        return found, (out[:, :, 0],), (kept,)
