"""Rounds that draft nothing, of a drafter that says so beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag

import specjax
from specjax import Sampling, trees
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Plain
from specjax.drafters.base import ChainDrafter

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL, PARAMS = bag(13, 3, features=8)
PROMPTS, LENGTHS = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32), np.asarray([3, 2])


@dataclasses.dataclass(frozen=True)
class EveryThird(ChainDrafter):
    """Drafts zeros in every third round; counts its rounds, and what it was shown."""

    plans = True

    def init(self, params, target_params, batch, capacity, inputs=None):
        names = ("rested", "drafted", "shown", "said")
        return {name: jnp.zeros((batch,), jnp.int32) for name in names}

    def plan(self, params, target_params, state, budget):
        return jnp.max(state["rested"] + state["drafted"]) % 3

    def rests(self, plan):
        return plan != 2

    def sync(self, params, target_params, state, context, *, before):
        if before != "rest":
            return state
        return state | {"rested": state["rested"] + 1, "said": state["said"] + context.plan}

    def draft_step(self, params, target_params, state, context):
        zeros = jnp.zeros((len(context.length), self.num_draft), jnp.int32)
        state = state | {"drafted": state["drafted"] + 1, "said": state["said"] + context.plan}
        return trees.chain_draft(context, zeros), state

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            return state
        assert segment.tokens.shape[1] == segment.round[1].path.shape[1] == self.num_draft + 1
        return state | {"shown": state["shown"] + segment.num}


def begun(drafter, temperature=0.0):
    request, capacity = prepare_inputs(
        MODEL,
        drafter,
        PROMPTS,
        LENGTHS,
        jax.random.key(0),
        11,
        Sampling(temperature=temperature),
        None,
        (),
    )
    params = {"target": PARAMS, "drafter": None}
    return params, loop.jit_start(MODEL, drafter, "auto", capacity, params, request)


@pytest.mark.parametrize("rounds", [1, 2, 7, None])
def test_rounds_rest_and_draft_as_planned_however_long_a_burst_is(rounds):
    drafter = EveryThird(num_draft=2)
    params, state = begun(drafter)
    done = 0
    while int(jnp.max(state.budget)):
        state = loop.jit_burst(MODEL, drafter, "auto", rounds, params, state)
        took = int(jnp.max(state.stats.rounds)) - done
        done += took
        assert rounds is None or took <= rounds
    counts = jax.tree.map(lambda x: int(x[0]), state.drafter_state)
    assert counts["rested"] + counts["drafted"] == done
    assert counts["drafted"] == done // 3
    assert counts["said"] == 2 * counts["drafted"] + (done + 1) // 3  # 0, 1, 2, 0, 1, 2 ...
    assert state.drafter_state["shown"].tolist() == state.stats.emitted.tolist() == [10, 10]
    assert state.stats.drafted.max() <= 2 * counts["drafted"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resting_rounds_say_what_plain_ones_say(temperature):
    def decoded(drafter):
        return specjax.decode(
            MODEL,
            drafter,
            {"target": PARAMS, "drafter": None},
            PROMPTS,
            LENGTHS,
            key=jax.random.key(3),
            max_new_tokens=11,
            sampling=Sampling(temperature=temperature),
        )

    never = dataclasses.make_dataclass("Never", [], bases=(EveryThird,), frozen=True)
    never.rests = lambda self, plan: plan == plan
    plain, resting = decoded(Plain()), decoded(never(num_draft=2))
    assert plain.tokens.tolist() == resting.tokens.tolist()
    assert resting.stats.rounds.tolist() == [10, 10] and resting.stats.drafted.tolist() == [0, 0]
