"""Planted faults: each is found by the fuzzer, by its ordinary cases and within few of them."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from specjax.acceptance import coupled, rejection
from specjax.decoding import round
from specjax.models import kv_cache
from specjax.trees import expand

from .draws import Draws
from .hunt import Report, hunt, tried

SECONDS, CASES = 240, 40  # of a hunt for one fault


@pytest.fixture(autouse=True)
def programs_of_their_own(quick_compilation):
    """No program that was traced without the fault, or with it, serves another test."""
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    jax.clear_caches()


def found(module, name, wrong, words, **choices):
    """The first failure of a hunt while ``module`` has something ``wrong`` under a name.

    Its error must match ``words``, and without what is wrong the same case, whole and with fewer
    choices, must pass.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, wrong)
        report = hunt(0, SECONDS, most=CASES, failures=1, **choices)
    assert report.failures, report
    failure = report.failures[0]
    assert re.search(words, str(failure.error)), failure
    jax.clear_caches()
    for dropped in {(), failure.draws.dropped}:
        again = Report(collections.Counter(), collections.Counter(), 0, [])
        assert tried(Draws(0, failure.draws.number, dropped), again, **choices) is None
        assert again.tried == 1
    return failure


def test_a_hunt_finds_a_rule_without_its_residual():
    law = dict(kinds=("law",), rules=("rejection",))
    found(rejection, "residual", lambda p, q: p, "do not have the target's law", **law)


def test_a_hunt_finds_a_drafter_that_draws_from_another_law_than_it_states():
    draw = expand._draw

    def flatter(q, *given):
        return draw(q**0.3, *given)

    law = dict(kinds=("law",), rules=("rejection", "block", "traversal"))
    found(expand, "_draw", flatter, "do not have the target's law", **law)


def test_a_hunt_finds_a_cache_that_lacks_the_last_of_several_accepted_tokens():
    commit = kv_cache.commit

    def forgetful(cache, entries, start, verdict, rings=None):
        count = jnp.where(verdict.count >= 2, verdict.count - 1, verdict.count)
        return commit(cache, entries, start, dataclasses.replace(verdict, count=count), rings)

    words = "logits from the cache of|the reference says"
    failure = found(kv_cache, "commit", forgetful, words, kinds=("greedy",))
    # what does not matter has been dropped, and the command says so
    assert "--fuzz-drop" in str(failure) and len(failure.draws.dropped) >= 2


def test_a_hunt_finds_noise_that_does_not_follow_the_path():
    def flat(draft, node):
        return jnp.zeros_like(node)

    found(coupled, "depth_of", flat, "the reference says", kinds=("coupled",))


def test_a_hunt_finds_statistics_of_rows_that_have_ended():
    update = round.update_stats

    def always(state, draft, num, from_draft):
        stats = update(state, draft, num, from_draft)
        return dataclasses.replace(stats, rounds=state.stats.rounds + 1)

    words = r"accepted \+ rounds - emitted"
    found(round, "update_stats", always, words, kinds=("greedy",))
