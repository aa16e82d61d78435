"""num_draft="auto": rounds are priced with the request's own programs, and the text stays."""

import re

import jax
import numpy as np
import pytest
from asking import flat, prepared
from toys import heads

import specjax
from specjax import drafters
from specjax.drafters.pass_embeddings import PaSSConfig
from specjax.text import round_costs, task
from specjax.text.options import Options
from specjax.text.prepare import prepare_fastest

pytest_plugins = ["pairs"]
PROMPT = "def f(x):\n    return x\n\ndef f(x):\n"
OPTIONS = dict(num_draft="auto", max_new_tokens=30)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(round_costs, "_KNOWN", {})


def spied_rounds(monkeypatch):
    """A list to which each call adds its number of rounds, and what each row drafted in them."""
    drafted, burst = [], task.GenerationTask.burst

    def spied(self, rounds, state):
        before = np.array(state.stats.drafted)
        state = burst(self, rounds, state)
        drafted.append((rounds, *(np.asarray(state.stats.drafted) - before).tolist()))
        return state

    monkeypatch.setattr(task.GenerationTask, "burst", spied)
    monkeypatch.setattr(round_costs, "TURNS", 3)
    monkeypatch.setattr(round_costs, "LASTING", 99.0)  # more than one round a call, on any machine
    return drafted


@pytest.mark.parametrize("name", ["ngram", "draft"])
def test_every_width_is_priced_over_rounds_that_draft_so_many(name, pair, monkeypatch):
    drafted = spied_rounds(monkeypatch)
    given = pair[1] if name == "draft" else name
    work = prepared(pair[0], [PROMPT, "a"], drafter=given, **OPTIONS)
    assert work.drafter.widths == (0, 1, 3, 7)
    rounds = drafted[-1][0]
    plain, *every = [(rounds, rounds * width, rounds * width) for width in work.drafter.widths]
    # one round reads what plain ones emitted, and is not timed
    assert drafted[-18:] == 3 * [(0, 0, 0), plain, (1, 7, 7), *every]
    # the tokens after the repeated one may have no match before it
    assert rounds == (round_costs.MOST_ROUNDS if name == "draft" else 1)
    costs = np.asarray(work.params["drafter"]["costs"])
    assert costs.shape == (4,) and np.all(costs > 0) and np.all(np.isfinite(costs))


def test_what_drafts_nothing_after_a_plain_round_is_priced_over_rounds_that_draft(
    pair, monkeypatch, tmp_path
):
    target, drafted = pair[0].target, spied_rounds(monkeypatch)
    shape = PaSSConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    drafter = drafters.PaSS(config=shape, target=target)
    specjax.save_drafter(drafter, heads(drafter), tmp_path, target=pair[0])
    work = prepared(pair[0], [PROMPT, "a"], drafter=str(tmp_path), **OPTIONS)
    assert work.drafter.widths == (0, 1, 3)
    rounds = drafted[-1][0]
    every = [(rounds, rounds * width, rounds * width) for width in (1, 3)]
    assert drafted[-15:] == 3 * [(0, 0, 0), (rounds, 0, 0), (1, 0, 0), *every]


def test_pricing_compiles_nothing_beyond_the_request_and_happens_once(pair, monkeypatch, caplog):
    def compiled():
        lines = [record.getMessage() for record in caplog.records]
        return [x for x in lines if re.search(r"Compiling jit\((start|burst)\)", x)]

    monkeypatch.setattr(round_costs, "PATIENCE", 1e9)
    fresh = OPTIONS | {"max_new_tokens": 300}  # a buffer that no other test has
    with jax.log_compiles():
        work = prepared(pair[0], PROMPT, drafter="ngram", **fresh)  # which prices
        assert len(compiled()) == 2, compiled()
        caplog.clear()
        work.burst(1, work.start())
        assert not compiled()
    monkeypatch.setattr(round_costs, "_measured", lambda work: pytest.fail("measured again"))
    again = prepared(pair[0], "def g(x):\n    return", drafter="ngram", **fresh)
    assert again.drafter == work.drafter and again.drafter.name == "adaptive(ngram)"


