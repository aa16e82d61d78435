"""A toy target that sees the first and the last tokens alone, and its part over another's cache."""

import dataclasses

import jax.numpy as jnp
from stranger import Bag

from specjax import trees
from specjax.models import kv_cache
from specjax.types import Scores, SubNetwork


@dataclasses.dataclass(frozen=True)
class WindowedBag(Bag):
    """The sum of the vectors of the first and of the last tokens alone, in a ring after sinks."""

    window: int
    sinks: int

    def init(self, params, batch, capacity, inputs=None):
        return super().init(params, batch, self.window + self.sinks)

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        fresh = Bag.verify(
            self, params, cache, draft, since=since, entries=entries, logits=False
        ).entries
        here = draft.start[:, None] + trees.depths(draft)
        held = kv_cache.held(self.window + self.sinks, draft.start, self.sinks)

        def seen(at):  # bool [B, M, N]
            at = at[:, :, None]
            return (at >= 0) & ((at < self.sinks) | (at > here[:, None] - self.window))

        past = seen(jnp.where(held < draft.start[:, None], held, -1))
        state = jnp.einsum("bsn,bsf->bnf", past.astype(jnp.float32), cache[:, 0])
        sees = (trees.ancestors(draft) & seen(here)).astype(jnp.float32)
        state = (state + jnp.einsum("bmn,bmf->bnf", sees, fresh[:, 0]))[:, since:]
        scores = jnp.tanh(state) @ params["out"] if logits else None
        return Scores(logits=scores, features=None, entries=fresh)

    def commit(self, cache, entries, start, verdict):
        given = ((cache,),), ((entries,),), start, verdict
        return kv_cache.commit(*given, rings=(True,), sinks=(self.sinks,))[0][0]


@dataclasses.dataclass(frozen=True)
class WindowedBagPart(SubNetwork):
    """The toy over a window of its own cache."""

    small: WindowedBag

    def select(self, cache, length):
        size = self.small.window + self.small.sinks
        cache = jnp.pad(cache, ((0, 0), (0, 0), (0, max(size - cache.shape[2], 0)), (0, 0)))
        budgets = [(self.small.window, self.small.sinks)]
        return kv_cache.recent(((cache,),), length, budgets)[0][0]

    def as_target(self):
        return self.small

    own_cache = select

    def verify(self, params, cache, draft, **settings):
        return self.small.verify(params, cache, draft, **settings)
