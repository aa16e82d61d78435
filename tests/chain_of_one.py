"""32 rows, a chain of one draft, a table as the target: run by ``test_chain_of_one.py``.

Compiled for AVX-512 this program once ended with a segmentation fault in a fused loop of XLA (jax
0.10.2).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Sampling, Scores, trees
from specjax.drafters import DraftModel

VOCAB, ROWS = 16, 32


@dataclasses.dataclass(frozen=True)
class Table(specjax.Target):
    """Logits depend on the last two tokens and on whether the position is even."""

    vocab_size: int = VOCAB

    def init(self, params, batch, capacity, inputs=None):
        return jnp.zeros((batch, capacity), jnp.int32)

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        tokens = draft.tokens
        parents = jnp.broadcast_to(trees.parents(draft), tokens.shape)
        start = draft.start[:, None]
        before = jnp.take_along_axis(cache, jnp.maximum(start - 1, 0), axis=1)
        before = jnp.where(start > 0, before, 0)
        above = jnp.take_along_axis(tokens, jnp.maximum(parents, 0), axis=1)
        above = jnp.where(parents < 0, before, above)
        scores = params[(start + trees.depths(draft)) % 2, above, tokens]
        if entries is not None:
            tokens = jnp.concatenate([entries, tokens[:, since:]], axis=1)
        return Scores(logits=scores[:, since:], features=None, entries=tokens)

    def commit(self, cache, entries, start, verdict):
        kept = jnp.take_along_axis(entries, verdict.path, axis=1)
        step = jnp.arange(verdict.path.shape[1])
        where = start[:, None] + step
        where = jnp.where((step <= verdict.count[:, None]) & (where >= 0), where, cache.shape[1])
        return cache.at[jnp.arange(len(cache))[:, None], where].set(kept, mode="drop")


def main() -> None:
    table = np.random.default_rng(0).normal(size=(2, VOCAB, VOCAB, VOCAB)).astype(np.float32)
    out = specjax.decode(
        Table(),
        DraftModel(topology=trees.chain(1), model=Table(), sibling_sampling="iid"),
        {"target": jnp.asarray(table), "drafter": jnp.asarray(-table)},
        np.tile([3, 7], (ROWS, 1)),
        np.full(ROWS, 2),
        key=jax.random.key(0),
        max_new_tokens=1,
        sampling=Sampling(temperature=1.0),
        rule="rejection",
    )
    assert (np.asarray(out.lengths) == 3).all()
    print("decoded", ROWS, "rows")


if __name__ == "__main__":
    main()