def test_costs_are_measured_again_after_ever_longer_times_and_the_fastest_calls_count(
    pair, monkeypatch
):
    now = [0.0]
    # the third time the empty call is held up: that makes no round cheaper than it ever was
    said = iter([[1, 6, 7, 8, 9], [1, 5, 8, 10, 10], [4, 9, 9, 7, 9], jax.errors.JaxRuntimeError])
    monkeypatch.setattr(round_costs.time, "monotonic", lambda: now[0])

    def measured(work):
        now[0] += 2
        calls = next(said)
        if not isinstance(calls, list):
            raise calls("RESOURCE_EXHAUSTED")
        return (round_costs.Timed(1, np.asarray(calls, float)),), 2.0

    monkeypatch.setattr(round_costs, "_measured", measured)

    def costs_at(seconds):
        now[0] = seconds
        work = prepared(pair[0], PROMPT, drafter="ngram", **OPTIONS)
        return np.asarray(work.params["drafter"]["costs"]).tolist()

    assert costs_at(0.0) == costs_at(9.9) == [5, 6, 7, 8]
    assert costs_at(10.1) == costs_at(28.0) == [4, 6, 7, 8]  # 16 seconds after the second time
    assert costs_at(28.2) == [4, 6, 6, 8]
    assert costs_at(99.0) == [4, 6, 6, 8]  # it failed
    other = round_costs.Timed(2, np.ones(5))
    assert other.fastest(round_costs.Timed(1, np.zeros(5))) is other


def test_the_text_is_that_of_plain_decoding(pair):
    wanted = specjax.generate(pair[0], PROMPT, drafter=None, max_new_tokens=30)
    found = specjax.generate(pair[0], PROMPT, **flat(drafter=pair[1], **OPTIONS))
    assert np.array_equal(found.tokens[0], wanted.tokens[0])


DEAR, CHEAP = [0.0, 1.0, 2.1, 4.1, 8.1], [0.0, 1.0, 1.1, 1.2, 1.3]  # seconds of calls


def test_where_no_number_of_drafts_can_pay_not_even_the_prompt_is_read_for_the_drafter(
    pair, monkeypatch
):
    said = []
    monkeypatch.setattr(
        round_costs, "_measured", lambda _: ((round_costs.Timed(1, np.asarray(said[-1])),), 1.0)
    )

    def found(calls, **options):
        said.append(calls)
        monkeypatch.setattr(round_costs, "_KNOWN", {})
        given = Options(**flat(**OPTIONS | {"drafter": pair[1]} | options))
        return prepare_fastest(pair[0], [PROMPT, "a"], given)

    plain, drafts = found(DEAR), found(CHEAP)
    assert isinstance(plain.drafter, drafters.Plain) and plain.params["drafter"] is None
    assert isinstance(drafts.drafter, drafters.Adaptive) and "plain" not in drafts.words
    assert (
        plain.words == drafts.words + "; no number of drafts pays here, so that decoding is plain"
    )
    for other in ("auto:schedule:rests=false", "auto:huggingface", 3):
        kept = found(DEAR, num_draft=other)
        assert not isinstance(kept.drafter, drafters.Plain)
    learning = found(DEAR, drafter=specjax.text.Session(pair[0]))
    assert isinstance(learning.drafter, drafters.Adaptive)
    monkeypatch.setattr(task.GenerationTask, "rule_name", property(lambda _: pytest.fail("traced")))
    options = flat(drafter=pair[1], temperature=1.0, **OPTIONS)
    for calls, drafted in ((DEAR, False), (CHEAP, True)):
        said.append(calls)
        monkeypatch.setattr(round_costs, "_KNOWN", {})
        text = specjax.generate(pair[0], [PROMPT, "a"], seed=3, **options)
        assert (np.sum(text.stats.drafted) > 0) == drafted
        if not drafted:
            wanted = specjax.generate(
                pair[0],
                [PROMPT, "a"],
                **flat(drafter=None, temperature=1.0, max_new_tokens=30),
                seed=3,
            )
            assert [*map(list, text.tokens)] == [*map(list, wanted.tokens)]


def test_no_width_costs_more_than_a_greater_one():
    timed = round_costs.Timed(2, np.asarray([1.0, 5.0, 9.0, 7.0, 11.0]))
    assert timed.costs.tolist() == [2, 3, 3, 5]


def test_a_cost_lost_in_the_noise_is_small_but_above_zero(pair, monkeypatch):
    monkeypatch.setattr(round_costs.time, "perf_counter", lambda: 0.0)
    work = prepared(pair[0], PROMPT, drafter="ngram", **OPTIONS)
    assert np.all(np.asarray(work.params["drafter"]["costs"]) > 0)


def test_auto_without_a_drafter_is_plain_decoding(pair):
    assert isinstance(prepared(pair[0], PROMPT, drafter=None, **OPTIONS).drafter, drafters.Plain)


def test_other_words_and_drafters_that_adapt_already_are_refused(pair):
    with pytest.raises(ValueError, match="num='often': .* or 'auto'"):
        prepared(pair[0], PROMPT, drafter="ngram", num_draft="often")
    adaptive = drafters.Adaptive(drafters.NGram(num_draft=3))
    with pytest.raises(ValueError, match="adaptive already"):
        prepared(pair[0], PROMPT, drafter=adaptive, **OPTIONS)
