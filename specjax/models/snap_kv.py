"""SnapKV for drafting: between the sinks and the window, what the end of the prompt looked at.

    score of token j = sum over the last ``observe`` tokens i of the prompt and the queries of a
                       group:  softmax over j <= i of  q_i . k_j / sqrt(E)

Each layer and key/value head averages the scores over ``pool`` neighbours, so that a token brings
its neighbourhood with it, and chooses the ``budget`` tokens with the greatest averages among those
between sinks and window. It chooses once: in the first round whose text is longer than sinks,
budget and window, by the queries of the prompt's end, which follow from hidden states that the
model's pass over the prompt gave. A further prompt in the same text, as in a chat, chooses anew,
by its own queries alone where it is shorter than ``observe``.

A choice reads the keys of the whole text once; nothing that is drafted afterwards depends on its
length.

Differs from MagicDec, whose draft cache also keeps everything that was generated (here the window
moves on with the text), scores without the root of the head's size (here as SnapKV does, with it)
and has no sinks; in both ``observe`` is the window, here they are two numbers. The average ends
where the window begins, as theirs does, and begins where the sinks end, since sinks, which draw
much attention, would lift their neighbours.

References: Li et al., SnapKV, arXiv 2404.14469, section 4; Chen et al., MagicDec, arXiv 2408.11049,
section 4 (as the cache of a draft).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .chosen_entries import NEVER, ChosenEntries, check_sizes, queries
from .layers import softcap
from .low_bits import decoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(ChosenEntries):
    """How many tokens of the prompt are chosen, and by what.

    Attributes:
      budget: tokens that each layer and key/value head chooses.
      observe: tokens at the end of the prompt whose queries choose.
      pool: neighbours over which scores are averaged, an odd number.

    Raises:
      ValueError: a number is none of tokens, or ``pool`` is even.
    """

    budget: int
    observe: int = 32
    pool: int = 5

    every = NEVER

    def __post_init__(self):
        check_sizes(self, ("budget", "observe", "pool"))
        if self.pool % 2 == 0:
            raise ValueError(
                f"pool={self.pool}: a token stands in the middle of its neighbours; give an odd "
                f"number such as {self.pool + 1}"
            )

    @property
    def num_queries(self) -> int:
        return self.observe

    def choose(self, config, params, cache, states, last, begin, length, layers):
        first, window = config.sinks - self.budget, config.cache_window or 0
        where = last[:, None] + jnp.arange(1 - self.observe, 1, dtype=jnp.int32)
        chosen = []
        for i, query in zip(layers, queries(config, params, states, where, layers), strict=True):
            keys = decoded(config.cache_bits, cache[i], jnp.float32)[0]
            slot = jnp.arange(keys.shape[2], dtype=jnp.int32)
            said = jnp.einsum(
                "bkego,bkse->bkgos", query.astype(jnp.float32), keys.astype(jnp.float32)
            )
            said = softcap(said * config.head_dim**-0.5, config.score_softcap)
            sees = (slot <= where[..., None]) & (slot < length[:, None, None])
            sees = (sees & (where >= begin[:, None])[..., None])[:, None, None]
            shares = jax.nn.softmax(jnp.where(sees, said, -jnp.inf), axis=-1)
            score = jnp.sum(jnp.where(sees, shares, 0.0), axis=(2, 3))  # [B, K, S]
            between = ((slot >= first) & (slot < length[:, None] - window))[:, None]
            score = _pooled(jnp.where(between, score, 0.0), self.pool)
            score = jnp.where(between, score, -jnp.inf)
            lacking = max(self.budget - score.shape[2], 0)
            score = jnp.pad(score, ((0, 0), (0, 0), (0, lacking)), constant_values=-jnp.inf)
            chosen.append(jax.lax.top_k(score, self.budget)[1].astype(jnp.int32))
        return jnp.stack(chosen, axis=1)


def _pooled(scores: jax.Array, size: int) -> jax.Array:
    """Sums over ``size`` neighbours, ``[B, K, S]``; beyond both ends there is nothing."""
    half, count = size // 2, scores.shape[2]
    wide = jnp.pad(scores, ((0, 0), (0, 0), (half, half)))
    return jnp.sum(jnp.stack([wide[:, :, i : i + count] for i in range(size)]), axis=0)
