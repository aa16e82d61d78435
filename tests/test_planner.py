"""The planner: its arithmetic on texts that are known, its predictions on the embedded pair."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import prepared
from flax import nnx

import specjax
from specjax.analysis import timing
from specjax.analysis.plan import api, measure, try_rounds
from specjax.analysis.plan.predict import (
    AcceptanceRecord,
    Costs,
    Rounds,
    beyond_the_pass,
    in_passes,
    rounds,
)
from specjax.checkpoints import HeadLM
from specjax.drafters import DraftModel, medusa
from specjax.models import CausalLM
from specjax.models.contrastive import Contrastive
from specjax.sampling import processors
from specjax.text import drafter_names, task
from specjax.text.options import Options

pytest_plugins = ["pairs"]
NGRAMS = [("ngram", 1), ("ngram", 2), ("ngram", 3)]
PROMPTS = ["def f(x):\n    return x\n\ndef g(x):\n", "import os\nimport sys\nimport"]


def of(proposed, accepted) -> AcceptanceRecord:
    """A trace of one row."""
    return AcceptanceRecord([np.asarray(proposed)], [np.asarray(accepted)])


# ---------------------------------------------------------------- arithmetic


def test_plain_decoding_takes_a_round_a_token():
    taken = rounds(of([3, 3, 3, 3], [3, 2, 1, 0]), 0)
    assert taken == Rounds({1: 4}, per_row=4, drafted=0, accepted=0)


def test_a_round_goes_to_the_token_after_the_accepted_ones():
    # root 0: 2 of 3 accepted, so that the next root is 3; there 0 of 3, then root 4
    trace = of([3] * 5, [2, 9, 9, 0, 3])
    assert rounds(trace, 3) == Rounds({4: 3}, per_row=3, drafted=9, accepted=5)
    # with drafts of one token root 0 leads to 2
    assert rounds(trace, 1).per_row == 3


def test_a_round_is_as_wide_as_the_widest_live_row_needs():
    trace = AcceptanceRecord(
        [np.asarray([0, 2, 9]), np.asarray([0, 5])],
        [np.asarray([0, 0, 0]), np.asarray([0, 0])],
    )
    # compiled widths up to 8 nodes: 1, 2, 4, 8; nothing proposed, then 2 and 5, then 7 of one row
    assert rounds(trace, 7).by_width == {1: 1, 8: 2}
    assert rounds(AcceptanceRecord(trace.proposed[:1], trace.accepted[:1]), 7).by_width == {
        1: 1,
        4: 1,
        8: 1,
    }
    assert rounds(trace, 7).per_row == 5


def test_the_pass_of_a_batch_goes_on_until_its_slowest_row_is_done():
    fast, slow = np.asarray([3, 3, 3, 3]), np.asarray([0, 0, 0, 0])
    trace = AcceptanceRecord([fast, fast], [fast, slow])
    assert rounds(trace, 3).count == 4 and rounds(trace, 3).per_row == 5


def test_acceptance_by_position_counts_only_what_was_proposed_and_reached():
    trace = of([0, 1, 2, 2], [0, 1, 1, 2])
    assert trace.acceptance(3)[:2] == [1.0, 0.5] and np.isnan(trace.acceptance(3)[2])


def test_rejected_tokens_are_paid_for():
    # c: what a drafted token costs; a drafter that is never right makes plain decoding slower by
    # gamma times c, and not by acceptance times c
    costs = Costs(unit=1.0, passes={1: 0.9, 4: 0.9}, drafts={"draft": {1: 0.1, 3: 0.3}})
    hopeless = rounds(of([3] * 10, [0] * 10), 3)
    assert costs.of(hopeless, "draft", 3) == pytest.approx(10 * (1 + 3 * 0.1))


def test_expected_tokens_over_cost_is_the_formula_of_the_field():
    # accepted with probability alpha at every position, independently: tau has a closed form
    rng, alpha, gamma, c = np.random.default_rng(0), 0.8, 4, 0.05
    run = rng.geometric(1 - alpha, size=40_000) - 1
    taken = rounds(of([gamma] * len(run), np.minimum(run, gamma)), gamma)
    costs = Costs(unit=1.0, passes={1: 1.0, 5: 1.0}, drafts={"draft": {4: gamma * c}})
    wanted = (1 - alpha ** (gamma + 1)) / (1 - alpha) / (1 + gamma * c)
    assert len(run) / costs.of(taken, "draft", gamma) == pytest.approx(wanted, rel=0.02)


def test_drafting_between_two_lengths_lies_on_the_line_and_what_was_run_is_reproduced():
    passes = {1: 0.8, 2: 1.0, 4: 1.1}
    taken = Rounds({1: 2, 4: 3}, 5, 9, 4)
    cost = beyond_the_pass(7.0, taken, passes)
    costs = Costs(unit=1.0, passes=passes, drafts={"x": {3: cost, 1: cost + 0.2}})
    assert costs.of(taken, "x", 3) == pytest.approx(7.0)
    assert costs.drafting("x", 2) == pytest.approx(cost + 0.1)
    assert in_passes(taken, passes) == pytest.approx(2 * 0.8 + 3 * 1.1)


# ---------------------------------------------------------------- traces of real rounds


@pytest.fixture(scope="module")
def near(pair):
    """A draft model that is often, but not always, right."""
    leaves, structure = jax.tree.flatten(pair[0].params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [
        x + 0.1 * jnp.std(x) * jax.random.normal(key, x.shape)
        for key, x in zip(keys, leaves, strict=True)
    ]
    return dataclasses.replace(pair[0], params=structure.unflatten(noisy))


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_one_trace_tells_the_rounds_of_every_length(drafter, pair, near):
    given = near if drafter == "draft" else drafter
    options = dict(max_new_tokens=40, stop=(), least_width=64)

    def run(length):
        work = prepared(pair[0], PROMPTS, drafter=given, num_draft=length, **options)
        return work, timing.timed_run(work)[-1]

    work, state = run(5)
    stats = {5: jax.tree.map(np.array, state.stats)}  # its buffers go to the trace
    found = try_rounds.try_rounds(work, state)
    stats[2] = run(2)[1].stats
    for length in stats:
        taken = rounds(found, length)
        assert taken.per_row == int(np.sum(stats[length].rounds)) < 80
        assert taken.count == int(np.max(stats[length].rounds))
    assert found.tokens == 78  # the first token of each text belongs to no round


@pytest.fixture(scope="module")
def heads(pair):
    """Three of Medusa's for the target, untrained: each says again what the target says."""
    lm = pair[0]
    shape = dict(hidden_size=32, vocab_size=lm.target.vocab_size, num_heads=3, tied=True)
    config = medusa.MedusaConfig(**shape)
    drafter = medusa.Medusa(config=config, target=lm.target)
    params = nnx.to_pure_dict(nnx.state(drafter.module(config, rngs=nnx.Rngs(0))))
    return HeadLM(drafter, params, name="heads", fingerprint="", target=lm.checkpoint)


