"""Block drafters whose logits are corrected by the tokens that were drafted before.

    logits of the k-th drafted token = head(h_k) + say(z_k),
    z_k, s_k = step(s_{k-1}, x_{k-1}, h_k)

``h_k`` are the states of a block (``block.py``), ``x_0`` is the root, ``s`` what is remembered of
the tokens along a path, and ``say`` a thin product over the vocabulary. The layers run once a
round; then tokens are drawn depth by depth, each from a law that is given the tokens before it, and
which is the law that the draft states. ``CorrectedBlock`` is the base class of ``dspark.py``,
``domino.py`` and ``xpress.py``, which each bring their own ``step``.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..trees.levels import depth_of
from .block import BlockDrafter


@pytree_dataclass
class Drawing:
    """What is known while tokens are drawn.

    Attributes:
      hidden: ``[H, B, D]``, what ``step`` reads of the places.
      base: float32 ``[B, D, V]``, logits of the places without a correction (``[B, D, Vd]`` over a
        draft vocabulary).
      memory: ``[B, M, S]``, after each of the M nodes; before the root was looked at ``[B, 1, S]``,
        what is remembered before it.
      chances: float32 ``[B, M]``, logits of the chances of what is below each of them; 0 where the
        drafter estimates none.
    """

    hidden: jax.Array
    base: jax.Array
    memory: jax.Array
    chances: jax.Array


@dataclasses.dataclass(frozen=True)
class CorrectedBlock(BlockDrafter, abc.ABC):
    """Drafts with a block whose logits each path corrects; its ``module`` has ``say(latent)``,
    float32 ``[M, V]``, and ``memory_size``."""

    @abc.abstractmethod
    def step(self, heads, target_params, memory, tokens, hidden, depth: int) -> tuple:
        """The correction below some nodes of one depth.

        Args:
          heads: the module with its weights.
          target_params: the weights of the target.
          memory: ``[S, B * W]``, what their parents left.
          tokens: int32 ``[B, W]``, of the nodes.
          hidden: ``[H, B * W]``, of the place that is drafted below them.
          depth: of the nodes; the root has 0.

        Returns:
          what ``say`` turns into logits, ``[.., B * W]``, or None: no correction; the memory that
          the nodes leave ``[S, B * W]``; and the logit of the chance of what is below them, float32
          ``[B * W]``, or None.
        """

    def begin(self, heads: Any, target_params, state, context) -> Drawing:
        """One pass of the layers; nothing is remembered yet."""
        hidden, base = self.read_places(heads, target_params, state, context)
        return Drawing(
            hidden=hidden,
            base=base,
            memory=jnp.zeros((len(base), 1, heads.memory_size), hidden.dtype),
            chances=jnp.zeros((len(base), 0), jnp.float32),
        )

    def make_level(self, params, target_params, state, context):
        heads = self.heads(params)

        def level(carry, grown, since):
            known = carry if since else self.begin(heads, target_params, state, context)
            depth, tokens = depth_of(grown, since), grown.tokens[:, since:]
            batch, wide = tokens.shape
            before = known.memory
            if since:
                above = jnp.broadcast_to(trees.parents(grown)[:, since:], tokens.shape)
                before = jnp.take_along_axis(known.memory, above[:, :, None], axis=1)
            latent, memory, chance = self.step(
                heads,
                target_params,
                before.reshape(batch * wide, -1).T,
                tokens,
                jnp.repeat(known.hidden[:, :, depth], wide, axis=1),
                depth,
            )
            logits = known.base[:, depth, None]
            logits = jnp.broadcast_to(logits, (batch, wide, logits.shape[2]))
            if latent is not None:
                logits += heads.say(latent).reshape(batch, wide, -1)
            memory = memory.T.reshape(batch, wide, -1).astype(known.memory.dtype)
            chance = jnp.zeros(tokens.shape) if chance is None else chance.reshape(batch, wide)
            return logits, dataclasses.replace(
                known,
                memory=jnp.concatenate([known.memory, memory], axis=1) if since else memory,
                chances=jnp.concatenate([known.chances, chance], axis=1),
            )

        return level, ()
