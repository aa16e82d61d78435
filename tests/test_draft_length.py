"""The number of drafts that policies choose, and what it saves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, NUM, PARAMS, PROMPTS, new_tokens, pad
from test_greedy import run
from toys import like

import specjax
from specjax import Sampling
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import (
    POLICIES,
    Adaptive,
    DraftModel,
    ExLlama,
    Goodput,
    HuggingFace,
    NGram,
    Plain,
    Schedule,
    Synthetic,
    Union,
)
from specjax.drafters.draft_length import Outcome

DRAFT = DraftModel(num_draft=3, model=MODEL)
TYPICAL = jnp.asarray([1.0, 1.5, 1.8, 2.4])  # of rounds at widths 0, 1, 3, 7


def decode(drafter, weights, num=NUM, prompts=PROMPTS, **settings):
    tokens, lengths = pad(prompts)
    params = {"target": PARAMS, "drafter": weights}
    settings = {"key": jax.random.key(0), "max_new_tokens": num, **settings}
    return specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


def paid(out, drafter, costs):
    """Cost of all rounds of a batch of one, in plain rounds for the same tokens."""
    rounds = out.stats.rounds_by_width
    at = [min(i for i, w in enumerate(drafter.widths) if w >= n) for n in range(len(rounds))]
    costs = np.asarray(costs)
    return (rounds * costs[at]).sum() / (costs[0] * np.asarray(out.stats.emitted).sum())


def truth_of(num, prompts=PROMPTS[2:3]):
    return decode(Plain(), None, num, prompts).tokens


def synthetic(truth, num, costs=TYPICAL, policy=Goodput(), accuracy=1.0):
    """Decodes one row with a drafter of this accuracy about ``truth``: ``(out, drafter)``."""
    drafter = Adaptive(Synthetic(7, accuracy), policy)
    weights = {"inner": {"truth": truth, "inner": None}, "costs": costs}
    out = decode(drafter, weights, num, PROMPTS[2:3])
    assert (np.asarray(out.tokens) == np.asarray(truth_of(num))).all()
    return out, drafter


def test_a_good_drafter_is_soon_used_at_full_width():
    out, _ = synthetic(truth_of(149), 149)  # so many that the last round drafts, too
    rounds = out.stats.rounds_by_width
    assert rounds[7] >= 0.8 * rounds.sum() and rounds[0] == 0
    assert out.stats.tau > 6.5


def test_a_hopeless_drafter_costs_little_and_is_probed_ever_more_seldom():
    num = 600
    drafter = Adaptive(Synthetic(7, 0.0))
    tokens, lengths = pad(PROMPTS[2:3])
    weights = {"inner": {"truth": truth_of(num), "inner": None}, "costs": TYPICAL}
    probes, before = [], 0
    for step, seen in enumerate(
        specjax.stream(
            MODEL,
            drafter,
            {"target": PARAMS, "drafter": weights},
            tokens,
            lengths,
            key=jax.random.key(0),
            max_new_tokens=num,
        )
    ):
        probes += [step] if int(seen.stats.drafted[0]) > before else []
        before = int(seen.stats.drafted[0])
    waits = np.diff(probes).tolist()
    # the first round, of width 3, costs 0.8 plain ones more: at 2 % for probes 40 of them follow
    assert waits == [41, 81, 129, 129, 129]
    assert paid(seen, drafter, TYPICAL) < 1.05


def spent(accepted, costs, num, policy=Goodput(), drafted=(0, 1, 3, 7)):
    """Cost of ``num`` tokens of a row that keeps ``accepted`` drafted tokens, in plain rounds."""
    choose, update = jax.jit(policy.choose, static_argnums=1), jax.jit(policy.update)
    memory, one, cost = policy.init(1, drafted[-1]), jnp.ones((1,), jnp.int32), 0.0
    while num > 0:
        width, memory = choose(memory, drafted, jnp.asarray(costs), num * one)
        kept = min(accepted, int(width), num - 1)
        offered = jnp.minimum(width, num) * one
        outcome = Outcome(width=width * one, offered=offered, accepted=kept * one, live=one > 0)
        memory = update(memory, outcome)
        cost, num = cost + costs[drafted.index(int(width))] / costs[0], num - kept - 1
    return cost


@pytest.mark.parametrize("num", [8, 20, 33, 60, 130])
def test_probes_cost_two_in_a_hundred_at_most_however_short_the_text(num):
    assert spent(0, [1.0, 2.6, 2.9, 4.1], num) <= 1.02 * num + 1e-3
    assert spent(0, [2.0, 3.6, 4.6, 8.0], num) <= 1.02 * num + 1e-3


def test_a_drafter_that_pays_is_found_in_a_text_in_which_a_probe_costs_little():
    """One round of width 3 is not worth its cost by the prior, and shows what drafts are worth."""
    costs = [1.0, 2.1, 2.4, 3.9]
    assert spent(7, costs, 128) < 0.7 * 128
    assert spent(7, costs, 32) == 32  # a probe would cost more than 2 % of so few tokens


def test_a_width_that_loses_even_if_all_is_kept_is_not_probed():
    truth = truth_of(200)
    dear, _ = synthetic(truth, 200, costs=jnp.asarray([1.0, 2.0, 4.0, 8.1]))
    assert not dear.stats.drafted.any()
    some, _ = synthetic(truth, 200, costs=jnp.asarray([1.0, 2.0, 3.5, 8.1]))
    assert some.stats.rounds_by_width[7] == 0 and some.stats.drafted.any()


@pytest.mark.parametrize(("rows", "lag", "drafts"), [(1, 0.1, True), (8, 0.1, False), (8, 0, True)])
def test_nor_one_that_a_batch_would_not_draft_even_if_all_was_kept(rows, lag, drafts):
    """Two tokens for 1.9 steps are more than one a step, and less than 1.0875."""
    policy, budget = Goodput(min_gain=lag), jnp.full((rows,), 60)
    width, _ = policy.choose(policy.init(rows, 1), (0, 1), jnp.asarray([1.0, 1.9]), budget)
    assert (width > 0) == drafts


def test_a_drafter_that_becomes_good_within_a_text_is_found_again():
    num, change = 400, 200
    truth = np.array(truth_of(num))
    truth[:, :change] = (truth[:, :change] + 1) % 13  # what it knows of the first half is wrong
    out, _ = synthetic(jnp.asarray(truth), num)
    kept = np.asarray(out.from_draft)[0, 9:]
    assert kept[: change - 10].mean() < 0.1
    assert kept[change + 140 :].mean() > 0.8  # the longest interval between probes later


def test_an_ngram_drafter_recovers_when_the_text_begins_to_repeat():
    """The toy's greedy text runs into a loop by itself: first nothing matches, then everything."""
    drafter = Adaptive(NGram(num_draft=7, longest=3, shortest=1))
    weights = {"inner": None, "costs": jnp.asarray([1.0, 1.3, 1.5, 2.5])}
    out = decode(drafter, weights, 200, PROMPTS[2:3])
    late = np.asarray(out.from_draft)[0, -60:]
    assert late.mean() > 0.7
    assert paid(out, drafter, weights["costs"]) < 0.75


