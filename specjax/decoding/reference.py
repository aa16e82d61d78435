"""The slow, obvious oracle: no cache, no loop, no speculation. For tests, and for readers.

Every function asks the target for one pass over a whole sequence, from an empty cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from .._internal.own_arithmetic import own_arithmetic
from ..sampling import processors
from ..sampling.distribution import Prefix, Sampling
from ..types import Draft, HeadTarget, Target


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def logits(target: Target, params, tokens: jax.Array) -> jax.Array:
    """float32 ``[B, T, V]``, raw logits after each of ``tokens`` int32 ``[B, T]``."""
    scores = target.verify(params, target.init(params, *tokens.shape), _whole(tokens))
    return required(scores.logits, "scores.logits")


@functools.partial(jax.jit, static_argnums=0)
@own_arithmetic
def last_hidden(target: HeadTarget, params, tokens: jax.Array) -> jax.Array:
    """Floats ``[B, T, H]``, the last hidden states, normed, at ``tokens`` int32 ``[B, T]``."""
    cache, last = target.init(params, *tokens.shape), (target.num_layers,)
    scores = target.verify(params, cache, _whole(tokens), features=last, logits=False)
    return required(scores.features, "scores.features")


def _whole(tokens: jax.Array) -> Draft:
    """A text from its first token on, as the chain of one pass."""
    batch, size = tokens.shape
    parents = trees.chain_parents(size - 1)
    return Draft(start=jnp.zeros((batch,), jnp.int32), tokens=tokens, topology=parents)


def greedy(target: Target, params, prompt, num: int) -> list[int]:
    """The ``num`` tokens that greedy decoding appends to ``prompt``, one full pass each.

    All passes have the width of the whole text, so that one program is compiled; a token sees
    nothing to its right.
    """
    size = len(prompt)
    tokens = np.zeros((1, size + num), np.int32)
    tokens[0, :size] = prompt
    for end in range(size, size + num):
        tokens[0, end] = np.argmax(np.asarray(logits(target, params, tokens))[0, end - 1])
    return tokens[0, size:].tolist()


def next_law(
    target: Target,
    params,
    tokens: np.ndarray,
    sampling: Sampling,
    begin=None,
    processor_params=None,
) -> np.ndarray:
    """Returns the law, float32 ``[B, V]``, of the token after each row of ``tokens [B, T]``.

    Generated tokens begin at position ``begin``, by default after all of ``tokens``;
    ``processor_params`` are the arrays of ``sampling.logits_processor``.
    """
    batch, size = tokens.shape
    begin = size if begin is None else int(begin)
    ids = np.asarray(tokens, np.int32)
    return np.asarray(_next_law(target, begin, params, ids, sampling.rows(batch), processor_params))


@functools.partial(jax.jit, static_argnums=(0, 1))
@own_arithmetic
def _next_law(target, begin, params, ids, sampling, processor_params) -> jax.Array:
    """``next_law`` of ids int32 ``[B, T]`` as one program, for settings that are arrays of rows."""
    batch, size = ids.shape
    lengths = jnp.full((batch,), begin, jnp.int32)
    state = processors.initial_processor_state(
        sampling.logits_processor, processor_params, ids, lengths
    )
    if state is not None:
        state = processors.advance_processor(
            sampling.logits_processor, processor_params, state, ids[:, begin:]
        )
    prefix = Prefix(
        tokens=ids,
        length=jnp.full((batch,), size, jnp.int32),
        path=jnp.full((batch, 1), -1, jnp.int32),
        begin=lengths,
        state=state,
        params=processor_params,
    )
    last = logits(target, params, ids)[:, -1]
    return sampling.probabilities(last, prefix)


def joint_law(
    target: Target, params, prompt, num: int, sampling: Sampling, processor_params=None
) -> np.ndarray:
    """float64 ``[V] * num``, the exact joint law of the next ``num`` tokens, by enumeration.

    Where the law gives no token any probability the text ends: no mass is left.
    """
    vocab = target.vocab_size
    law = np.ones((1,))
    sequences = np.asarray([list(prompt)], np.int32)
    for _ in range(num):
        p = next_law(target, params, sequences, sampling, len(prompt), processor_params)
        p = p.astype(np.float64)
        mass = p.sum(axis=1, keepdims=True)
        law = (law[:, None] * p / np.where(mass > 0, mass, 1)).reshape(-1)
        ahead = np.tile(np.arange(vocab, dtype=np.int32), len(sequences))[:, None]
        sequences = np.concatenate([np.repeat(sequences, vocab, axis=0), ahead], axis=1)
    return law.reshape((vocab,) * num)