@pytest.mark.parametrize("copying", [False, True])
def test_a_trace_of_heads_tells_the_rounds_of_every_length(pair, heads, copying):
    drafter = drafter_names.WithLookup(heads, drafter_names.COPYING) if copying else heads

    def run(length):
        options = dict(max_new_tokens=40, stop=(), drafter=drafter, num_draft=length)
        work = prepared(pair[0], PROMPTS, **options)
        return work, timing.timed_run(work)[-1]

    work, state = run(3)
    stats = {3: jax.tree.map(np.array, state.stats)}
    found = try_rounds.try_rounds(work, state)
    stats[2] = run(2)[1].stats
    for length, own in stats.items():
        taken = rounds(found, length)
        assert taken.per_row == int(np.sum(own.rounds)) < 80
        assert taken.count == int(np.max(own.rounds))


def test_heads_are_planned_no_deeper_than_they_are(pair, heads, monkeypatch):
    """A bonus for copies changes nothing of that: two lengths are run, and all are predicted."""
    options = dict(max_new_tokens=8, num_drafts=[2, 15], turns=1)
    copying = drafter_names.WithLookup(heads, drafter_names.COPYING)
    monkeypatch.setattr(drafter_names, "named", lambda lm, name: copying)
    both = [heads, "copy+heads"]
    found = specjax.plan(pair[0], PROMPTS[:1], drafters=both, **options).candidates
    ways = {(c.drafter, c.num_draft) for c in found}
    assert ways == {("plain", 0), *((x, n) for x in ("heads", "copy+heads") for n in (2, 3))}
    assert all(c.predicted for c in found)


def test_where_tokens_are_drawn_a_trace_repeats_the_rounds_of_its_own_run(pair, near):
    work = prepared(
        pair[0], PROMPTS, drafter=near, num_draft=3, temperature=1.0, max_new_tokens=40, stop=()
    )
    state = timing.timed_run(work)[-1]
    stats = jax.tree.map(np.array, state.stats)
    taken = rounds(try_rounds.try_rounds(work, state), 3)
    assert taken.per_row == int(np.sum(stats.rounds))
    # what would have been accepted beyond the budget counts here
    assert 0 <= taken.accepted - int(np.sum(stats.accepted)) <= 2 * 3