def test_the_width_with_the_best_goodput_is_chosen():
    """Acceptance 0.7 a position: the best width by enumeration, most of the time."""
    for costs in ([1, 1.2, 1.6, 2.2], [1, 1.05, 1.1, 1.2], [1, 1.4, 2.6, 4.0]):
        survive = np.cumsum(0.7 ** np.arange(8))
        expected = {w: survive[w] / c for w, c in zip((0, 1, 3, 7), costs, strict=True)}
        out, _ = synthetic(truth_of(300), 300, jnp.asarray(costs, jnp.float32), accuracy=0.7)
        rounds = out.stats.rounds_by_width
        good = sum(
            rounds[w] for w, rate in expected.items() if rate > 0.95 * max(expected.values())
        )
        assert good > 0.7 * rounds.sum(), (costs, expected, rounds)


def test_in_a_batch_the_sum_over_the_rows_decides():
    """One good row among hopeless ones does not pay for a wide round; several do."""
    policy, widths = Goodput(), (0, 3)
    costs = jnp.asarray([1.0, 2.0])
    for good, drafts in ((1, False), (6, True)):
        memory = policy.init(8, 3)
        accepted = jnp.where(jnp.arange(8) < good, 3, 0)
        for _ in range(20):
            width, memory = policy.choose(memory, widths, costs, jnp.full((8,), 50))
            asked = jnp.full((8,), width)
            kept = jnp.minimum(asked, accepted)
            outcome = Outcome(width=asked, offered=asked, accepted=kept, live=asked >= 0)
            memory = policy.update(memory, outcome)
        assert (width > 0) == drafts
        # rows that are finished have no say
        alone = jnp.where(jnp.arange(8) < good, 50, 0)
        assert policy.choose(memory, widths, costs, alone)[0] == 3


