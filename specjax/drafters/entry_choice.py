"""What a drafter remembers of the entries that it chose between the sinks and the window.

``SelfDraft`` chooses in the target's cache, ``SparseDraftModel`` in that of a draft model, both by
``models.top_chunks`` or ``models.snap_kv``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models.chosen_entries import NEVER, ChosenEntries, last_states
from ..models.sub_network import DecoderPart
from ..types import Context, PyTree


@pytree_dataclass
class ChosenChunks:
    """What is remembered of a choice of entries.

    Attributes:
      states: float32 ``[B, O, F]``, the inputs of the layers that choose, at the tokens whose
        queries choose.
      last: int32 ``[B]``, the position of the last of these tokens.
      begin: int32 ``[B]``, the position from which on the states follow one another up to ``last``;
        a chat's next prompt begins anew where generated tokens without states stand before it.
      places: int32 ``[B, layers, K, budget]``, the positions of the tokens chosen last.
      age: int32 ``[B]``, rounds since then.
    """

    states: jax.Array
    last: jax.Array
    begin: jax.Array
    places: jax.Array
    age: jax.Array


def no_choice(chunks: ChosenEntries, part: DecoderPart, batch: int) -> ChosenChunks:
    """What is remembered before the first token, of a part with a small cache."""
    config, layers = part.whole.config, len(part.choosing_layers)
    return ChosenChunks(
        states=jnp.zeros((batch, chunks.num_queries, layers * config.hidden_size)),
        last=jnp.full((batch,), -1, jnp.int32),
        begin=jnp.zeros((batch,), jnp.int32),
        places=jnp.zeros((batch, layers, config.num_kv_heads, chunks.budget), jnp.int32),
        age=jnp.full((batch,), chunks.every, jnp.int32),
    )


def remember(
    chunks: ChosenEntries,
    choice: ChosenChunks,
    features: jax.Array,
    start: jax.Array,
    num: jax.Array,
    prompt: bool,
) -> ChosenChunks:
    """Takes in the states of committed tokens.

    Args:
      chunks: how entries are chosen.
      choice: what was remembered before.
      features: ``[B, T, F]``, the inputs of the layers that choose.
      start: int32 ``[B]``, the position of the first of these tokens.
      num: int32 ``[B]``, how many of them were committed; 0: nothing happens in the row.
      prompt: whether the tokens are those of a prompt, whose end alone chooses where there is one
        choice.
    """
    once, some = chunks.every == NEVER, num > 0
    if once and not prompt:
        return choice
    follows = start == choice.last + 1  # else what lies between has no states here
    return dataclasses.replace(
        choice,
        states=last_states(choice.states, features, num),
        last=jnp.where(some, start + num - 1, choice.last),
        begin=jnp.where(some & ~follows, start, choice.begin),
        age=jnp.where(some, NEVER, choice.age) if once else choice.age,
    )


def chosen(
    chunks: ChosenEntries,
    part: DecoderPart,
    params: PyTree,
    cache: PyTree,
    choice: ChosenChunks,
    length: jax.Array,
    context: Context,
) -> ChosenChunks:
    """Chooses anew in rows whose last choice is old and which are to draft.

    Args:
      chunks: how entries are chosen.
      part: the part with a small cache, which is to read them.
      params: the weights of the whole.
      cache: of the whole.
      choice: what is remembered.
      length: int32 ``[B]``, the entries of the cache that are read.
      context: of the round.
    """
    small = required(part.small, "small").config
    whole = required(small.cache_window, "cache_window") + small.sinks
    old = (choice.age >= chunks.every) & (length > whole) & context.asked_rows
    if context.width is not None:
        old &= context.width > 0

    def anew():
        asked = choice.states, choice.last, choice.begin
        return part.choose(params, cache, *asked, length, chunks)

    places = jax.lax.cond(jnp.any(old), anew, lambda: choice.places)
    places = jnp.where(old[:, None, None, None], places, choice.places)
    return dataclasses.replace(choice, places=places, age=jnp.where(old, 1, choice.age + 1))
