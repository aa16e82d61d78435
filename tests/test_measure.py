"""The instruments: what they time, what they state, what they refuse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import prepared
from flax import nnx

from specjax.analysis import replay, round_timing, timing
from specjax.checkpoints import HeadLM
from specjax.decoding.state import result
from specjax.drafters import medusa

pytest_plugins = ["pairs"]
ROUNDS = 3


@pytest.fixture
def clock(monkeypatch):
    """A clock that only ``clock(seconds)`` moves."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_alternate_calls_in_turn_rotates_who_is_first_and_drops_the_warmup(clock):
    order, costs = [], {"a": itertools.count(1), "b": itertools.count(10)}

    def call(name):
        order.append(name)
        clock(next(costs[name]))

    seconds = timing.alternate(
        {name: lambda name=name: call(name) for name in costs}, repetitions=3, warmup=1
    )
    assert seconds["a"].tolist() == [2, 3, 4] and seconds["b"].tolist() == [11, 12, 13]
    turns = [tuple(order[i : i + 2]) for i in range(0, 8, 2)]
    assert sorted(turns) == [("a", "b")] * 2 + [("b", "a")] * 2 and turns[0] != turns[1]


def test_a_call_is_timed_without_its_preparation_and_divided_by_its_times(clock):
    def prepare():
        clock(100)
        return 6

    seconds = timing.alternate({"x": timing.Call(clock, prepare, times=3)}, repetitions=2, warmup=0)
    assert seconds["x"].tolist() == [2, 2]


def test_alternate_waits_for_what_runs_in_the_background(monkeypatch):
    waited, value = [], jnp.ones(3)
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda x: waited.append(x) or x)
    timing.alternate({"x": lambda: value}, repetitions=1, warmup=0)
    assert waited == [value]


@pytest.mark.parametrize("bad", [dict(calls={}), dict(repetitions=0), dict(warmup=-1)])
def test_alternate_refuses_what_measures_nothing(bad):
    arguments = dict(calls={"x": lambda: 0}, repetitions=1, warmup=0) | bad
    with pytest.raises(ValueError, match="at least"):
        timing.alternate(arguments.pop("calls"), **arguments)


def test_the_interval_of_a_median_has_the_confidence_it_states():
    ratio, interval, confidence = timing.median_interval(np.arange(9.0))
    assert (ratio, interval) == (4.0, (1.0, 7.0))
    assert confidence == pytest.approx(1 - 2 * (1 + 9) / 2**9)
    draws = np.random.default_rng(0).exponential(size=(4000, 9))
    covered = [low <= np.log(2) <= high for _, (low, high), _ in map(timing.median_interval, draws)]
    assert np.mean(covered) == pytest.approx(confidence, abs=0.015)  # 4.9 standard errors
    for count in (63, 64, 65, 66, 67, 1100):  # from 64 on, sums of binomials exceed 64 bits
        median, (low, high), confidence = timing.median_interval(np.arange(float(count)))
        assert low < median < high and median - low == high - median
        assert 0.95 <= confidence < 0.98 and high - low == pytest.approx(2 * count**0.5, rel=0.2)


def test_ratio_is_of_pairs_so_that_a_slow_spell_of_both_leaves_it_alone():
    b = np.asarray([1.0, 1.0, 50.0, 1.0, 7.0, 1.0, 1.0])
    assert timing.ratio(2 * b, b)[:2] == (2.0, (2.0, 2.0))
    with pytest.raises(ValueError, match="pairs"):
        timing.ratio(b, b[1:])


def test_a_pass_is_as_long_as_asked_and_over_as_many_nodes(pair):
    call = timing.pass_call(pair[0], 5, batch=2, length=40, capacity=64, lasting=0.0)
    assert call.times == 1 and call().shape == (2, 5)
    longer = timing.pass_call(pair[0], 1, length=40, capacity=64, lasting=10.0)
    assert longer.times == timing.MOST_TIMES
    asked = timing.pass_call(pair[0], 1, length=40, capacity=64, lasting=10.0, times=3)
    assert asked.times == 3 and asked().shape == (1, 1)
    seconds = timing.pass_seconds(pair[0], [1, 4], length=40, capacity=64, repetitions=2)
    assert sorted(seconds) == [1, 4] and all(np.all(s > 0) for s in seconds.values())


@pytest.mark.parametrize(
    "bad, said",
    [
        (dict(nodes=0), "nodes=0"),
        (dict(length=65), "length=65"),
        (dict(times=0), "times=0"),
        (dict(capacity=10_000), "context of 600"),
    ],
)
def test_a_pass_that_cannot_be_is_refused(bad, said, pair):
    arguments = dict(nodes=1, length=40, capacity=64) | bad
    with pytest.raises(ValueError, match=said):
        timing.pass_call(pair[0], arguments.pop("nodes"), **arguments)


