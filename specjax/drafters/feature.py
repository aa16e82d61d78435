"""Drafting with a few layers of one's own that read the target's features: EAGLE, MTP modules.

What such a head reads are *pairs*: pair ``i`` is the target's feature of token ``i`` with token
``i + 1``, and says token ``i + 2``. Its position, for rotary embedding and in the head's own cache,
is ``i``. Below a drafted token there is no feature of the target; the head's own output at the pair
before stands for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.decoder import run_blocks
from ..models.layers import product


class FeatureModule(nnx.Module):
    """What drafting and training ask of a head, columns being feature-major ``[features, M]``.

    One step over columns, in both::

        hidden = module.read(features)              # of the target, where they are known
        x = module.enter(embedded, hidden, stage)   # embedded: of the tokens behind
        out, entries = module.run(x, positions, own_mask, batch=batch, stage=stage, ...)
        logits = module.logits(out, batch, target, params, stage)
        hidden = module.passed(out, stage)          # of the next token, in place of ``read``

    A head may have several *stages*, layers with other weights (and a cache of their own) for each
    step: step ``k`` below the target's features is stage ``k``'s. One stage serves all steps.

    A subclass sets ``layer`` (the shape of a stage's layers), ``blocks`` (those layers),
    ``embedding`` (its own table, or None: the target's), and says the rest.
    """

    num_stages = 1
    layer: DecoderConfig
    embedding = None

    def embed(self, tokens: jax.Array, target, params) -> jax.Array:
        """``[E, B * N]`` of ``tokens`` int32 ``[B, N]``; ``params``: the target's weights."""
        if self.embedding is None:
            return target.embed(params, tokens)
        return self.embedding[...][tokens.reshape(-1)].T

    def read(self, features: jax.Array) -> jax.Array:
        """``[F, M] -> [H, M]``: the target's features as the first stage takes them."""
        return features

    def enter(self, embedded: jax.Array, hidden: jax.Array, stage: int = 0) -> jax.Array:
        """``[E, M], [H, M] ->`` what the first layer of a stage reads."""
        raise NotImplementedError

    def stage_blocks(self, stage: int):
        """The layers of a stage."""
        return self.blocks

    def run(self, x, positions, own_mask, *, batch, stage: int = 0, **settings):
        """A stage's layers over columns; arguments as ``decoder.run_blocks``, whose ``attend`` is
        what training may bring.

        Returns:
          ``(out [H, M], entries)``, the entries per layer.
        """
        blocks = self.stage_blocks(stage)
        seen, entries = run_blocks(
            self.layer, blocks, x, positions, own_mask, batch=batch, **settings
        )
        return seen[-1], entries

    def passed(self, out: jax.Array, stage: int = 0) -> jax.Array:
        """What the next step takes for ``hidden``."""
        return out

    def logits(self, out: jax.Array, batch: int, target, params, stage: int = 0) -> jax.Array:
        """float32 ``[B, N, V]``, over the draft vocabulary where there is one."""
        raise NotImplementedError


def logits_of(linear, x: jax.Array, batch: int) -> jax.Array:
    """float32 ``[B, N, V]`` of an LM head of one's own, for normed states ``[H, B * N]``."""
    logits = product(linear.weight[...], x, turned=True)
    if linear.bias is not None:
        logits = logits + linear.bias[...]
    return logits.astype(jnp.float32).reshape(batch, -1, logits.shape[-1])
