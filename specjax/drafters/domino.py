"""Domino: a block drafter whose logits are corrected by a recurrent state of the tokens before.

    r, z, m = the thirds of  A e(x_k),    r', z', m' = those of  B s_{k-1}
    s_k = (1 - u) tanh(m + v * m') + u s_{k-1},   v = sigmoid(r + r'),  u = sigmoid(z + z')
    logits of the k-th drafted token = head(h_k) + W2 silu(W1 [h_k; s_{k-1}])      for k > P

``e`` are the target's embeddings, ``x_0`` is the root, ``s`` a gated recurrent unit (GRU) that is
zero before the root, and ``h_k`` the states of a block (``block.py``). The first P tokens are drawn
from the law of the block alone. The layers run once a round; then tokens are drawn depth by depth,
each from a law that is given all tokens before it, and which is the law that the draft states.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    heads = specjax.load_drafter("Huang2020/Qwen3-8B-Domino-b16", lm)
    specjax.generate(lm, "...", drafter=heads)

Differs from the authors' code: theirs drafts the argmax alone and computes the recurrence and the
correction of all places anew for each token; here each token is one step of both, trees are drafted
too, and tokens are drawn at any temperature.

References: Domino, arXiv 2605.29707; github.com/sgl-project/SpecForge (``DominoDraftModel``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..models.layers import Linear, product
from .block import BlockConfig, BlockLayers
from .corrected import CorrectedBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """The shape of a Domino drafter.

    Attributes:
      gru_size: the numbers of the recurrent state.
      rank: of the correction, the numbers between W1 and W2.
      prefix: P, how many of the first tokens are drafted without a correction.
    """

    from_root: bool = True
    gru_size: int = 1024
    rank: int = 256
    prefix: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name in ("gru_size", "rank"):
            if vars(self)[name] < 1:
                raise ValueError(f"{name}={vars(self)[name]}: it must be at least 1")
        if not 0 <= self.prefix < self.num_heads:
            raise ValueError(
                f"prefix={self.prefix}: a block of {self.num_heads} drafted tokens has 0 to "
                f"{self.num_heads - 1} without a correction"
            )


class DominoLayers(BlockLayers):
    """The weights of a Domino drafter: those of a block drafter, of the GRU and the correction."""

    def __init__(self, config: DominoConfig, *, rngs, param_dtype=jnp.float32):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        size, state, rank = config.hidden_size, config.gru_size, config.rank
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        self.memory_size = state
        self.read = Linear(size, 3 * state, **common)
        self.recall = Linear(state, 3 * state, **common)
        self.down = Linear(size + state, rank, **common)
        self.lm_head = Linear(rank, config.vocab_size, scale=0.02, **common)

    def remember(self, memory: jax.Array, embedded: jax.Array) -> jax.Array:
        """The state ``[S, M]`` after tokens with the embeddings ``[H, M]``."""
        new, old = (jnp.split(x, 3) for x in (self.read(embedded), self.recall(memory)))
        reset, keep = (jax.nn.sigmoid(new[i] + old[i]) for i in (0, 1))
        return (1 - keep) * jnp.tanh(new[2] + reset * old[2]) + keep * memory

    def latent(self, hidden: jax.Array, memory: jax.Array) -> jax.Array:
        """``[R, M]`` of the states ``[H, M]`` of places and of what is remembered there."""
        return jax.nn.silu(self.down(jnp.concatenate([hidden, memory.astype(hidden.dtype)])))

    def say(self, latent: jax.Array) -> jax.Array:
        """What is added to the logits of a place, float32 ``[M, V]``."""
        return product(self.lm_head.weight[...], latent, transpose_out=True).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Domino(CorrectedBlock):
    """Drafts with Domino; ``params["drafter"]`` holds the weights of ``DominoLayers``."""

    module = DominoLayers
    name = "domino"
    can_draw_from_part = False
    whole_block = True  # as in the authors' code

    def step(self, heads, target_params, memory, tokens, hidden, depth):
        memory = heads.remember(memory, self.target.embed(target_params, tokens))
        latent = heads.latent(hidden, memory) if depth >= self.config.prefix else None
        return latent, memory, None
