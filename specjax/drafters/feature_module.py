"""The weights of a head that reads the target's features and then its own output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.decoder import run_blocks
from ..models.layers import columns, product


class FeatureModule(nnx.Module):
    """The weights of a head that goes on with its own output: the base of EAGLE's and MTP's.

    Drafting and training both go through these steps, over feature-major columns ``[size, M]``::

        hidden = module.read(features)              # where the target's features are known
        x = module.enter(embedded, hidden, stage)   # embedded: the tokens that follow
        out, entries = module.run(x, positions, own_mask, batch=batch, stage=stage, ...)
        logits = module.logits(out, batch, target, params, stage)
        hidden = module.passed(out, stage)          # at the next token, in place of ``read``

    A head may have several *stages*: layers with weights and a cache of their own for each step, so
    that the k-th step after the target's features belongs to stage k. One stage serves all steps.
    A subclass must set ``layer`` and ``blocks`` and implement ``enter`` and ``logits``.

    Attributes:
      layer: the shape of a stage's layers.
      blocks: those layers, ``nnx.List``.
      embedding: a table of embeddings ``[V, E]`` of its own; None: that of the target.
      vocab: int32 ``[Vd]``, the target's id of each token of a draft vocabulary; None: the draft
        vocabulary is that of the target.
    """

    layer: DecoderConfig
    blocks: nnx.List
    embedding = None
    vocab = None

    def embed(self, tokens: jax.Array, target, params) -> jax.Array:
        """The embeddings ``[E, B * N]`` of ``tokens`` int32 ``[B, N]``; ``params``: the weights of
        the target."""
        if self.embedding is None:
            return target.embed(params, tokens)
        return columns(self.embedding[...], tokens)

    def read(self, features: jax.Array) -> jax.Array:
        """Converts the target's features ``[F, M]`` to what the first stage reads, ``[H, M]``."""
        return features

    def enter(self, embedded: jax.Array, hidden: jax.Array, stage: int = 0) -> jax.Array:
        """Combines embeddings ``[E, M]`` and hidden states ``[H, M]`` to the input of a stage."""
        raise NotImplementedError(
            f"{type(self).__name__} must write enter(embedded, hidden, stage): it combines the "
            "embeddings [E, M] of the tokens with the hidden states [H, M] to the input [H, M] of "
            "a stage"
        )

    def stage_blocks(self, stage: int):
        """The layers of a stage."""
        return self.blocks

    def run(self, x, positions, own_mask, *, batch, stage: int = 0, **settings):
        """Runs the layers of a stage; arguments as ``decoder.run_blocks`` (training gives an
        ``attend`` of its own).

        Returns:
          ``(out [H, M], entries)``; the entries, keys and values, are per layer.
        """
        blocks = self.stage_blocks(stage)
        seen, entries = run_blocks(
            self.layer, blocks, x, positions, own_mask, batch=batch, **settings
        )
        return seen[-1], entries

    def passed(self, out: jax.Array, stage: int = 0) -> jax.Array:
        """Returns ``hidden`` of the next step from this step's output ``[H, M]``."""
        return out

    def logits(self, out: jax.Array, batch: int, target, params, stage: int = 0) -> jax.Array:
        """Logits float32 ``[B, N, V]`` of outputs ``[H, B * N]``; over the draft vocabulary where
        there is one."""
        raise NotImplementedError(
            f"{type(self).__name__} must write logits(out, batch, target, params, stage): it "
            "returns the float32 logits [B, N, V] of the outputs [H, B * N] of a stage"
        )


def logits_of(linear, x: jax.Array, batch: int) -> jax.Array:
    """Logits float32 ``[B, N, V]`` by an LM head of the drafter, of states ``[H, B * N]``."""
    logits = product(linear.weight[...], x, transpose_out=True)
    if linear.bias is not None:
        logits = logits + linear.bias[...]
    return logits.astype(jnp.float32).reshape(batch, -1, logits.shape[-1])
