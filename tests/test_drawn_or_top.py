"""Drawn or most probable tokens, by what a row's rounds accepted: what is learned, and a fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import starts
from drawn_rounds import advanced
from test_sampled import CASES, MODEL, PARAMS, ROWS, WARM, exact, lawful, sample

import specjax
from specjax.drafters import Adaptive, DrawnOrTop, Hybrid, NGram
from specjax.drafters.drawn_or_top import DRAWN, TOP, DrawnOrTopState
from specjax.text import drafter_names
from specjax.types import Segment


def ways(chances, rounds=60, explore=0.5):
    """Bool ``[B, rounds]``, whether each row's most probable token was taken, where a token of each
    way is accepted with a chance of ``chances``; a row that takes part in every other round, one
    that drafts in none, and 30 others."""
    case = DrawnOrTop(NGram(1), explore)
    batch, rng = 32, np.random.default_rng(0)
    zeros = jnp.zeros((batch, 2), jnp.float32)
    nothing = jnp.full((batch,), -1, jnp.int32)
    state = DrawnOrTopState(inner=None, tokens=zeros, rounds=zeros, way=nothing)
    found, rows = [], np.arange(batch)
    for number in range(rounds):
        way = np.asarray(case.choose(state))
        drafts = (rows > 1) | ((rows == 0) & (number % 2 == 0))
        num = np.where(drafts, 1 + (rng.random(batch) < np.asarray(chances)[way]), 1)
        shown = jnp.zeros((batch, 2), jnp.int32)
        num = jnp.asarray(np.where(rows < 31, num, 0), jnp.int32)  # the last row has ended
        segment = Segment(
            tokens=shown, next=shown, features=None, start=num, num=num, round=(None, None, None)
        )
        own = jnp.asarray(np.where(drafts, way, -1), jnp.int32)
        begun = dataclasses.replace(state, way=own)
        state = case.observe(None, None, begun, segment)
        found.append(way == TOP)
    tried = np.asarray(state.rounds).sum(axis=1)
    assert tried[0] == rounds / 2 and tried[1] == tried[31] == 0 and (tried[2:31] == rounds).all()
    return np.stack(found, axis=1)[2:31]


@pytest.mark.parametrize(("chances", "best"), [((0.9, 0.3), DRAWN), ((0.2, 0.8), TOP)])
def test_rows_find_the_way_that_is_accepted_more_often(chances, best):
    top = ways(chances)
    assert not top[:, 0].any() and top[:, 1].all()  # each way once
    later = top[:, 20:].mean()
    assert later > 0.9 if best == TOP else later < 0.1


def test_a_round_that_drafts_nothing_for_a_row_counts_for_neither_way():
    drafter, weights, _ = CASES["learned draft"]
    params, rows = {"target": PARAMS, "drafter": weights}, jnp.asarray([[1, 2, 0]] * 2, jnp.int32)
    request = dict(rule="rejection", max_new_tokens=6, capacity=12, key=jax.random.key(0))
    request["sampling"] = WARM
    state = starts.begun(MODEL, drafter, params, rows, jnp.asarray([3, 3]), **request)
    context, own = advanced(MODEL, drafter, "rejection", params, state)[0].context, state
    for asked, width, ways in (([True, False], None, [DRAWN, -1]), (None, 0, [-1, -1])):
        asked = None if asked is None else jnp.asarray(asked)
        width = None if width is None else jnp.int32(width)
        here = dataclasses.replace(context, asked=asked, width=width)
        _, after = drafter.draft_step(weights, PARAMS, own.drafter_state, here)
        assert after.way.tolist() == ways


class Peeking(DrawnOrTop):
    """Takes the most probable token where another one was drawn that has an even number."""

    def draft_step(self, params, target_params, state, context):
        drafts = []
        for way in (DRAWN, TOP):
            own = jnp.zeros((len(context.length), 2), jnp.float32).at[:, way].set(1.0)
            one = dataclasses.replace(state, rounds=1 - own)
            draft, after = super().draft_step(params, target_params, one, context)
            drafts.append(draft)
        even = drafts[0].tokens[:, 1] % 2 == 0

        def picked(drawn, top):
            return jnp.where(even.reshape(-1, *[1] * (drawn.ndim - 1)), top, drawn)

        mixed = {
            name: picked(*(getattr(draft, name) for draft in drafts)) for name in ("tokens", "laws")
        }
        after = dataclasses.replace(after, rounds=state.rounds)
        return dataclasses.replace(drafts[0], **mixed), after


def test_fault_a_choice_that_looks_at_the_token_is_seen():
    drafter, weights, _ = CASES["learned draft"]
    for kind, is_lawful in ((DrawnOrTop, True), (Peeking, False)):
        counts, _ = sample(kind(drafter.inner), weights, "rejection", WARM, rows=ROWS // 4)
        assert lawful(counts, exact("warm")) == is_lawful


def test_the_setting_is_for_chains_above_temperature_0():
    lm = specjax.load("embedded")
    made, params = drafter_names.resolve_drafter(lm, "p-eagle", 2, how="learned")
    assert isinstance(made, DrawnOrTop) and made.name == "p-eagle" and made.num_draft == 2
    assert made.inner.sibling_sampling == "iid" and params is not None
    adaptive, _ = drafter_names.resolve_drafter(lm, "medusa", "auto", how="learned")
    assert isinstance(adaptive, Adaptive) and isinstance(adaptive.inner, DrawnOrTop)
    hybrid, _ = drafter_names.resolve_drafter(lm, "ngram+draft", 7, how="learned")
    assert isinstance(hybrid, DrawnOrTop) and isinstance(hybrid.inner, Hybrid)
    with pytest.raises(ValueError, match="'learned'.*p-eagle drafts trees; give num= in place"):
        drafter_names.resolve_drafter(lm, "p-eagle", tree="2x1", how="learned")
    with pytest.raises(ValueError, match="known: None, top, iid, distinct, hub, learned"):
        specjax.Drafting(sibling_sampling="best")


def test_bad_settings_are_refused():
    with pytest.raises(TypeError, match=r"DrawnOrTop\(inner=3\): give an object of"):
        DrawnOrTop(3)
    for wrong in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="explore=.*: give a number of at least 0"):
            DrawnOrTop(NGram(2), wrong)
    with pytest.raises(TypeError, match="explore='much'"):
        DrawnOrTop(NGram(2), "much")


def test_at_temperature_0_nothing_is_chosen():
    drafter, weights, _ = CASES["learned draft"]
    lm = specjax.LM.of(drafter.inner.model, weights)
    prompt = [1, 2, 3]
    asked = dict(max_new_tokens=6, drafter_params=weights, stop=())
    found = specjax.generate(lm, prompt, drafter=DrawnOrTop(drafter.inner), **asked)
    alone = specjax.generate(lm, prompt, drafter=drafter.inner, **asked)
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    assert found.stats.rounds == alone.stats.rounds
