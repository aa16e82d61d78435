"""What corrects the logits of the places of a block: one function for each kind of ``block_heads``.

Each returns the memory before the first place, and ``latents_at(memory, k, before) -> (latents,
memory)``, which takes the tokens ``before`` the k-th place that drafts, int32 ``[B, A]``, and
returns what W2 reads there, each ``[R, B * A]``. Among the arguments are

    rows, anchors   the text, and int32 ``[B, A]``
    blocks          ``[H, B, A, size]``, the normed states of all places
    table           ``[V, H + R ...]``, the LM head and W2 side by side
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import block, chunks


def second_table(heads, kind: str) -> jax.Array:
    """W2 ``[V, R]``, which turns what corrects a place into logits."""
    if kind == "dflash2":
        return heads.selector.successors[...]
    return (heads.refiner.lm_head if kind == "xpress" else heads.lm_head).weight[...]


def dflash2_latents(config, heads, target, target_params, rows, anchors, blocks, table):
    """A place is corrected by the token before it."""
    states = blocks.reshape(len(blocks), -1, blocks.shape[3])

    def latents_at(memory, k, before):
        return [heads.selector.latent(before.reshape(-1), states[..., k + 1])], memory

    return None, latents_at


def domino_latents(config, heads, target, target_params, rows, anchors, blocks, table):
    """A place is corrected by all tokens before it; the memory is the state of the recurrence over
    them, ``[S, B * A]``."""
    states = blocks.reshape(len(blocks), -1, blocks.shape[3])

    def latents_at(memory, k, before):
        memory = heads.remember(memory, target.embed(target_params, before))
        latent = heads.latent(states[..., k], memory)
        return [latent if k >= config.prefix else jnp.zeros_like(latent)], memory

    return jnp.zeros((heads.memory_size, states.shape[1]), states.dtype), latents_at


def xpress_latents(config, heads, target, target_params, rows, anchors, blocks, table):
    """A place is corrected by the text, and in each round by the guesses of the round before; the
    argument ``before`` is not read."""
    refiner, (size, batch, count, places) = heads.refiner, blocks.shape
    known = refiner.given(blocks.reshape(size, -1, places))
    before = jnp.maximum(anchors - 1, 0)
    alone = block.at(rows.segments, before) != block.at(rows.segments, anchors)
    first = [jnp.where(alone, block.at(rows.tokens, anchors), block.at(rows.tokens, before))]
    first.append(block.at(rows.tokens, anchors))  # the root, which is never guessed

    def latents(tokens):
        """Of the places that draft, each ``[R, B * A]``, given the tokens before all places."""
        flat = jnp.stack([x.reshape(-1) for x in tokens], axis=1)
        mixed = refiner.mixed(known, flat)
        latent = refiner.latent(mixed.reshape(len(mixed), -1)).reshape(mixed.shape)
        return [latent[:, :, k] for k in range(places - 1)]

    def guesses(corrections):
        """The most probable tokens of each place that drafts, int32 ``[B, A]``."""
        wide, best = table[:, : size + (0 if corrections is None else config.rank)], []
        for k in range(places - 1):
            state = blocks[..., k + 1]
            if corrections is not None:
                latent = corrections[k].reshape(-1, batch, count).astype(state.dtype)
                state = jnp.concatenate([state, latent])
            best.append(chunks.each(most_probable, wide, state.transpose(1, 2, 0), None, ()))
        return best

    text = [block.at(rows.tokens, anchors + k) for k in range(1, places - 1)]
    found, free = [latents([*first, *text])], None
    for _ in range(config.rounds):
        guess = jax.lax.stop_gradient(guesses(jax.lax.stop_gradient(free)))
        free = latents([*first, *guess[:-1]])
        found.append(free)
    places_found = list(zip(*found, strict=True))
    return None, lambda memory, k, before: (places_found[k], memory)


def most_probable(table, states, fixed, pieces):
    """The tokens with the greatest logits, int32 ``[B, C]``."""
    logits = chunks.logits_of(*jax.lax.stop_gradient((table, states)))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
