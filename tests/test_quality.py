"""The price of a rule: figures that are known beforehand on toys, and what cannot be asked."""

import dataclasses

import numpy as np
import pytest
from compiled import compilations
from toys import bag, like

import specjax
from specjax import Sampling
from specjax.cli import quality as cli_quality
from specjax.drafters import DraftModel
from specjax.text import Session

MODEL, PARAMS = bag(11, 3)
LM = specjax.LM.of(MODEL, PARAMS)
PROMPTS = [[1, 2], [3, 0, 4], [5]]
DRAFTER = DraftModel(num_draft=3, model=MODEL)
COMMON = dict(drafter=DRAFTER, drafter_params=like(PARAMS, 1), max_new_tokens=16)


def test_at_temperature_0_lossless_rules_cost_nothing_and_wider_ones_no_less():
    rules = ["auto", "approximate-top-k:k=1", "approximate-top-k:k=2", "approximate-top-k:k=11"]
    found = specjax.quality(LM, PROMPTS, rules=rules, **COMMON).rules
    for one in found[:3]:
        assert (one.best, one.rank, one.same, one.variation[0], one.approximate) == (1, 0, 1, 0, "")
    assert found[0].tau == 1 and found[4].tau > found[1].tau
    assert found[3].approximate and found[4].loglik < found[3].loglik < found[0].loglik
    assert found[3].variation[0] == pytest.approx(1 - found[3].best)
    assert 0 < found[3].variation[0] <= found[4].variation[0]
    assert found[3].rank <= 1 and found[4].same == 0 and found[4].divergence is None


def with_drafts_that_never_pay(work):
    """As a batch of many rows has them; the law of the rule is counted all the same."""
    own = work.params["drafter"]
    costs = np.where(np.arange(len(own["costs"])), np.float32(1e3), np.float32(1))
    return dataclasses.replace(work, params={**work.params, "drafter": {**own, "costs": costs}})


def test_above_temperature_0_the_emitted_law_is_counted_against_the_targets(monkeypatch):
    rules = ["rejection", "coupled", "approximate-lenience:scale=0.05"]
    warm = Sampling(temperature=1.0, logit_bias={3: 0.5})
    found = specjax.quality(LM, PROMPTS, rules=rules, sampling=warm, probe_samples=2000, **COMMON)
    assert found.num_probes == 6 and str(found).count("\n") == 6
    plain, rejection, coupled, lenient = found.rules
    for one in (plain, rejection, coupled):  # nothing but noise
        (tv, noise), (kl, rest) = one.variation, one.divergence
        assert abs(tv - noise) < 0.3 * noise and abs(kl - rest) < rest and one.same is None
    assert lenient.variation[0] > lenient.variation[1] + 0.03
    assert lenient.divergence[0] > lenient.divergence[1] + 0.005
    assert lenient.tau > rejection.tau > plain.tau == 1
    monkeypatch.setattr("specjax.text.round_costs.with_round_costs", with_drafts_that_never_pay)
    auto = dict(drafting=specjax.Drafting(num="auto"), rules=rules[-1], probe_samples=2000)
    adaptive = specjax.quality(LM, PROMPTS, sampling=warm, **COMMON | auto).rules[1]
    assert adaptive.variation == lenient.variation
    assert np.isfinite([one.loglik for one in found.rules]).all()


def test_rules_of_chains_are_left_out_where_trees_are_drafted():
    lm = specjax.load("embedded")
    for name, chains in (("recycling", False), ("suffix", True), ("suffix+recycling", False)):
        options = {"drafter": name, "drafting": specjax.Drafting()}
        assert cli_quality._drafts_chains(lm, options) == chains


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(rules=[]), "at least one rule"),
        (dict(rules=["nonsense"]), "unknown"),
        (dict(rules="nonsense"), "rule='nonsense'"),
        (dict(probes=-1), "at least 0 probes"),
        (dict(sampling=Sampling(repetition_penalty=1.5)), "no penalties"),
        (dict(num_samples=2), "num_samples=1"),
        (dict(seed=[1, 2, 3]), "seed: .*one value"),
        (dict(sampling=Sampling(temperature=np.ones(3), top_k=[1, 2, 3])), "temperature, top_k: "),
        (dict(sampling=Sampling(logit_bias=np.zeros((3, 11)))), "logit_bias: "),
        (dict(drafter=Session(LM, "suffix", 256), drafter_params=None), "a session keeps"),
    ],
)
def test_what_has_no_price_is_refused(settings, words):
    def refused():
        with pytest.raises(ValueError, match=words):
            specjax.quality(LM, PROMPTS, **COMMON | settings)

    assert compilations(refused) == 0