# ---------------------------------------------------------------- plans


def candidate(drafter="ngram", num_draft=3, **facts):
    facts = dict(rate=1.0, rounds_rate=1.0, ratio=1.0, interval=None) | facts
    common = dict(batch=1, tau=2.0, acceptance=0.5, by_position=[0.5])
    return measure.Candidate(drafter=drafter, num_draft=num_draft, **(common | facts))


def made(*candidates, **facts):
    common = dict(passes={}, drafting={}, prompts=1, max_new_tokens=8, temperature=0.0, seconds=1)
    return api.Plan(model="m", candidates=list(candidates), **(common | facts))


def test_the_verdict_says_plainly_when_plain_decoding_wins():
    plain = candidate("plain", 0, rate=5.0)
    lost = made(plain, candidate(rate=4.0, ratio=0.8))
    assert lost.verdict.startswith("plain decoding wins") and lost.options == {"drafter": "plain"}
    won = made(candidate(rate=6.0, ratio=1.2, interval=(1.1, 1.3)), plain)
    assert won.verdict == "use ngram, 3 a round: 1.20 × plain, predicted [1.10, 1.30]"
    assert won.options == {"drafter": "ngram", "drafting": specjax.Drafting(num=3)}
    typical = made(candidate(rate=6.0), plain, rule="approximate-typical")
    drafting = specjax.Drafting(num=3, rule="approximate-typical")
    assert typical.options == {"drafter": "ngram", "drafting": drafting}
    assert typical.as_json()["options"]["rule"] == typical.as_json()["rule"] == drafting.rule
    unclear = made(candidate(rate=6.0, ratio=1.2, interval=(0.9, 1.3)), plain)
    assert "plain decoding may be as fast" in unclear.verdict
    assert "interrupted" in made(plain, finished=False).verdict
    reason = "target quantized to int8"
    assert made(plain, approximate=reason).verdict.endswith(f"; {reason}: approximate")


def test_what_was_measured_overrules_what_was_predicted():
    ngram = candidate(rate=6.0, ratio=1.2, measured=4.0, measured_ratio=0.8)
    plain = candidate("plain", 0, rate=5.0, measured=5.0, measured_ratio=1.0)
    assert made(ngram, plain).choice is plain


def test_a_plan_prints_and_is_plain_data():
    found = made(candidate(acceptance=float("nan")), candidate("plain", 0), passes={1: {4: 0.1}})
    assert "ngram" in str(found) and found.verdict in str(found)
    facts = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert facts["candidates"][0]["acceptance"] is None and facts["passes"] == {"1": {"4": 0.1}}


def test_every_way_is_considered_at_every_batch_best_first(pair):
    told = []
    options = dict(drafters="ngram", num_drafts=[1, 2, 3], batches=[1, 2], max_new_tokens=8)
    found = specjax.plan(
        pair[0], [*PROMPTS, "class A"], turns=1, verify=1, progress=told.append, **options
    )
    ways = {(c.drafter, c.num_draft, c.batch) for c in found.candidates}
    assert ways == {(*way, b) for way in (("plain", 0), *NGRAMS) for b in (1, 2)}
    rates = [c.rate for c in found.candidates]
    assert rates == sorted(rates, reverse=True) and found.prompts == 3 and found.finished
    assert sorted(found.passes[1]) == [1, 2, 3, 4] and all(v > 0 for v in found.passes[2].values())
    measured = [c for c in found.candidates if c.measured is not None]
    assert {c.drafter for c in measured} == {"plain", "ngram"} and len(measured) == 3
    assert any("verifying" in line for line in told)


def test_no_round_is_predicted_to_be_faster_than_a_plain_one(pair, monkeypatch):
    monkeypatch.setattr(Costs, "of", lambda *_: 1e-6)  # the noisiest of clocks
    options = dict(drafters="ngram", num_drafts=[1], max_new_tokens=40, turns=1)
    found = specjax.plan(pair[0], PROMPTS, **options).candidates
    assert max(c.tau for c in found) > 1
    rates = {c.drafter: c.rounds_rate / c.tau for c in found}
    assert rates["ngram"] == pytest.approx(rates["plain"])


