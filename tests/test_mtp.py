"""MTP modules: the numbers of transformers, slow ones without a cache, checkpoints, bad input."""

from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import Sampling, loop

GOLDEN = Path(__file__).parent / "golden" / "mtp"
CASES = ("deepseek", "mimo", "qwen")


def loaded(folder, **settings):
    lm = specjax.load(folder, tokenizer=False, dtype="float32")
    return lm, specjax.load_drafter(folder, lm, **settings)


@pytest.fixture(scope="module")
def targets():
    return {case: loaded(GOLDEN / case) for case in CASES}


def rounds(lm, heads, prompt, num):
    """``(length, drafts [N], logits below the root [V])`` of each round of a greedy generation of
    one row, and its tokens."""
    drafter, params = heads.drafter, {"target": lm.params, "drafter": heads.params}
    request, capacity = loop.prepare(
        lm.target,
        drafter,
        prompt[None],
        np.asarray([len(prompt)]),
        jax.random.key(0),
        num,
        Sampling(),
        None,
        (),
    )
    start = jax.jit(loop.start, static_argnums=(0, 1, 2, 3))
    state = start(lm.target, drafter, "auto", capacity, params, request)

    @jax.jit
    def step(params, state):
        judged = loop.judge(lm.target, drafter, "auto", params, state)
        return judged.draft.tokens, loop.conclude(lm.target, drafter, params, state, judged)

    found = []
    while int(state.budget[0]) > 0:
        length = int(state.length[0])
        drafted, state = step(params, state)
        found.append((length, np.asarray(drafted)[0, 1:]))
    return found, np.asarray(state.tokens)[0, : int(state.length[0])]


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_accepted_tokens_over_a_generation_are_those_of_transformers(case, targets):
    expected = np.load(GOLDEN / case / "expected.npz")
    prompt = expected["tokens"][: expected["lengths"][0]]
    found, tokens = rounds(*targets[case], prompt, len(expected["tokens"]) - len(prompt))
    assert [length for length, _ in found] == expected["lengths"].tolist()
    assert np.stack([drafts for _, drafts in found]).tolist() == expected["drafts"].tolist()
    assert tokens.tolist() == expected["tokens"].tolist()