def test_a_batch_drafts_only_if_that_makes_up_for_its_slowest_row():
    """1.94 tokens a round at the cost of 1.82: enough for one row, not for eight."""
    widths, costs = (0, 1), jnp.asarray([1.0, 1.82])
    for rows, lag, drafts in ((1, 0.1, True), (8, 0.1, False), (8, 0.0, True)):
        policy = Goodput(min_gain=lag, fade_rounds=64.0)
        memory, drafted = policy.init(rows, 1), 0
        one, live = jnp.ones((rows,), jnp.int32), jnp.ones((rows,), bool)
        for step in range(400):
            width, memory = policy.choose(memory, widths, costs, 64 * one)
            kept = jnp.minimum(int(width), int(step % 17 > 0)) * one
            asked = width * one
            outcome = Outcome(width=asked, offered=asked, accepted=kept, live=live)
            memory = policy.update(memory, outcome)
            drafted += step >= 300 and int(width) > 0
        assert (drafted > 50) == drafts, (rows, lag, drafted)


class Demanding(Goodput):
    """One whose every row asks for a gain."""

    def hurdle(self, live):
        return 1.1 * super().hurdle(live)


@pytest.mark.parametrize(
    "policy", [Goodput(), Goodput(min_gain=0.5), Schedule(), Demanding()], ids=str
)
def test_something_may_pay_exactly_where_a_drafter_that_is_always_right_is_asked(policy):
    """Where one row is left, any gain is enough for the usual policies; a batch must gain more."""
    widths, random, found = (0, 1, 3, 7), np.random.default_rng(0), []
    for rows in (1, 8):
        sure, every = jnp.full((rows, 7), 1e9), jnp.full((rows,), 60)
        memory = policy.init(rows, 7)
        memory = dataclasses.replace(memory, hits=sure, tries=sure, offers=every, asked=every)
        last = every.at[1:].set(0)
        for slope in random.uniform(0.7, 1.3, 20):
            costs = np.float32(1 + slope * np.asarray(widths) * random.uniform(0.9, 1.1, 4))
            pays = policy.may_pay(widths, costs)
            width = policy.choose(memory, widths, jnp.asarray(costs), last)[0]
            assert (int(width) > 0) == pays, (rows, costs)
            width = policy.choose(memory, widths, jnp.asarray(costs), every)[0]
            assert pays or not int(width), (rows, costs)
            found.append(pays)
    assert 5 < sum(found) < 35
    assert Schedule(rests=False).may_pay(widths, np.float32([1, 9, 9, 9]))  # it always drafts
    assert HuggingFace().may_pay(widths, np.float32([1, 9, 9, 9]))  # it knows no costs


def test_a_probe_of_a_batch_that_does_not_make_up_for_its_slowest_row_has_lost():
    policy, one = Goodput(min_gain=0.2), jnp.ones((2,), jnp.int32)
    memory = policy.init(2, 3)
    for price, lost in ((1.3, False), (1.4, True)):  # 1.5 tokens a row, 1.1 times as many asked
        kept = jnp.asarray([1, 0])
        outcome = Outcome(width=3 * one, offered=3 * one, accepted=kept, live=one > 0)
        after = policy.update(dataclasses.replace(memory, price=price * one), outcome)
        assert (after.lost == lost).all()


