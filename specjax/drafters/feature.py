"""Drafting with a few decoder layers that read the target's features: EAGLE and MTP modules.

A pair (the target's feature of token ``i``, token ``i + 1``) predicts token ``i + 2``. After a
drafted token there is no feature of the target; the head's own output at the previous pair stands
for it. ``feature_module.py`` holds the weights, ``feature_cache.py`` reads committed tokens, this
file drafts.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from ..trees import expand
from ..trees.levels import Words, depth_of
from .feature_cache import FeatureReader
from .heads import states_of_parents


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(FeatureReader):
    """Drafts with a ``FeatureModule``; ``params["drafter"]`` holds its weights.

    A round begins with one pass over the pairs that the last round accepted, whose last one ends
    with the root: it fills the cache and predicts the first drafted token. Each further depth takes
    one pass over the nodes of that depth, each of which sees the cache, its ancestors and itself;
    the entries of drafted nodes are dropped.

    With several stages, each makes a pass over the pending pairs, and stage ``k`` drafts depth
    ``k + 1``: its pairs are outputs of stage ``k - 1`` with the tokens one further on, so that its
    pass goes over all nodes above it too.

    Where ``context.width`` is given, passes beyond it are left out.
    """

    def draft_step(self, params, target_params, state, context):
        state, caught = self._catch_up(params, target_params, state, context)
        level, carry = self.make_level(params, target_params, state, context, caught)
        draft, _, _ = expand.expand(
            self.topology,
            context,
            level,
            carry,
            sibling_sampling=self.sibling_sampling,
            words=self.words(params),
        )
        return draft, state

    def words(self, params):
        vocab = self.heads(params).vocab
        return None if vocab is None else Words(vocab[...], self.vocab_size)

    def make_level(self, params, target_params, state, context, caught=None):
        """See ``HeadDrafter.make_level``; ``caught``: what ``_catch_up`` returned of this round."""
        head, batch = self.heads(params), len(context.length)
        logits, hidden = required(caught, "caught")
        step = self._next_depth if self.num_stages == 1 else self._next_stage

        def level(carry, grown, since):
            if since == 0:
                return logits, ((hidden[0],), None)
            return step(head, target_params, state.cache, hidden, carry, grown, since, batch)

        return level, ()

    def _next_depth(self, head, target_params, cache, first, carry, grown, since, batch):
        """One pass of the only stage, over the nodes of one depth.

        ``carry``: what the nodes of each depth above pass on, ``[H, B * W]`` each; and the entries
        of all nodes but the root.
        """
        above, entries = carry
        hidden = states_of_parents(above[-1], grown, since)
        embedded = head.embed(grown.tokens[:, since:], self.target, target_params)
        out, entries = head.run(
            head.enter(embedded, hidden),
            (grown.start - 1)[:, None] + trees.depths(grown)[:, 1:],
            trees.ancestors(grown)[:, 1:, since:],
            batch=batch,
            prefix=cache[0],
            length=grown.start,
            earlier=entries,
        )
        logits = head.logits(out, batch, self.target, target_params)
        return logits, ((*above, head.passed(out)), entries)

    def _next_stage(self, head, target_params, cache, first, carry, grown, since, batch):
        """One pass of the next stage, over all nodes below the root.

        ``carry``: what the previous stage passes on at all nodes above this depth.
        """
        stage, nodes = depth_of(grown, since), grown.num_nodes
        above = carry[0][-1].reshape(-1, batch, since)
        parents = jnp.broadcast_to(trees.parents(grown)[:, 1:], (batch, nodes - 1))
        hidden = jnp.take_along_axis(above, parents[None], axis=2).reshape(len(above), -1)
        positions = (grown.start - 1 - stage)[:, None] + trees.depths(grown)[:, 1:]
        sees = trees.ancestors(grown)[:, 1:, 1:] & (positions >= 0)[:, :, None]
        embedded = head.embed(grown.tokens[:, 1:], self.target, target_params)
        out, _ = head.run(
            head.enter(embedded, hidden, stage),
            positions,
            sees | jnp.eye(nodes - 1, dtype=bool),
            batch=batch,
            stage=stage,
            prefix=cache[stage],
            length=jnp.maximum(grown.start - stage, 0),
        )
        passed = head.passed(out, stage).reshape(-1, batch, nodes - 1)
        passed = jnp.concatenate([first[stage][:, :, None], passed], axis=2)
        out = out.reshape(-1, batch, nodes - 1)[:, :, since - 1 :].reshape(len(out), -1)
        logits = head.logits(out, batch, self.target, target_params, stage)
        return logits, ((*carry[0], passed.reshape(len(passed), -1)), None)
