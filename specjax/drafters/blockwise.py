"""Blockwise parallel decoding: one hidden layer on the target's state, read once for each offset.

    s = ReLU(A h + a),      h_k = h + B_k s + b_k,      logits_k = U h_k,      k = 1 ... K

``h`` is the hidden state of the token before the root and ``U`` the target's LM head: offset k
predicts the k-th token after the root. The pass that verifies a draft also yields the hidden state
for the next one (the paper's merged scheme, its section 4: one call of the model a round).

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``. (The paper's other criteria, top-k, distance and minimum block size, are
approximate and not here.)

Example::

    config = BlockwiseConfig(hidden_size=512, vocab_size=32000, num_heads=4)
    drafter = Blockwise(config=config, target=lm.target)

Differs from the paper, where the next token's own prediction goes through the layer too (the target
is trained with it); here it is that of the unchanged target.

References: Stern et al., Blockwise Parallel Decoding for Deep Autoregressive Models,
arXiv 1811.03115.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.layers import Linear
from .heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseConfig:
    """The shape of blockwise heads.

    Attributes:
      hidden_size: H, that of the target.
      vocab_size: V, that of the target.
      num_heads: K, the number of offsets.
      trunk_size: width of the hidden layer ``s``, which all offsets share; None: K times H.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    trunk_size: int | None = None

    def __post_init__(self):
        if self.trunk_size is None:
            object.__setattr__(self, "trunk_size", self.num_heads * self.hidden_size)
        for name in ("hidden_size", "vocab_size", "num_heads", "trunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")


class BlockwiseHeads(nnx.Module):
    """The weights: one product into the trunk, one out of it for all offsets."""

    def __init__(self, config: BlockwiseConfig, *, rngs, param_dtype=jnp.float32):
        self.config = config
        common = dict(bias=True, rngs=rngs, param_dtype=param_dtype)
        size, heads = config.hidden_size, config.num_heads
        self.trunk = Linear(size, config.trunk_size, **common)
        self.offsets = Linear(config.trunk_size, heads * size, scale=0.0, **common)

    def states(self, x: jax.Array) -> jax.Array:
        """``h_k`` of each offset, ``[K, H, M]``, for hidden states ``x`` ``[H, M]``."""
        return x + self.offsets(jax.nn.relu(self.trunk(x))).reshape(-1, *x.shape)

    def logits(self, hidden: jax.Array, target, params) -> jax.Array:
        """The logits of all offsets; T is 1 while drafting.

        Args:
          hidden: ``[B, T, H]``, the target's last hidden state, normed.
          target: the target, whose LM head is used.
          params: the weights of the target.

        Returns:
          float32 ``[B, T, K, V]``: at position t, offset k (from 0) predicts token t + 2 + k.
        """
        batch, steps, size = hidden.shape
        states = self.states(hidden.reshape(-1, size).T)
        columns = states.transpose(1, 2, 0).reshape(size, -1)  # [H, B * T * K]
        logits = target.head(params, columns, batch)
        return logits.reshape(batch, steps, self.config.num_heads, -1)


@dataclasses.dataclass(frozen=True)
class Blockwise(HeadDrafter):
    """Drafts with blockwise heads, all of which are evaluated at once, at the root.

    ``params["drafter"]`` holds the weights of ``BlockwiseHeads``. ``target``: the target whose
    hidden state is read, and whose LM head is shared.
    """

    module = BlockwiseHeads
    name = "blockwise"
    reads_last = True

    def make_level(self, params, target_params, state, context):
        heads, hidden = self.heads(params), state.feature[:, None]
        return independent_level(lambda: heads.logits(hidden, self.target, target_params)[:, 0])
