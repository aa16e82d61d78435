"""A small model without Flax, with everything that a target has to provide."""

import dataclasses

import jax.numpy as jnp

import specjax
from specjax import trees


@dataclasses.dataclass(frozen=True)
class Bag(specjax.Target):
    """Logits from the sum of all token vectors so far, each times a factor of its position."""

    vocab_size: int

    def init(self, params, batch, capacity, inputs=None):
        return jnp.zeros((batch, 1, capacity, params["embed"].shape[1]))  # B first

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        positions = draft.start[:, None] + trees.depths(draft)
        wave = jnp.where(positions < 0, 0.0, 1.0 + 0.5 * jnp.cos(positions))[..., None]
        fresh = (params["embed"][draft.tokens] * wave)[:, None, since:]
        if entries is not None:  # nodes of this draft that went through an earlier pass
            fresh = jnp.concatenate([entries, fresh], axis=2)
        committed = jnp.arange(cache.shape[2]) < draft.start[:, None]
        past = jnp.sum(cache[:, 0] * committed[..., None], axis=1)
        sees = jnp.broadcast_to(trees.ancestors(draft), (len(past),) + (draft.num_nodes,) * 2)
        state = past[:, None] + jnp.einsum("bmn,bmf->bnf", sees[..., since:], fresh[:, 0])
        scores = jnp.tanh(state) @ params["out"] if logits else None
        return specjax.Scores(logits=scores, features=state if features else None, entries=fresh)

    def commit(self, cache, entries, start, verdict):
        return specjax.kv_cache.commit(cache, entries, start, verdict)
