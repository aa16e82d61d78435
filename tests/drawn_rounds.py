"""Rounds at temperature 1, one by one, for tests that compute the laws of a draft once more; and
greedy texts beside plain decoding."""

import functools

import jax
import numpy as np
from starts import begun

import specjax
from specjax import Sampling
from specjax.decoding import round
from specjax.drafters import Plain


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def advanced(target, drafter, rule, params, state):
    """What a round drafted and judged, and the state after it: one program for both."""
    judged = round.draft_and_verify(target, drafter, rule, params, state)
    return judged, round.commit_round(target, drafter, params, state, judged)


def drawn_rounds(target, drafter, params, prompts, lengths, num):
    """Yields ``(state before the round, draft)``, on the host, of ``num`` rounds."""
    state = begun(
        target,
        drafter,
        params,
        prompts,
        lengths,
        key=jax.random.key(0),
        max_new_tokens=40,
        sampling=Sampling(temperature=1.0),
        rule="rejection",
    )

    for _ in range(num):
        judged, after = advanced(target, drafter, "rejection", params, state)
        yield jax.device_get((state, judged.draft))
        state = after


def assert_greedy_texts(target, drafter, params, vocab):
    """Rows of 300, 1 and 40 tokens go on as by plain decoding, and some drafts are accepted."""
    prompts = np.random.default_rng(1).integers(0, vocab, (3, 300)).astype(np.int32)
    lengths, key = np.asarray([300, 1, 40], np.int32), jax.random.key(0)
    given = dict(params=params, tokens=prompts, lengths=lengths, key=key, max_new_tokens=30)
    out, plain = (specjax.decode(target, one, **given) for one in (drafter, Plain()))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert not out.stats.approximate and np.asarray(out.stats.accepted).sum() > 1
