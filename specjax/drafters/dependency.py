"""What the depths of a parallel head read of the token that was drafted before them.

    s_1 = h_1
    s_k = h_k + D (silu(g) * u),   [g; u] = A [norm(e(x_{k-1})); h_k; s_{k-1}]     for k > 1
    logits of the k-th drafted token = lm_head s_k

``h_k`` is the normed state of a depth, which one pass of the head's layers makes for all depths at
once, ``e`` the embeddings that the head reads (its own or the target's), and ``x_{k-1}`` the token
drafted before. Where a depth reads nothing of the draft, it must guess that token before it can
guess its own. With this layer a depth costs two thin products and the LM head, which is otherwise
read once for all depths; a decoder layer would cost a pass.

In Domino a gated recurrent unit carries the tokens before, and a second table adds to the logits.
Here the state itself is carried, and the correction is added before the LM head, so that no second
table over the vocabulary is read. Clover gives parallel heads the tokens before by an attention.

References: none for this layer, which follows Domino, arXiv 2605.29707, and Clover, 2405.00263.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.layers import Linear, Norm, swiglu_linear


class Dependency(nnx.Module):
    """The weights of that layer, feature-major: ``[.., M]`` has a column for each node.

    Args:
      layer: the shape of the head's layers, ``hidden_size`` H wide.
      embedding_size: E, the width of the embeddings that are read.
      size: R, the rows of each half of A.
    """

    def __init__(
        self, layer: DecoderConfig, embedding_size: int, size: int, *, rngs, param_dtype=jnp.float32
    ):
        common = dict(rngs=rngs, param_dtype=param_dtype)
        read = embedding_size + 2 * layer.hidden_size
        self.norm = Norm(embedding_size, layer, param_dtype=param_dtype)
        self.gate, self.up = Linear(read, size, **common), Linear(read, size, **common)
        self.down = Linear(size, layer.hidden_size, scale=0.1, **common)

    def __call__(self, embedded: jax.Array, hidden: jax.Array, before: jax.Array) -> jax.Array:
        """``s_k``, ``[H, M]``.

        Args:
          embedded: ``[E, M]``, of the tokens drafted before.
          hidden: ``[H, M]``, h of this depth.
          before: ``[H, M]``, s of the depth before.
        """
        read = [self.norm(embedded.astype(hidden.dtype)), hidden, before]
        made = swiglu_linear(jnp.concatenate(read, axis=0), self.gate, self.up)
        return hidden + self.down(made)
