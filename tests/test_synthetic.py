"""Synthetic acceptance: the stated rates, the target's text, the label."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, NUM, PARAMS, PROMPTS, new_tokens, pad, plain_texts
from toys import TreeDrafter, like

import specjax
from specjax import Sampling
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, DraftModel, NGram, Plain, Synthetic

DRAFT = DraftModel(num_draft=3, model=MODEL)


def decode(drafter, weights=None, num=NUM, prompts=PROMPTS, **settings):
    tokens, lengths = pad(prompts)
    params = {"target": PARAMS, "drafter": weights}
    settings = {"key": jax.random.key(0), "max_new_tokens": num, **settings}
    return specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


@pytest.mark.parametrize("inner", [None, DRAFT], ids=["alone", "with its cost"])
def test_each_position_is_accepted_at_the_stated_rate(inner):
    """Given that those before it were: within five standard errors, over thousands of rounds."""
    rates, prompts, num = (0.9, 0.5, 0.7), PROMPTS * 4, 200
    truth = decode(Plain(), None, num, prompts).tokens
    weights = {"truth": truth, "inner": like(PARAMS, 1)}
    out = decode(Synthetic(3, rates, inner), weights, num, prompts)
    assert (np.asarray(out.tokens) == np.asarray(truth)).all()
    drafted_at = np.asarray(out.stats.drafted_at).sum(axis=0)
    kept = np.asarray(out.stats.accepted_at).sum(axis=0)
    tries = np.concatenate([drafted_at[:1], kept[:-1]])
    assert tries[0] > 2000
    for rate, hits, count in zip(rates, kept, tries, strict=True):
        # the last round of a row may be cut: at most one try a row is not held against the draft
        slack = 5 * np.sqrt(rate * (1 - rate) / count) + len(prompts) / count
        assert abs(hits / count - rate) < slack, (rate, hits / count, slack)


@pytest.mark.parametrize(("accuracy", "tau"), [(0.0, 1.0), (1.0, 4.0)])
def test_always_wrong_and_always_right(accuracy, tau):
    num = NUM + 1  # whole rounds after the first token
    truth = decode(Plain(), num=num).tokens
    out = decode(Synthetic(3, accuracy), {"truth": truth, "inner": None}, num=num)
    assert [text[:NUM] for text in new_tokens(out, PROMPTS)] == plain_texts()
    assert out.stats.tau == tau


def test_a_wrong_truth_costs_acceptance_and_nothing_else():
    truth = (decode(Plain()).tokens + 1) % 13
    out = decode(Synthetic(3, 1.0), {"truth": truth, "inner": None})
    assert new_tokens(out, PROMPTS) == plain_texts()
    assert int(out.stats.accepted.sum()) == 0


def products(drafter, weights):
    """How many matrix products the compiled program of a decoding holds."""
    settings = (MODEL, drafter, *pad(PROMPTS), jax.random.key(0), NUM, Sampling(), None, ())
    request, capacity = prepare_inputs(*settings)
    params = {"target": PARAMS, "drafter": weights}
    lowered = loop._decode.lower(MODEL, drafter, "auto", capacity, params, request)
    return lowered.compile().as_text().count(" dot(")


def test_the_inner_drafters_work_is_not_optimised_away():
    near, truth = like(PARAMS, 1), decode(Plain()).tokens
    real = products(DRAFT, near)
    assert products(Synthetic(3, 0.8, DRAFT), {"truth": truth, "inner": near}) == real
    assert products(Synthetic(3, 0.8), {"truth": truth, "inner": None}) < real


def test_everything_that_shows_a_result_says_synthetic():
    truth = decode(Plain()).tokens
    bare = {"truth": truth, "inner": None}
    for drafter, weights, name in (
        (Synthetic(3), bare, "synthetic"),
        (Synthetic(3, 0.8, NGram(num_draft=3)), bare, "synthetic(ngram)"),
        (
            Adaptive(Synthetic(3)),
            {"inner": bare, "costs": jnp.asarray([1.0, 1.1, 1.2])},
            "adaptive(synthetic)",
        ),
    ):
        out = decode(drafter, weights)
        assert out.stats.drafter == name
        assert "SYNTHETIC" in str(out.stats)
    assert "SYNTHETIC" not in str(decode(Plain()).stats)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda truth: Synthetic(3, 1.5), "one number in .0, 1."),
        (lambda truth: Synthetic(3, (0.9, 0.8)), "each of 3 positions"),
        (lambda truth: Synthetic(4, 0.9, DRAFT), "draft drafts 3 tokens"),
        (lambda truth: decode(Synthetic(3)), "'truth'"),
        (
            lambda truth: decode(Synthetic(3), {"truth": truth[:, :9], "inner": None}),
            r"\(8, 9\).* at least 21 tokens",
        ),
        (
            lambda truth: decode(
                Synthetic(3), {"truth": truth, "inner": None}, sampling=Sampling(temperature=1.0)
            ),
            "greedy text only: use temperature=0",
        ),
        (
            lambda truth: decode(
                Synthetic(4, 0.8, TreeDrafter(model=MODEL, num_draft=4)),
                {"truth": truth, "inner": PARAMS},
            ),
            "replaces the tokens of chains",
        ),
    ],
)
def test_what_cannot_be_synthetic_is_refused(make, words):
    truth = decode(Plain()).tokens
    with pytest.raises(ValueError, match=words):
        make(truth)