def test_weights_are_counted_once_and_tables_of_lookups_not_at_all(pair):
    lm = pair[0]  # tied: the head reads the embedding
    assert timing.weight_bytes(lm) == sum(x.nbytes for x in jax.tree.leaves(lm.params))


def test_bandwidth_is_the_best_of_its_products(monkeypatch):
    monkeypatch.setattr(timing, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "last_level_cache", lambda: 0)
    found = timing.bandwidth(repetitions=2)
    assert found.best == max(found.by_columns.values())
    assert sorted(found.by_columns) == list(timing.COLUMNS) and found.weights == 1 << 20


@pytest.fixture(scope="module")
def begun(pair):
    """Jobs of a kind of drafter each, with a state mid-generation."""
    made, lm = {}, pair[0]
    shape = medusa.MedusaConfig(
        hidden_size=lm.config.hidden_size, vocab_size=lm.config.vocab_size, num_heads=3
    )
    params = nnx.to_pure_dict(nnx.state(medusa.MedusaHeads(shape, rngs=nnx.Rngs(0))))
    drafter = medusa.Medusa(config=shape, target=lm.target)
    heads = HeadLM(drafter, params, name="heads", fingerprint="", target=lm.checkpoint)
    kinds = (("ngram", "ngram", 0.0), ("draft", pair[1], 1.0), ("heads", heads, 1.0))
    for name, drafter, temperature in kinds:
        work = prepared(
            pair[0],
            ["def f(x):\n    def f(x):\n", "a = b\na = b\na"],
            drafter=drafter,
            num_draft=None if name == "heads" else 3,
            temperature=temperature,
            max_new_tokens=60,
            stop=(),
        )
        made[name] = work, jax.block_until_ready(work.burst(2, work.start()))
    return made


@pytest.mark.parametrize("name", ["ngram", "draft", "heads"])
def test_the_parts_of_a_round_redo_what_the_loop_did(name, begun):
    work, state = begun[name]
    state = replay.without_limits(state, ROUNDS, work.drafter.depth)
    final, inputs = replay.record_inputs(work, state, ROUNDS)
    copied = jax.tree.map(jnp.copy, state)
    wanted = work.burst(ROUNDS, copied)
    assert np.array_equal(final.tokens, wanted.tokens)  # recording changes nothing
    done = {n: run(prepare()) for n, (run, prepare) in replay.replays(work, state, ROUNDS).items()}
    last = jax.tree.map(lambda x: x[-1], inputs)
    draft, _ = done["draft"][1]
    assert np.array_equal(draft.tokens, last.draft.tokens)
    np.testing.assert_allclose(
        done["verify"][1].logits, last.scores.logits, atol=1e-4 * np.abs(last.scores.logits).max()
    )
    full = done["accept"][1]  # nothing stops: the verdict is not cut
    assert np.array_equal(full.count, last.verdict.count)
    assert np.array_equal(full.token, last.verdict.token)
    cache = jax.tree.leaves(done["commit"][0])
    assert all(np.allclose(a, b) for a, b in zip(cache, jax.tree.leaves(final.cache), strict=True))
    learned = jax.tree.leaves(done["observe"][0])
    assert all(
        np.allclose(a, b)
        for a, b in zip(learned, jax.tree.leaves(final.drafter_state), strict=True)
    )


def test_parts_leave_the_state_alone_and_time_every_part(begun):
    work, state = begun["draft"]
    before = jax.tree.map(np.array, result(state))
    seconds = timing.alternate(
        round_timing.part_calls(work, state, rounds=2), repetitions=2, warmup=1
    )
    assert list(seconds) == ["draft", "verify", "accept", "commit", "observe", "round"]
    assert all(np.all(s > 0) for s in seconds.values())
    jax.tree.map(np.testing.assert_array_equal, before, result(state))
    expected = np.median((seconds["draft"] + seconds["verify"]) / seconds["round"])
    assert round_timing.loop_efficiency(seconds)[0] == expected


def test_rounds_that_do_not_fit_the_buffer_are_refused(begun):
    work, state = begun["draft"]
    with pytest.raises(ValueError, match="400 rounds of up to 4 tokens need 1600 free slots"):
        round_timing.part_calls(work, state, rounds=400)


def test_memory_adds_up_and_the_cache_is_what_the_state_holds(begun):
    work, state = begun["draft"]
    found = round_timing.program_memory(work)
    assert found.peak == found.weights + found.cache + found.working_set
    assert found.working_set > 0 < found.compile_burst and found.compile_start > 0
    assert found.cache == sum(x.nbytes for x in jax.tree.leaves((state.cache, state.drafter_state)))


def test_the_first_token_takes_one_round_after_the_prompt(begun):
    work, _ = begun["ngram"]
    new = np.asarray(round_timing.first_token_call(work)()) - [
        len(prompt) for prompt in work.prompts
    ]
    assert np.all(new >= 1) and np.all(new <= 4)