def test_an_approximate_rule_is_called_so_and_each_number_is_tried_on_its_own_text(pair):
    rule = "approximate-tolerance:top_k=40,gap=50"
    options = dict(drafters=[pair[1]], num_drafts=[1, 4], max_new_tokens=12, turns=1)
    found = specjax.plan(pair[0], PROMPTS[:1], **options, drafting=specjax.Drafting(rule=rule))
    for drafts in (True, False):  # plain decoding has no rule
        told = [one for one in found.candidates if bool(one.num_draft) == drafts]
        said = dataclasses.replace(found, candidates=told).verdict
        assert ("rule approximate-tolerance: approximate" in said) == drafts
    for one in found.candidates:
        if one.num_draft in (1, 4):
            drafting = specjax.Drafting(num=one.num_draft, rule=rule)
            common = dict(drafter=pair[1], drafting=drafting, max_new_tokens=12)
            out = specjax.generate(pair[0], PROMPTS[0], **common)
            rounds = out.stats.rounds.sum()
            assert one.tau == pytest.approx(out.stats.emitted.sum() / rounds, rel=0.01)


def test_a_drafter_whose_rounds_cannot_be_tried_again_runs_at_every_length(pair):
    window = "lookahead:window=2,ngram=3,guesses=2"
    options = dict(drafters=[window, "jacobi"], num_drafts=[1, 2, 3], max_new_tokens=12, turns=1)
    found = specjax.plan(pair[0], PROMPTS, **options)
    ways = {(c.drafter, c.num_draft): c for c in found.candidates}
    assert {*ways} == {("plain", 0), (window, 0), *(("jacobi", n) for n in (1, 2, 3))}
    assert found.drafting[1] == {}  # nothing was predicted by what drafting costs
    for (name, num), one in ways.items():
        drafting = specjax.Drafting(num=num or None)
        common = dict(drafter=name, drafting=drafting, max_new_tokens=12)
        outs = [specjax.generate(pair[0], prompt, **common) for prompt in PROMPTS]
        rounds = sum(out.stats.rounds.sum() for out in outs)
        assert one.tau == pytest.approx(sum(out.stats.emitted.sum() for out in outs) / rounds)
        assert one.predicted == (name == "plain")
        assert one.rate < 1.2 * one.rounds_rate  # one turn of a shared machine
    best = dataclasses.replace(found, candidates=[ways[window, 0]])
    assert best.options["drafting"].num is None and "as it ran" in best.verdict
    assert "lookahead:window" in str(found)


def test_predictions_agree_with_what_is_measured():
    """Loosely, since the machine of a test is shared; the exact bound is a benchmark's matter."""
    found = specjax.plan(
        specjax.load("embedded"),
        PROMPTS,
        drafters="draft",
        num_drafts=[1, 2, 3],
        max_new_tokens=32,
        turns=3,
        verify=3,
    )
    assert all(c.measured for c in found.candidates)
    errors = [abs(np.log(c.ratio / c.measured_ratio)) for c in found.candidates if c.num_draft]
    assert np.median(errors) < np.log(1.5)
    assert found.candidates[0].measured > 0.6 * max(c.measured for c in found.candidates)


def test_prompts_whose_text_ends_at_once_are_left_out_of_the_intervals(pair):
    lm, _ = pair
    firsts = [int(specjax.generate(lm, x, max_new_tokens=1).tokens[0][0]) for x in PROMPTS]
    common: dict = dict(drafters=["ngram"], num_drafts=[1], max_new_tokens=8, turns=2, seconds=1)
    assert firsts[0] != firsts[1]
    found = specjax.plan(lm, PROMPTS, stop=firsts[:1], **common)
    assert all(np.isfinite(c.interval).all() and np.isfinite(c.rate) for c in found.candidates)
    with pytest.raises(ValueError, match="prompts: each text ends with its first token"):
        specjax.plan(lm, PROMPTS, stop=firsts, **common)


def test_ctrl_c_ends_the_measuring_with_what_is_known(pair):
    def stop_at(word):
        def progress(line):
            if word in line:
                raise KeyboardInterrupt

        return progress

    options = dict(num_drafts=[1, 2, 3], max_new_tokens=8, turns=1, drafters=["ngram", pair[1]])
    found = specjax.plan(pair[0], PROMPTS, progress=stop_at(f"{pair[1].name}, 1"), **options)
    ways = {(c.drafter, c.num_draft) for c in found.candidates}
    assert not found.finished
    assert ways == {("plain", 0), *NGRAMS, (pair[1].name, 3)}
    with pytest.raises(KeyboardInterrupt):
        specjax.plan(pair[0], PROMPTS, progress=stop_at("plain"), **options)


