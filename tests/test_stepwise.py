"""A round taken apart by public functions commits what the compiled loop commits."""

import dataclasses

import jax
import numpy as np
import pytest
from registry import cases
from toys import bag

import specjax
from specjax import Sampling

MODEL, PARAMS = bag(11, 3)
CASES = cases(MODEL, PARAMS)
TOKENS, LENGTHS = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32), np.asarray([3, 2])

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", ["draft", "tree distinct", "adaptive ngram"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_by_hand_are_those_of_decode(name, temperature):
    drafter, weights, _ = CASES[name]
    params = {"target": PARAMS, "drafter": weights}
    common = dict(
        key=jax.random.key(3), max_new_tokens=9, sampling=Sampling(temperature=temperature)
    )
    wanted = specjax.decode(MODEL, drafter, params, TOKENS, LENGTHS, **common)

    @jax.jit
    def by_hand(params, state):
        context = specjax.round_context(params, state)
        draft, proposed = specjax.draft_step(drafter, params, state.drafter_state, context)
        scores = specjax.verify(MODEL, params, state.cache, draft, features=drafter.features)
        keys = specjax.acceptance_keys(state)
        verdict = specjax.accept("auto", params, draft, scores, context, keys)
        verified = specjax.VerifiedRound(
            context=context, draft=draft, proposed=proposed, scores=scores, verdict=verdict
        )
        return specjax.commit_round(MODEL, drafter, params, state, verified)

    step = jax.jit(specjax.step, static_argnums=(0, 1))
    state = specjax.init_state(MODEL, drafter, params, TOKENS, LENGTHS, **common)
    for turn in range(30):
        if not (np.asarray(state.budget) > 0).any():
            break
        if turn % 2:
            state = step(MODEL, drafter, params, state)
        else:
            state = by_hand(params, state)
    assert np.array_equal(state.length, wanted.lengths)
    assert np.array_equal(state.tokens, wanted.tokens)


def test_keys_and_scores_of_other_rows_or_nodes_are_refused():
    drafter, weights, _ = CASES["draft"]
    params = {"target": PARAMS, "drafter": weights}
    settings = dict(max_new_tokens=9, sampling=Sampling(temperature=1.0), key=jax.random.key(3))

    @jax.eval_shape
    def judged():
        state = specjax.init_state(MODEL, drafter, params, TOKENS, LENGTHS, **settings)
        context = specjax.round_context(params, state)
        draft, _ = specjax.draft_step(drafter, params, state.drafter_state, context)
        return draft, specjax.verify(MODEL, params, state.cache, draft), context

    def accept(key, draft, scores, context):
        return specjax.accept("auto", params, draft, scores, context, key)

    draft, scores, context = judged
    for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 3)):
        with pytest.raises(ValueError, match=r"accept: key is .*: give random keys \[2\]"):
            jax.eval_shape(accept, key, draft, scores, context)
    fewer = dataclasses.replace(scores, logits=jax.ShapeDtypeStruct((2, 1, 11), np.float32))
    with pytest.raises(ValueError, match="scores.logits is float32 of shape .*: expected"):
        jax.eval_shape(accept, jax.random.split(jax.random.key(0)), draft, fewer, context)
