"""The Markov head of DSpark: what the token before adds to the logits of a place in a block.

    vanilla   z = W1[x]
    gated     z = sigmoid(G [h; W1[x]] + g) * W1[x]
    rnn       (a, c, o) = J [s; W1[x]; h] + j
              s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(c),      z = tanh(o)

    logits = head(h) + W2 z

``x`` is the token that was drafted before, ``h`` the normed state of the place, and ``s`` what is
remembered of earlier places, zeros at first. W1 and W2 are tables ``[V, R]`` of a low rank R, so
that a place costs one thin product over the vocabulary, and all layers still run once a round.

References: DSpark, arXiv 2607.05147; github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .._internal.optional import required
from ..models.layers import Linear, columns, product

Kind = Literal["vanilla", "gated", "rnn"]
KINDS: tuple[Kind, ...] = ("vanilla", "gated", "rnn")


class MarkovHead(nnx.Module):
    """The weights of a Markov head, feature-major: ``[.., M]`` has a column for each drafted token.

    Args:
      kind: ``"vanilla"``, ``"gated"`` or ``"rnn"``.
      rank: R.
      hidden_size: H, that of the states of a block.
      vocab_size: V.
      num_words: rows of W2, where only a part of the vocabulary can be drafted; None: V.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        rank: int,
        hidden_size: int,
        vocab_size: int,
        num_words: int | None = None,
        rngs: nnx.Rngs,
        param_dtype=jnp.float32,
    ):
        self.kind, self.rank = kind, rank
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        values = jax.random.normal(rngs.params(), (vocab_size, rank)) * 0.02
        self.embedding = nnx.Param(values.astype(param_dtype))
        self.lm_head = Linear(rank, num_words or vocab_size, scale=0.02, **common)
        sizes = {"gated": (hidden_size + rank, rank), "rnn": (2 * rank + hidden_size, 3 * rank)}
        self.mix = Linear(*sizes[kind], bias=True, **common) if kind in sizes else None

    @property
    def memory_size(self) -> int:
        """The numbers that are remembered of a token: R of the recurrent kind, else 0."""
        return self.rank if self.kind == "rnn" else 0

    def embed(self, tokens: jax.Array) -> jax.Array:
        """``W1[x]``, ``[R, M]``, of ``tokens`` int32 ``[M]``."""
        return columns(self.embedding[...], tokens)

    def step(self, memory, embedded, hidden) -> tuple[jax.Array, jax.Array]:
        """The latent ``z`` of a place.

        Args:
          memory: ``[memory_size, M]``, s.
          embedded: ``[R, M]``, of the tokens before.
          hidden: ``[H, M]``, the states of the place.

        Returns:
          ``[R, M]``, and the memory after this place.
        """
        latent = embedded
        if self.kind == "gated":
            mixed = required(self.mix, "mix")(jnp.concatenate([hidden, embedded], axis=0))
            latent = jax.nn.sigmoid(mixed) * embedded
        elif self.kind == "rnn":
            mixed = required(self.mix, "mix")(jnp.concatenate([memory, embedded, hidden], axis=0))
            keep, fresh, said = jnp.split(mixed, 3, axis=0)
            keep = jax.nn.sigmoid(keep)
            memory = keep * memory + (1 - keep) * jnp.tanh(fresh)
            latent = jnp.tanh(said)
        return latent, memory

    def say(self, latent: jax.Array) -> jax.Array:
        """``W2 z``, float32 ``[M, V]``, which is added to the logits of a place."""
        return product(self.lm_head.weight[...], latent, transpose_out=True).astype(jnp.float32)