@pytest.mark.parametrize(
    "bad, said",
    [
        (dict(num_drafts=[0]), "num_drafts=\\[0\\]: give integers from 1"),
        (dict(num_drafts=[]), "num_drafts=\\[\\]"),
        (dict(num_drafts=[2.5]), "num_drafts=\\[2.5\\]"),
        (dict(batches=[0]), "batches=\\[0\\]"),
        (dict(turns=0), "turns=\\[0\\]"),
        (dict(verify=-1), "verify=\\[-1\\]"),
        (dict(drafters=["medusa"]), "has no medusa heads of its own; pass"),
        (dict(drafters=["none"]), "'none' cannot be planned with; accepted are the names"),
        (dict(drafters=[3]), "3 cannot be planned with"),
        (dict(drafters=["no-such-name"]), "'no-such-name' is unknown"),
        (dict(drafters=["draft"]), "no draft model of its own"),
        (dict(drafters=[]), "give at least one"),
        (dict(drafters=["ngram", "ngram"]), "each once"),
        (dict(max_new_tokens=10_000), "do not fit into the context"),
        (dict(max_new_tokens=1), "max_new_tokens=1: reading a prompt emits its first token"),
        (dict(drafting=specjax.Drafting(num=3)), "give num_drafts"),
        (
            dict(drafting=specjax.Drafting(sibling_sampling="iid")),
            "none of drafters=.'ngram'. draws",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_compiles(bad, said, pair, monkeypatch):
    monkeypatch.setattr(task.GenerationTask, "start", lambda self: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=said):
        specjax.plan(pair[0], PROMPTS, **bad)
    with pytest.raises(ValueError, match="the batch is empty"):
        specjax.plan(pair[0], [])
    rows = dict(seed=[1, 2], sampling=specjax.Sampling(top_k=[3, 4]))
    with pytest.raises(ValueError, match="top_k, seed: plan decodes all prompts alike"):
        specjax.plan(pair[0], PROMPTS, **rows)


def test_a_plan_takes_the_names_of_drafters_that_generate_takes(pair, folders):
    lm = specjax.load("embedded")
    found = api._named(lm, ["medusa", "draft", "auto"])
    assert list(found) == ["medusa", "draft", "auto"] and found["auto"].drafter.name == "eagle3"
    assert isinstance(found["medusa"], HeadLM) and isinstance(found["draft"], specjax.LM)
    folder = str(folders["draft"])
    assert api._named(pair[0], folder)[folder].fingerprint == pair[1].fingerprint


def test_tokens_are_chosen_as_asked_and_the_options_say_so(pair, heads):
    for asked, own in (("top", "top"), (None, "iid")):
        drawn = specjax.Sampling(temperature=1.0)
        drafting = specjax.Drafting(sibling_sampling=asked)
        common = Options(drafting=drafting, sampling=drawn, max_new_tokens=8)
        both = {"ngram": "ngram", "heads": heads}
        survey = measure.Survey(pair[0], PROMPTS, 1, both, [2], common)
        assert survey.jobs["heads", 2][0].drafter.sibling_sampling == own
    found = made(candidate("heads"), sibling_sampling="top")
    assert found.options["drafting"] == specjax.Drafting(num=3, sibling_sampling="top")
    assert found.as_json()["options"]["sibling_sampling"] == "top"
    assert "sibling_sampling" not in made(candidate("heads")).as_json()["options"]
    table = made(candidate(), sibling_sampling="top", without_siblings=("ngram",))
    assert table.options["drafting"].sibling_sampling is None
    assert "sibling_sampling" not in table.as_json()["options"]


def test_what_cannot_be_set_back_is_refused_before_anything_runs(pair):
    target, _ = pair
    config = dataclasses.replace(target.config, window=8)
    sliding = dataclasses.replace(target, target=CausalLM(config))
    with pytest.raises(ValueError, match="longer than the window of 8"):
        specjax.plan(sliding, ["def f(x):"], drafters=["ngram"], max_new_tokens=16)
    parts = Contrastive(target.target, sliding.target)  # a draft model whose amateur has a window
    own = DraftModel(2, model=parts)
    request = SimpleNamespace(lengths=np.asarray([3]), budget=np.asarray([4]))
    work = SimpleNamespace(lm=target, drafter=own, capacity=64, request=request)
    with pytest.raises(ValueError, match="9 tokens with .* is longer than the window of 8"):
        try_rounds.check_rewinds(work)
    roomy = dataclasses.replace(target.config, window=64)  # its buffer is longer, and not its text
    roomy = dataclasses.replace(target, target=CausalLM(roomy))
    try_rounds.check_rewinds(prepared(roomy, "def f(x):", drafter="ngram", max_new_tokens=16))
    law = processors.json_text(target)
    with pytest.raises(ValueError, match="leave logits_processor= out"):
        specjax.plan(
            target,
            ["def f(x):"],
            drafters=["ngram"],
            max_new_tokens=16,
            sampling=specjax.Sampling(logits_processor=law),
        )
