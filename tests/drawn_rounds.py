"""Rounds at temperature 1, one by one, for tests that compute the laws of a draft once more; and
greedy texts beside plain decoding."""

import jax
import numpy as np

import specjax
from specjax import Sampling
from specjax.decoding import round
from specjax.drafters import Plain


def drawn_rounds(target, drafter, params, prompts, lengths, num):
    """Yields ``(state before the round, draft)``, on the host, of ``num`` rounds."""
    state = specjax.init_state(
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

    @jax.jit
    def one(params, state):
        judged = round.draft_and_verify(target, drafter, "rejection", params, state)
        return judged.draft, round.commit_round(target, drafter, params, state, judged)

    for _ in range(num):
        draft, after = one(params, state)
        yield jax.device_get((state, draft))
        state = after


def assert_greedy_texts(target, drafter, params, vocab):
    """Rows of 300, 1 and 40 tokens go on as by plain decoding, and some drafts are accepted."""
    prompts = np.random.default_rng(1).integers(0, vocab, (3, 300)).astype(np.int32)
    lengths, key = np.asarray([300, 1, 40], np.int32), jax.random.key(0)
    given = dict(params=params, tokens=prompts, lengths=lengths, key=key, max_new_tokens=30)
    out, plain = (specjax.decode(target, one, **given) for one in (drafter, Plain()))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert not out.stats.approximate and np.asarray(out.stats.accepted).sum() > 1
