"""No drafter: plain decoding through the same loop, the baseline of every figure.

Lossless: yes, since every token is the target's.

Example::

    params = {"target": weights}
    specjax.decode(target, Plain(), params, tokens, lengths, key=key, max_new_tokens=64)
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import trees
from .base import ChainDrafter


@dataclasses.dataclass(frozen=True)
class Plain(ChainDrafter):
    """Proposes nothing: a tree of one node."""

    num_draft: int = 0
    name = "plain"
    has_weights = False

    def draft_step(self, params, target_params, state, context):
        nothing = jnp.zeros((context.tokens.shape[0], 0), jnp.int32)
        return trees.chain_draft(context, nothing), state
