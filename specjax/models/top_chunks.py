"""Top chunks for drafting: between the sinks and the window, the entries that a query wants most.

    score of chunk c = q . (mean of the keys of c),   q: the sum over a head's group of queries

The text between the first ``sinks`` tokens and the last ``window`` tokens is cut into chunks. Every
few rounds each layer and key/value head chooses the chunks with the greatest scores, by the
model's own queries of the last committed token, as many as fit into ``budget`` tokens. Until the
next choice a drafted token sees sinks, chosen chunks and window. A text that is no longer than the
three together is seen whole. The model is the target (``SelfDraft``) or a draft model
(``SparseDraftModel``).

The queries need no pass: they follow from the hidden states that the model's last pass gave. A
choice reads the keys of the whole text once, so its cost grows with the text; what is drafted
between two choices does not.

Differs from TriForce, which chooses once by the last token of the prompt, for heads that share no
keys, and later overwrites the chunks of least score by what was generated; here the window holds
what was generated, and the choice is made anew. The first chunk, which it always keeps, is the
sinks.

References: Sun et al., TriForce, arXiv 2404.11912, section 4.1 (retrieval of chunks by mean keys);
Chen et al., MagicDec, arXiv 2408.11049 (the target drafts over a small cache of its own).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..types import PyTree
from .chosen_entries import ChosenEntries, check_sizes, queries
from .config import DecoderConfig
from .low_bits import decoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopChunks(ChosenEntries):
    """How many tokens are chosen, and how often.

    Attributes:
      budget: tokens of the chosen chunks, a multiple of ``chunk``.
      chunk: tokens of a chunk.
      every: the number of rounds from one choice to the next.

    Raises:
      ValueError: a number is none of tokens or rounds, or chunks do not fill the budget.
    """

    budget: int
    chunk: int = 8
    every: int = 8

    def __post_init__(self):
        check_sizes(self, ("budget", "chunk", "every"))
        if self.budget % self.chunk:
            raise ValueError(
                f"budget={self.budget}, chunk={self.chunk}: whole chunks are chosen; give a budget "
                f"that is a multiple of {self.chunk}"
            )

    @property
    def count(self) -> int:
        """The number of chosen chunks."""
        return self.budget // self.chunk

    @property
    def num_queries(self) -> int:
        return 1

    def choose(self, config, params, cache, states, last, begin, length, layers):
        return choose(config, params, cache, states[:, -1], length, self, layers, last)


def choose(
    config: DecoderConfig,
    params: PyTree,
    cache: PyTree,
    states: jax.Array,
    length: jax.Array,
    chunks: TopChunks,
    layers: tuple[int, ...],
    last: jax.Array | None = None,
) -> jax.Array:
    """Chooses chunks.

    Args:
      config: of the decoder with a small cache, among whose sinks those of the budget are counted.
      params: its weights.
      cache: of the target, with the entries of all tokens.
      states: ``[B, F]``, the inputs of ``layers`` at the token whose queries choose, side by side.
      length: int32 ``[B]``, the number of entries in the cache. Where sinks, budget and window hold
        them all, the choice is arbitrary.
      chunks: how many.
      layers: those that choose.
      last: int32 ``[B]``, the position of the token whose queries choose; None: it is the last one
        in the cache.

    Returns:
      int32 ``[B, layers, K, budget]``, the positions of the tokens chosen.
    """
    sinks, window = config.sinks - chunks.budget, config.cache_window or 0
    within, chosen = jnp.arange(chunks.chunk, dtype=jnp.int32), []
    where = (length - 1 if last is None else last)[:, None]
    asked = queries(config, params, states[:, None], where, layers)
    for i, query in zip(layers, asked, strict=True):
        query = jnp.sum(query[..., 0].astype(jnp.float32), axis=3)
        keys = decoded(config.cache_bits, cache[i], jnp.float32)[0]
        count = max((keys.shape[2] - sinks) // chunks.chunk, chunks.count)
        some = keys[:, :, sinks : sinks + count * chunks.chunk]
        score = jnp.einsum("bke,bkse->bks", query, some.astype(jnp.float32))
        score = jnp.pad(score, ((0, 0), (0, 0), (0, count * chunks.chunk - score.shape[2])))
        score = jnp.mean(score.reshape(*score.shape[:2], count, chunks.chunk), axis=3)
        end = sinks + chunks.chunk * (1 + jnp.arange(count))
        score = jnp.where((end <= length[:, None] - window)[:, None], score, -jnp.inf)
        _, best = jax.lax.top_k(score, chunks.count)
        positions = sinks + best[..., None] * chunks.chunk + within
        chosen.append(positions.reshape(*positions.shape[:2], chunks.budget).astype(jnp.int32))
    return jnp.stack(chosen, axis=1)