def test_rounds_without_a_proposal_are_no_evidence():
    policy = Goodput()
    memory = policy.init(1, 3)
    one = jnp.ones((1,), jnp.int32)
    nothing = Outcome(width=3 * one, offered=0 * one, accepted=0 * one, live=one > 0)
    after = memory
    for _ in range(30):
        after = policy.update(after, nothing)
    assert (policy.rates(after, one > 0) == policy.rates(memory, one > 0)).all()
    assert not after.lost.any()


def test_what_others_had_accepted_is_no_evidence_either():
    truth, (tokens, lengths) = truth_of(NUM), pad(PROMPTS[2:3])
    wrong = Adaptive(Synthetic(3, 0.0), HuggingFace(start=3))
    drafter = Union(drafters=(Synthetic(3, 1.0), wrong))
    truth = {"truth": truth, "inner": None}
    params = {"target": PARAMS, "drafter": (truth, {"inner": truth})}
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), 12, Sampling(), None, ()
    )
    state = loop.jit_start(MODEL, drafter, "auto", capacity, params, request)
    state = loop.jit_burst(MODEL, drafter, "auto", 3, params, state)
    assert int(state.stats.accepted.sum()) == 9
    assert (jax.tree.leaves(state.drafter_state.inner[1].memory)[0] == 1).all()


def test_a_budget_of_one_is_never_drafted_for():
    out = decode(
        Adaptive(DRAFT), {"inner": like(PARAMS, 1), "costs": jnp.asarray([1.0, 1.01, 1.02])}, 1
    )
    assert int(out.stats.drafted.sum()) == 0


@pytest.mark.parametrize(
    ("accepted", "wishes"), [(7, [4, 6, 7, 7, 7]), (0, [4, 3, 2, 1, 1]), (3, [4, 3, 5, 4, 3])]
)
def test_hugging_faces_schedule(accepted, wishes):
    policy, got = HuggingFace(start=4), []
    memory = policy.init(1, 7)
    one = jnp.ones((1,), jnp.int32)
    for _ in wishes:
        width, memory = policy.choose(memory, (0, 7), jnp.ones(2), 50 * one)
        got.append(int(width))
        kept = jnp.minimum(accepted, width) * one
        outcome = Outcome(width=width * one, offered=width * one, accepted=kept, live=one > 0)
        memory = policy.update(memory, outcome)
    assert got == wishes


def exllama(accepted, rounds, most=7):
    """ExLlamaV3's window as written there, in Python: what each round asks for."""
    average, skipped, asked = None, 0, []
    for _ in range(rounds):
        if average is None:
            wish = most
        elif average < 0.3:
            skipped += 1
            wish = 0 if skipped < 16 else min(2, most)
            skipped = 0 if skipped >= 16 else skipped
        else:
            skipped, wish = 0, max(1, min(most, int(np.ceil(np.float32(average)))))
        asked.append(wish)
        if wish:
            kept = min(accepted(len(asked)), wish)
            kept += kept >= wish
            share = np.float32(1.3 if average is not None and kept > average else 0.65)
            average = kept if average is None else share * kept + (1 - share) * average
    return asked


def test_exllamas_window():
    policy = ExLlama()
    choose, update = jax.jit(policy.choose, static_argnums=1), jax.jit(policy.update)
    one = jnp.ones((1,), jnp.int32)
    for accepted in (lambda n: 9, lambda n: 0, lambda n: n % 5, lambda n: 0 if n < 40 else 3):
        memory, got = policy.init(1, 7), []
        for n in range(1, 81):
            width, memory = choose(memory, (0, 7), jnp.ones(2), 50 * one)
            got.append(int(width))
            kept = jnp.minimum(accepted(n), width) * one
            outcome = Outcome(width=width * one, offered=width * one, accepted=kept, live=one > 0)
            memory = update(memory, outcome)
        assert got == exllama(accepted, 80)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_gives_the_targets_text(policy):
    drafter = Adaptive(DraftModel(num_draft=7, model=MODEL), policy())
    out = decode(drafter, {"inner": like(PARAMS, 1), "costs": TYPICAL})
    assert new_tokens(out, PROMPTS) == new_tokens(run("plain", PROMPTS), PROMPTS)
    assert out.stats.drafter == "adaptive(draft)"
