"""Sampled exactness: the whole jitted loop against the enumerated law of the target.

Each test draws 200,000 rows at once, or 50,000 in the merge tier, of texts that are one token
longer than the deepest draft: so the token after a draft that was accepted whole is among them. Two
figures: the total variation to the exact joint law, with its expectation under the hypothesis, and
chi-squared with a false-alarm rate of 1e-7 a test (the seeds are fixed, so a passing test stays
passing).
"""

import functools

import numpy as np
import pytest
from registry import cases
from toys import bag

from specjax import Sampling
from specjax.analysis import sampled_law
from specjax.analysis.sampled_law import joint_counts
from specjax.decoding import reference

ROWS, VOCAB, NUM = 200_000, 4, 3
FALSE_ALARM = 1e-7
PROMPT = (1, 0, 2, 1, 0)
MODEL, PARAMS = bag(VOCAB, 0)
CASES = cases(MODEL, PARAMS)
WARM = Sampling(temperature=0.9)
EVERYTHING = Sampling(
    temperature=0.8,
    top_k=3,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.3,
    logit_bias=np.asarray([0.3, 0.0, -0.4, 0.1], np.float32),
    presence_penalty=0.4,
    frequency_penalty=-0.3,
)


@functools.cache
def exact(sampling_name, num=NUM):
    sampling = {"warm": WARM, "everything": EVERYTHING}[sampling_name]
    return reference.joint_law(MODEL, PARAMS, PROMPT, num, sampling).reshape(-1)


def sample(
    drafter,
    weights,
    rule,
    sampling,
    seed=0,
    rounds=None,
    target=None,
    weights_of=None,
    law=None,
    rows=ROWS,
    num=NUM,
):
    """Joint counts of the first ``num`` tokens, and the state at the end; traced afresh.

    Texts that ended before are in no cell: their law gave no token any probability.
    """
    params = {"target": weights_of or PARAMS, "drafter": weights, "logits_processor": law}
    model = MODEL if target is None else target
    return joint_counts(
        model, drafter, rule, params, PROMPT, num, sampling, rows=rows, seed=seed, rounds=rounds
    )


def judge(counts, law):
    """``(total variation, its 5-sigma bound under the law, p-value of chi-squared)``."""
    evidence = sampled_law.judge(counts, law)
    assert evidence.impossible == 0, "a token of probability zero was emitted"
    return evidence.variation, evidence.bound, evidence.p_value


def lawful(counts, law):
    """Whether ``counts`` may have been drawn from ``law``."""
    variation, bound, p_value = judge(counts, law)
    return variation < bound and p_value > FALSE_ALARM


def tokens_of(drafter):
    """How many tokens a text must have to show what follows the deepest draft."""
    return max(NUM, drafter.depth + 1)


def beginnings(x):
    """``x`` of texts, summed over all but their first ``NUM`` tokens."""
    return np.asarray(x).reshape(VOCAB**NUM, -1).sum(axis=1)


PAIRS = [(name, rule) for name in CASES for rule in CASES.rules(name)]


@pytest.mark.parametrize(("name", "rule"), PAIRS, ids=[f"{n}-{r}" for n, r in PAIRS])
def test_loop_draws_the_targets_law(name, rule, hurried):
    drafter, weights, _ = CASES[name]
    num, rows = tokens_of(drafter), ROWS // 4 if hurried else ROWS
    counts, stats = sample(drafter, weights, rule, WARM, rows=rows, num=num)
    law = exact("warm", num)
    for found, wanted in ((counts, law), (beginnings(counts), beginnings(law))):
        assert lawful(found, wanted), judge(found, wanted)
    if name == "draft itself" and rule != "delta":  # q = p: every draft within the budget is kept
        assert int(stats.accepted.sum()) == int(stats.drafted.sum())


@pytest.mark.parametrize("name", ["plain", "draft", "tree distinct", "merged", "ngram", "eagle3"])
def test_every_setting_of_the_law_at_once(name):
    drafter, weights, _ = CASES[name]
    num = tokens_of(drafter)
    counts, _ = sample(drafter, weights, "auto", EVERYTHING, num=num)
    law = exact("everything", num)
    assert lawful(counts, law), judge(counts, law)


def test_block_verification_accepts_at_least_as_much_as_token_by_token():
    accepted = {}
    for rule in ("rejection", "block"):
        _, stats = sample(*CASES["draft"][:2], rule, WARM, rounds=1)
        accepted[rule] = float(stats.accepted.mean())
    assert accepted["block"] > accepted["rejection"] + 0.01, accepted
