"""Texts after which no token is allowed: what measures and draws says so, in valid JSON."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Drafting, Sampling
from specjax.cli import screen

pytest_plugins = ["pairs"]


def first_three(logits, prefix):
    new = prefix.length - prefix.begin + jnp.sum(prefix.path >= 0, axis=1)
    return jnp.where((new < 3)[:, None], logits, -jnp.inf)


def nothing(logits, prefix):
    del prefix
    return jnp.full_like(logits, -jnp.inf)


def test_a_trace_goes_to_the_last_token_that_is_allowed(pair, tmp_path):
    lm, draft = pair
    settings = dict(
        drafter=draft, max_new_tokens=8, sampling=Sampling(logits_processor=first_three)
    )
    traced = specjax.trace(lm, "def f(x):", **settings)
    traced.save(tmp_path / "trace.html")
    assert traced.reason == specjax.generate(lm, "def f(x):", **settings).reasons[0] == "no token"
    empty = settings | {"sampling": Sampling(logits_processor=nothing)}
    assert specjax.trace(lm, "def f(x):", **empty).reason == "no token"
    block = settings | {"drafting": Drafting(rule="block"), "sampling": Sampling(temperature=0.8)}
    assert specjax.trace(lm, "a", **block | {"max_new_tokens": 1}).rule == "block"


@pytest.mark.parametrize("measure", [specjax.compare, specjax.quality])
def test_empty_texts_are_not_compared(pair, measure):
    bias = np.full(pair[0].target.vocab_size, -np.inf, np.float32)
    with pytest.raises(ValueError, match="every text of plain decoding is empty"):
        measure(pair[0], "a", drafter="ngram", max_new_tokens=4, sampling=Sampling(logit_bias=bias))


def test_a_probability_of_zero_has_no_logarithm_in_json(pair):
    """An approximate rule emits tokens that the law rules out."""
    bias = np.zeros(pair[0].target.vocab_size, np.float32)
    out = specjax.generate(
        pair[0],
        "a",
        drafter=pair[1],
        drafting=Drafting(rule="approximate-top-k:k=300"),
        sampling=Sampling(logit_bias=bias),
        logprobs="law",
        max_new_tokens=8,
    )
    found = screen.describe(out, "a", pair[0], "approximate-top-k")
    given = out.logprobs[0].tolist()
    assert min(given) == -math.inf
    assert found["logprobs"] == [None if math.isinf(x) else x for x in given]
    json.dumps(found, allow_nan=False)
