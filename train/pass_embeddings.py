"""Recipe ``pass_embeddings``: PaSS's look-ahead vectors, with the whole target frozen.

    loss = mean over anchors a, weighted, of  -log p(token a + k | text before a, v_1 ... v_k),
    k = 1 ... K,  the weight of k being exp(-(k - 1) / decay_length)

An anchor is a token in the place of a round's root; ``v_1`` stands in that place, after the last
token that the target has read. The text itself is read once and without a gradient, since no token
sees a vector: activations are kept only at the vectors, of all layers. ``teacher_share`` works as
for other heads: the loss is against the target's own law after the true tokens.

References: PaSS, 2311.13581.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters.pass_embeddings import PaSS, PaSSConfig
from specjax.models.causal_lm import graph_definition

from . import block, frozen
from .rows import Heads, fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSTrainingConfig(block.AnchorConfig):
    """The number of vectors."""

    num_heads: int = 3  # the vectors, each of which drafts a token


Config = PaSSTrainingConfig


def make_pass(config: PaSSTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes vectors near the mean of the embeddings, as a setting's target reads them.

    Their ``outputs`` take anchors as a further argument, see ``states_of``.
    """
    target, params = setting.lm.target, setting.lm.params
    drafter = PaSS(config=PaSSConfig(**setting.sizes, num_heads=config.num_heads), target=target)
    every = jnp.arange(target.vocab_size, dtype=jnp.int32)[None]
    mean = jnp.mean(target.embed(params, every).astype(jnp.float32), axis=1)
    if target.config.scale_embeddings:  # a vector is read as it is, an embedding times this
        mean = mean * target.hidden_size**0.5
    start = jax.tree.map(lambda x: x + mean, fresh(drafter, config.run.seed))

    def outputs(params, target_params, rows, anchors):
        states = states_of(drafter, params, target_params, rows, anchors)
        return [(target.head_table(target_params), None, state) for state in states]

    return Heads(drafter, start, outputs)


def states_of(drafter: PaSS, params, target_params, rows, anchors) -> list[jax.Array]:
    """Returns the target's last hidden states ``[H, B * A]`` at each vector.

    Args:
      drafter: with K vectors.
      params, target_params: the vectors, and the weights of the target.
      rows: of T positions.
      anchors: int32 ``[B, A]``; the first vector stands in the place of each.
    """
    (batch, count), size = anchors.shape, drafter.config.num_heads
    model = nnx.merge(graph_definition(drafter.target.config), target_params)
    length = rows.hidden.shape[1]
    positions, sees = block.places_of(rows, anchors, size)
    text, causal = positions[:, :length], jnp.triu(jnp.ones((length, length), bool))
    own = rows.segments[:, :length]
    known = causal & (own[:, :, None] == own[:, None, :])
    _, _, entries = model.hidden(rows.tokens[:, :length], text, known, causal=True)
    here = positions[:, length:]
    hidden, _, _ = model.hidden(
        jnp.zeros_like(here),
        positions,
        sees & (positions[:, :, None] <= here[:, None, :]),
        earlier=jax.lax.stop_gradient(entries),
        vectors=(drafter.heads(params).embeddings[...], jnp.tile(jnp.arange(size), count)[None]),
    )
    states = hidden.reshape(-1, batch, count, size)
    return [states[..., k].reshape(len(states), -1) for k in range(size)]


def run(config: PaSSTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    block.run_blocks(config, make_pass, dry_run=dry_run)
