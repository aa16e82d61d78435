"""Planted faults: each is found by the fuzzer, by its ordinary cases and within few of them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.acceptance import coupled, rejection
from specjax.decoding import round
from specjax.models import kv_cache
from specjax.trees import expand

from .hunt import hunt

SECONDS, CASES = 240, 40  # of a hunt for one fault


@pytest.fixture(autouse=True)
def programs_of_their_own(quick_compilation):
    """No program that was traced without the fault, or with it, serves another test."""
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.clear_caches()


def found(words, **choices):
    """Whether a hunt finds something that is wrong with ``words``; its first failure."""
    report = hunt(0, SECONDS, most=CASES, failures=1, **choices)
    assert report.failures, report
    assert words in str(report.failures[0])
    return report.failures[0]


def test_a_hunt_finds_a_rule_without_its_residual(monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    found("do not have the target's law", kinds=("law",), rules=("rejection",))


def test_a_hunt_finds_a_drafter_that_draws_from_another_law_than_it_states(monkeypatch):
    draw = expand._draw

    def flatter(q, *given):
        return draw(q**0.3, *given)

    monkeypatch.setattr(expand, "_draw", flatter)
    found("do not have the target's law", kinds=("law",), rules=("rejection", "block", "traversal"))


def test_a_hunt_finds_a_cache_that_lacks_the_last_of_several_accepted_tokens(monkeypatch):
    commit = kv_cache.commit

    def forgetful(cache, entries, start, verdict, rings=None):
        count = jnp.where(verdict.count >= 2, verdict.count - 1, verdict.count)
        return commit(cache, entries, start, dataclasses.replace(verdict, count=count), rings)

    monkeypatch.setattr(kv_cache, "commit", forgetful)
    failure = found("", kinds=("greedy",))
    # what does not matter has been dropped, and the command says so
    assert "--fuzz-drop" in str(failure) and len(failure.draws.dropped) >= 2


def test_a_hunt_finds_noise_that_does_not_follow_the_path(monkeypatch):
    monkeypatch.setattr(coupled, "depth_of", lambda draft, node: jnp.zeros_like(node))
    found("the reference says", kinds=("coupled",))


def test_a_hunt_finds_statistics_of_rows_that_have_ended(monkeypatch):
    update = round.update_stats

    def always(state, draft, num, from_draft):
        stats = update(state, draft, num, from_draft)
        return dataclasses.replace(stats, rounds=state.stats.rounds + 1)

    monkeypatch.setattr(round, "update_stats", always)
    found("accepted + rounds - emitted", kinds=("greedy",))
