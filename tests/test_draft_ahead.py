"""Drafts that are drawn while the target verifies: PEARL, speculative speculative decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, NUM, PARAMS, PROMPTS, new_tokens, pad, plain_texts, rebuilt, start, step
from test_sampled import MODEL as SMALL
from test_sampled import PARAMS as WEIGHTS
from test_sampled import WARM, beginnings, exact, lawful, sample, tokens_of
from toys import bag, like

import specjax
from specjax import Sampling, trees
from specjax.acceptance import RULES
from specjax.acceptance.guess import with_guess, without_guess
from specjax.acceptance.node_laws import DraftLaw
from specjax.analysis import exact_law
from specjax.analysis.overlap import modelled_overlap
from specjax.decoding import round
from specjax.decoding import stats as stats_of
from specjax.decoding.device_groups import decode_on_groups
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.loop import jit_extend
from specjax.drafters import PEARL, SSD, DraftModel
from specjax.drafters.ssd import geometric_fan_out
from specjax.models import CausalLM, DecoderConfig
from specjax.types import Draft, Guess, Rule

NEAR, SAME = like(PARAMS, 1), PARAMS
HALF = like(WEIGHTS, 1)


# --------------------------------------------------------------------------------- the guess


@dataclasses.dataclass(frozen=True)
class LastIsAGuess(Rule):
    """Judges a chain whose last token is a guess; of the law after it nothing is known."""

    rule: Rule
    name = "guess"
    lossless = True

    def __call__(self, params, draft, target_law, draft_law, key):
        last, laws = draft.num_nodes - 1, draft.laws
        guess = Guess(token=draft.tokens[:, last], law=None if laws is None else laws[:, last - 1])
        short = trees.narrow(draft, last)
        if laws is not None:
            short = dataclasses.replace(short, laws=laws[:, : last - 1] if last > 1 else None)
            short = dataclasses.replace(short, law=short.law if last > 1 else None)
        judged, place = with_guess(dataclasses.replace(short, guess=guess))
        vocab = target_law.laws.shape[2]
        p = exact_law.NodeLaw(target_law.laws.at[:, last].set(1 / vocab))
        verdict = self.rule(params, judged, p, DraftLaw(judged, vocab), key)
        # the enumeration is given weights in place of the last token, and tells verdicts apart by
        # their nodes; so the guess stays a node, and the next round's law stands after it
        taken = verdict.count == place
        after = target_law(jnp.full_like(verdict.count, last))
        weights = jnp.round(after * exact_law.SCALE).astype(jnp.int32)
        bare = dataclasses.replace(verdict, token=jnp.zeros_like(verdict.count))
        bare = without_guess(bare, judged, place)
        return dataclasses.replace(
            verdict,
            count=bare.count + (taken & (bare.token == guess.token)),
            token=jnp.where(taken[:, None], weights, verdict.token),
        )


@pytest.mark.parametrize("accepted", [0, 1], ids=["pre-verify", "post-verify"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_guess_leaves_the_law_as_it_is_and_is_taken_as_often_as_can_be(rule, accepted):
    p, q = exact_law.Table(0), exact_law.Table(1)
    topology = trees.chain_parents(accepted + 1)
    draft, weights = exact_law.drafts(q, topology, "iid")
    law, _ = exact_law.outcome(LastIsAGuess(RULES[rule]), draft, weights, p, accepted + 1)
    assert exact_law.distance(law, p) < 1e-6
    if rule == "rejection" and not accepted:  # the guess is a candidate of the usual rule
        own, kept = exact_law.outcome(RULES[rule], draft, weights, p, 1)
        np.testing.assert_allclose(law, own, atol=1e-6)
        assert kept == pytest.approx(np.minimum(p(()), q(())).sum(), abs=1e-6)


def test_nothing_after_an_absent_token_is_a_candidate_beside_the_guess():
    tokens = jnp.asarray([[5, 1, -1, 2], [5, 1, 3, 2]])
    chain = Draft(start=jnp.zeros(2, jnp.int32), tokens=tokens, topology=trees.chain_parents(3))
    guess = Guess(token=jnp.asarray([4, 4]), law=None)
    judged, place = with_guess(dataclasses.replace(chain, guess=guess))
    np.testing.assert_array_equal(place, [2, 4])
    np.testing.assert_array_equal(judged.tokens[:, 1:], [[1, 4, 2, 0], [1, 3, 2, 4]])
    np.testing.assert_array_equal(judged.candidate[:, 1:], [[1, 1, 0, 0], [1, 1, 1, 1]])


@dataclasses.dataclass(frozen=True)
class After:
    """The laws of a table after some tokens."""

    table: exact_law.Table
    begin: tuple

    vocab = property(lambda self: self.table.vocab)

    def __call__(self, prefix):
        return self.table(self.begin + prefix)


def judged_alone(rule, p, q):
    """How probably each drafted token passes its test, and what is drawn if it does not."""
    drafts, weights = exact_law.drafts(q, trees.chain_parents(1), "iid")
    passes, rests = [], []
    for row in range(len(weights)):
        only = jax.tree.map(lambda x, row=row: x[row : row + 1], drafts)
        law, accepted = exact_law.outcome(rule, only, np.ones(1), p, 1)
        rest = law.sum(axis=1)
        rest[row] -= accepted
        passes.append(accepted)
        rests.append(rest / max(1 - accepted, 1e-9))
    return np.asarray(passes), np.asarray(rests)


def test_fault_one_random_number_in_pre_verify_and_the_round_after_it_changes_the_exact_law():
    """The released PEARL reseeds before each test: pre-verify and the post-verify after it test
    with one number. Two rounds, enumerated: both numbers independent, or one for both."""
    p, q = exact_law.Table(0), exact_law.Table(1)
    first, other = judged_alone(LastIsAGuess(RULES["rejection"]), p, q)
    laws = {"independent": np.zeros((p.vocab, p.vocab)), "released": np.zeros((p.vocab, p.vocab))}
    for guess, passed in enumerate(first):
        second, rest = judged_alone(RULES["rejection"], After(p, (guess,)), After(q, (guess,)))
        rejected = (1 - passed) * other[guess][:, None] * [p((x,)) for x in range(p.vocab)]
        for name, law in laws.items():
            both = passed * second if name == "independent" else np.minimum(passed, second)
            drafted = q((guess,)) * both
            drafted += (q((guess,)) * (passed - both)) @ rest
            law += q(())[guess] * rejected
            law[guess] += q(())[guess] * drafted
    assert exact_law.distance(laws["independent"], p) < 1e-6
    assert exact_law.distance(laws["released"], p) > 0.01
    assert laws["released"].sum() == pytest.approx(1)


# ---------------------------------------------------------------------------- the whole loop


class Misses(SSD):
    """Whose outcomes never come true."""

    def found(self, outcomes, segment, old):
        ready = super().found(outcomes, segment, old)
        return dataclasses.replace(ready, count=jnp.zeros_like(ready.count))


class PreVerifies(PEARL):
    """Which is never in post-verify."""

    def found(self, outcomes, segment, old):
        ready = super().found(outcomes, segment, old)
        return dataclasses.replace(ready, count=jnp.zeros_like(ready.count))


ALL = SMALL.vocab_size
FORCED = {  # name: (drafter, weights, whether every round but the first is a hit)
    "pearl": (PEARL(2, model=SMALL), HALF, None),
    "pearl, always post-verify": (PEARL(2, model=SMALL), WEIGHTS, True),
    "pearl, always pre-verify": (PreVerifies(2, model=SMALL), HALF, False),
    "ssd": (SSD(2, model=SMALL, fan_out=(2, 1, 1)), HALF, None),
    "ssd, always a hit": (SSD(2, model=SMALL, fan_out=ALL), HALF, True),
    "ssd, always a miss": (Misses(2, model=SMALL, fan_out=(2, 1, 1)), HALF, False),
}


@pytest.mark.parametrize("name", FORCED)
def test_the_law_is_the_targets_whether_outcomes_are_hit_or_missed(name, hurried):
    drafter, weights, hits = FORCED[name]
    num = tokens_of(drafter) + 1  # so that a round after a hit is among them
    rows = 50_000 if hurried else 200_000
    counts, stats = sample(drafter, weights, "rejection", WARM, rows=rows, num=num)
    law = exact("warm", num)
    assert lawful(counts, law) and lawful(beginnings(counts), beginnings(law))
    # PEARL drafts where it hit, SSD is ready there
    rounds, hidden = int(stats.rounds.sum()), int(stats.hidden.sum())
    hit = int(stats.drafted_at[:, 0].sum()) if isinstance(drafter, PEARL) else hidden
    if isinstance(drafter, PEARL):
        assert hidden == rounds
    if hits is None:
        assert rounds / 10 < hit < rounds - rows
    elif isinstance(drafter, PEARL):  # a budget of one token leaves nothing to draft
        assert hit == 0 if not hits else hit > (rounds - rows) / 2
    else:
        assert hit == (rounds - rows) * hits


def test_the_whole_loop_with_the_random_numbers_of_the_released_pearl_has_another_law(monkeypatch):

    def released(state):
        after = (state.drafter_state.ready.count > 0).astype(jnp.int32)
        place = 2 * (state.length - 1 - after) + round.ACCEPT
        return jax.vmap(jax.random.fold_in)(state.key, place)

    monkeypatch.setattr(round, "acceptance_keys", released)
    counts, _ = sample(PEARL(1, model=SMALL), HALF, "rejection", WARM, rows=50_000, num=2)
    assert not lawful(counts, exact("warm", 2))


# ---------------------------------------------------------------------- schedule and statistics


def decoded(drafter, weights, **settings):
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": weights}
    given = dict(key=jax.random.key(0), max_new_tokens=NUM) | settings
    out = specjax.decode(MODEL, drafter, params, tokens, lengths, **given)
    return new_tokens(out, PROMPTS), jax.tree.map(np.asarray, out.stats)


def test_pearl_verifies_the_root_alone_after_a_rejection_and_hides_every_round():
    texts, stats = decoded(PEARL(2, model=MODEL), SAME)
    assert texts == plain_texts()
    assert (stats.rounds == 1 + -(-(NUM - 1) // 3)).all()  # the first round emits one token
    assert (stats.hidden == stats.rounds).all()
    assert (stats.drafted_at[:, 0] == stats.rounds - 1).all()
    assert f"drafting hidden in {stats.rounds.sum()}" in str(stats)


def test_ssd_runs_the_rounds_of_its_draft_model_and_hides_those_it_expected():
    for weights in (NEAR, SAME):
        texts, own = decoded(DraftModel(2, model=MODEL), weights)
        ahead, stats = decoded(SSD(2, model=MODEL, fan_out=2), weights)
        assert ahead == texts == plain_texts()
        for counter in ("rounds", "emitted", "drafted", "accepted"):
            assert (getattr(own, counter) == getattr(stats, counter)).all()
        assert not own.hidden.any() and (stats.hidden < stats.rounds).all()
        assert stats.hidden.any()
        if weights is SAME:
            assert (stats.hidden == stats.rounds - 1).all()


@pytest.mark.parametrize("drafter", [PEARL(2, model=MODEL), SSD(2, model=MODEL, fan_out=2)])
def test_after_any_round_the_draft_model_knows_the_text_and_no_more(drafter):
    tokens, lengths = pad(PROMPTS)
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, Sampling(), None, ()
    )
    params = {"target": PARAMS, "drafter": NEAR}
    state = start(MODEL, drafter, "auto", capacity, params, request)
    for _ in range(4):
        state = step(MODEL, drafter, "auto", 1, params, state)
        known = state.drafter_state.model
        live = np.asarray(state.budget) > 0
        assert (np.asarray(known.filled) == np.asarray(state.length) - 2)[live].all()
        used = (jnp.arange(known.cache.shape[2]) < known.filled[:, None])[:, None, :, None]
        expected = rebuilt(NEAR, state.tokens, known.filled)
        difference = jnp.where(used, known.cache - expected, 0)[live]
        assert float(jnp.abs(difference).max()) < 1e-5


class Keeps(SSD):
    """Which takes what it drafted for the old text for the draft of a new prompt."""

    def sync(self, params, target_params, state, context, *, before="prompt"):
        after = super().sync(params, target_params, state, context, before=before)
        return dataclasses.replace(after, ready=state.ready)


@pytest.mark.parametrize("kind", [SSD, Keeps])
def test_nothing_is_ready_or_hidden_in_the_first_round_after_the_next_prompt(kind):
    drafter = kind(2, model=MODEL, fan_out=MODEL.vocab_size)
    params = {"target": PARAMS, "drafter": SAME}

    def request(tokens):
        tokens, lengths = np.asarray([tokens], np.int32), np.asarray([len(tokens)], np.int32)
        given = jax.random.key(0), 7, Sampling(), 40, ()  # the first token, two whole rounds
        return prepare_inputs(MODEL, drafter, tokens, lengths, *given)

    begun, capacity = request([1, 2, 3])
    state = start(MODEL, drafter, "auto", capacity, params, begun)
    state = step(MODEL, drafter, "auto", 100, params, state)
    assert state.drafter_state.ready.count.tolist() == [2]  # for a text that does not go on
    state = jit_extend(MODEL, drafter, "auto", params, state, request([7, 8, 9])[0])
    ready, before = state.drafter_state.ready.count.tolist(), int(state.stats.hidden.sum())
    state = step(MODEL, drafter, "auto", 1, params, state)
    hidden = int(state.stats.hidden.sum()) - before
    assert (ready, hidden) == (([0], 0) if kind is SSD else ([2], 1))


def test_what_cannot_be_drafted_ahead_is_refused_before_anything_is_compiled():
    for kind in (PEARL, SSD):
        with pytest.raises(ValueError, match="at least 1"):
            kind(0, model=MODEL)
        with pytest.raises(ValueError, match="it drafts chains"):
            kind(model=MODEL, topology=trees.branching(2, 1))
        with pytest.raises(ValueError, match="no siblings"):
            kind(2, model=MODEL, sibling_sampling="distinct")
        with pytest.raises(ValueError, match="drafts no trees"):
            kind(2, model=MODEL).with_topology(trees.branching(2, 1))
        with pytest.raises(ValueError, match="drafts in a way of its own"):
            specjax.drafters.Cascade(kind(2, model=MODEL), DraftModel(1, model=MODEL))
        with pytest.raises(ValueError, match="taken back where the target"):
            specjax.drafters.Cascade(DraftModel(2, model=MODEL), kind(1, model=MODEL))
    for wrong in ((1, 1), (-1, 1, 1), 0, (0, 0, 0)):
        with pytest.raises(ValueError, match="give 3 numbers from 0 up"):
            SSD(2, model=MODEL, fan_out=wrong)
    with pytest.raises(ValueError, match="the vocabulary has"):
        SSD(2, model=bag(4, 0)[0], fan_out=5)
    config = DecoderConfig(
        vocab_size=5,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        max_positions=64,
        cache_window=6,
        sinks=1,
    )
    with pytest.raises(ValueError, match="window of 6 tokens.*9 nodes"):
        SSD(2, model=CausalLM(config), fan_out=1)


# --------------------------------------------------------------------------------- the model


def test_a_fan_out_has_its_sum_and_the_fewest_misses():
    chance = np.asarray([0.2 * 0.8**k for k in range(4)] + [0.8**4])

    def misses(fan_out):
        return float((chance / np.maximum(fan_out, 0.5)).sum())

    for total in (5, 12, 20):
        found = geometric_fan_out(total, 4, 0.8)
        assert sum(found) == total and misses(found) <= misses([total // 5] * 5)
    assert found[-1] > found[0] > found[3]
    for wrong in ((0, 4, 0.8), (8, 4, 1.0), (8, 4, 0.5, 0.0)):
        with pytest.raises(ValueError, match="geometric_fan_out"):
            geometric_fan_out(*wrong)


def test_the_modelled_time_of_a_round_is_its_longer_half_and_what_a_miss_adds():
    counted = dict(rounds=np.asarray([10]), hidden=np.asarray([8]), emitted=np.asarray([30]))
    stats = dataclasses.replace(stats_of.start(1, 2), **counted)
    parts = dict(verify=4.0, draft_pass=1.0, ahead_pass=1.5)
    slow = modelled_overlap(SSD(2, model=MODEL), stats, **parts)
    assert slow.seconds == pytest.approx(10 * 4.5 + 2 * 2.0) and slow.waits == "target"
    assert slow.seconds_per_token == pytest.approx(slow.seconds / 30) and slow.hidden == 0.8
    every = dataclasses.replace(stats, hidden=stats.rounds)
    parts["ahead_pass"] = 1.0
    fast = modelled_overlap(PEARL(2, model=MODEL), every, **parts)
    assert fast.seconds == pytest.approx(10 * 4.0) and fast.waits == "drafter"
    assert "modelled" in str(fast)
    with pytest.raises(ValueError, match="verify=0"):
        modelled_overlap(PEARL(2, model=MODEL), stats, verify=0, draft_pass=1.0, ahead_pass=1.0)


# ------------------------------------------------------------------- two groups of devices


def on_groups(drafter, given, new, **settings):
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": NEAR}
    options = dict(key=jax.random.key(0), max_new_tokens=new) | settings
    out = decode_on_groups(MODEL, drafter, params, tokens, lengths, **options, **given)
    return new_tokens(out, PROMPTS), jax.tree.map(np.asarray, out.stats), out.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [PEARL(2, model=MODEL), SSD(2, model=MODEL, fan_out=2)])
def test_two_groups_of_devices_say_what_one_device_says(drafter, temperature):
    one, other = jax.devices()[:2]
    sampling = (
        Sampling(temperature=np.full(len(PROMPTS), temperature, np.float32))
        if temperature
        else None
    )
    settings = {"sampling": sampling} if temperature else {}
    texts, stats = decoded(drafter, NEAR, **settings)
    groups = dict(target_devices=[one], draft_devices=[other])
    apart, counted, tokens = on_groups(drafter, groups, NUM, **settings)
    assert apart == texts
    assert temperature or texts == plain_texts()
    assert (counted.rounds == stats.rounds).all() and (counted.hidden == stats.hidden).all()
    assert tokens.devices() == {one}


def test_two_groups_decode_in_programs_of_any_arithmetic():
    """Under ``jax_enable_x64`` a sum of int32 is int64, and strict promotion refuses much."""
    one, other = jax.devices()[:2]
    groups = dict(target_devices=[one], draft_devices=[other])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        apart, _, tokens = on_groups(PEARL(2, model=MODEL), groups, NUM)
    assert apart == plain_texts() and tokens.dtype == jnp.int32


def test_groups_that_overlap_are_refused_before_anything_is_compiled():
    device = jax.devices()[0]
    groups = dict(target_devices=[device], draft_devices=[device])
    with pytest.raises(ValueError, match="share .*separate devices only"):
        on_groups(PEARL(2, model=MODEL), groups, 1)
    with pytest.raises(ValueError, match="draft_devices=.*at least one"):
        on_groups(PEARL(2, model=MODEL), groups | {"draft_devices": []}, 1)
    with pytest.raises(ValueError, match="target_devices=.*give a list of devices"):
        on_groups(PEARL(2, model=MODEL), groups | {"target_devices": device}, 1)


def test_groups_over_several_processes_are_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    groups = dict(target_devices=jax.devices()[:1], draft_devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="here are 2: .*use specjax.decode.mesh="):
        on_groups(PEARL(2, model=MODEL), groups, 1)
