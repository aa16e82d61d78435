"""A ragged batch of prompts for a toy target, and what decoding says after each prompt."""

import functools

import jax
import numpy as np
from toys import bag, cache_of

from specjax.decoding import loop, prefill, reference

VOCAB, NUM = 13, 12
MODEL, PARAMS = bag(VOCAB, 3, features=8)
PROMPTS = [
    np.random.default_rng(i).integers(0, VOCAB, size).tolist()
    for i, size in enumerate((1, 2, 9, 4, 7, 3, 1, 6))
]
start = jax.jit(prefill.start, static_argnums=(0, 1, 2, 3))
step = jax.jit(loop.burst, static_argnums=(0, 1, 2))  # donates nothing: every state is kept
rebuilt = jax.jit(functools.partial(cache_of, MODEL))  # a cache from scratch


@functools.cache
def plain_texts():
    """What plain decoding says, prompt by prompt, by passes without a cache; all texts have one
    width, so that one program is compiled: a pass reads nothing to the right of a token."""
    tokens, lengths = pad(PROMPTS)
    tokens = np.pad(tokens, ((0, 0), (0, NUM)), constant_values=VOCAB - 1)
    rows = np.arange(len(PROMPTS))
    for _ in range(NUM):
        logits = np.asarray(reference.logits(MODEL, PARAMS, tokens))
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(axis=1)
        lengths += 1
    return [tokens[i, len(p) : len(p) + NUM].tolist() for i, p in enumerate(PROMPTS)]


def pad(prompts):
    width = max(map(len, prompts))
    tokens = np.full((len(prompts), width), VOCAB - 1, np.int32)  # padding is anything
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.asarray([len(p) for p in prompts], np.int32)


def new_tokens(out, prompts):
    ends = np.asarray(out.lengths)
    return [np.asarray(out.tokens)[i, len(p) : ends[i]].tolist() for i, p in enumerate(prompts)]
