"""Reward-guided speculative decoding: at its edges the text of the draft model, or the target's."""

import dataclasses
import math

import numpy as np
import pytest
from toys import bag, like

import specjax
from specjax import Sampling
from specjax.decoding import reference
from specjax.text import LikelihoodReward, ScalarReward, reward_guided

pytest_plugins = ["pairs"]
MODEL, PARAMS = bag(11, 3)
LM, DRAFT = (specjax.LM.of(MODEL, weights) for weights in (PARAMS, like(PARAMS, 1)))
PROMPT, ENDS = (1, 2, 3), (1, 4, 6)
WARM = Sampling(temperature=1.0)


def guided(reward=None, **options):
    defaults = dict(separator=ENDS, max_new_tokens=24, sampling=WARM, seed=2)
    return reward_guided(LM, DRAFT, PROMPT, reward or (lambda *_: 0.5), **(defaults | options))


def plain(lm, seed, sampling=WARM):
    made = specjax.generate(
        lm, [PROMPT], drafter="none", max_new_tokens=24, seed=seed, sampling=sampling, stop=()
    )
    return made.tokens[0].tolist()


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
def test_at_the_edges_the_draft_writes_the_text_or_the_target_does(sampling):
    own = guided(threshold=-math.inf, sampling=sampling)
    assert own.kept == 1 and (sampling == WARM or own.tokens.tolist() == plain(DRAFT, 2, sampling))
    assert own.target_rounds == 0 and own.draft_tokens == 24 and len(own.steps) > 2
    other = guided(lambda *_: math.inf, threshold=math.inf, sampling=sampling)
    assert other.kept == 0 and (sampling == WARM or other.tokens.tolist() == plain(LM, 3, sampling))
    assert other.target_rounds == 24 - len(other.steps) and own.approximate == "reward-guided"


def test_the_target_writes_its_steps_with_a_drafter_too():
    drafts = dict(drafter=DRAFT, drafting=specjax.Drafting(num=2), sampling=Sampling())
    found = guided(threshold=math.inf, **drafts)
    assert found.tokens.tolist() == plain(LM, 3, Sampling()) and found.target_rounds < 24
    assert len(found.steps) > 2


def test_a_step_is_kept_where_its_reward_reaches_the_threshold():
    seen = []

    def reward(prompt, steps):
        seen.append((list(prompt), [step.tolist() for step in steps]))
        return len(steps[-1]) / 10

    found = guided(reward, threshold=0.3)
    assert [step.from_draft for step in found.steps] == [len(s[-1]) >= 3 for _, s in seen]
    assert 0 < found.kept < 1 and all(prompt == list(PROMPT) for prompt, _ in seen)
    for index, (_, steps) in enumerate(seen):  # what was kept before stands before the new step
        before = [step.tokens.tolist() for step in found.steps[:index]]
        assert steps[:-1] == before
        assert found.steps[index].reward == len(steps[-1]) / 10
        assert (found.steps[index].tokens.tolist() == steps[-1]) or index not in kept(found)
    assert all(step.tokens[-1] in ENDS for step in found.steps[:-1])
    assert len(found.tokens) == 24
    assert len(guided(reward, threshold=0.3, max_steps=2).steps) == 2


def kept(found):
    return {index for index, step in enumerate(found.steps) if step.from_draft}


def test_the_targets_step_is_drawn_apart_from_the_rejected_one():
    """With one model and one seed for both, a rejected step would be written again."""
    drafted = []

    def reward(prompt, steps):
        drafted.append(steps[-1].tolist())
        return 0

    found = reward_guided(LM, LM, PROMPT, reward, separator=ENDS, sampling=WARM, max_new_tokens=24)
    written = [step.tokens.tolist() for step in found.steps]
    assert len(written) == len(drafted) and written != drafted


def test_what_follows_a_rejected_step_does_not_depend_on_its_noise():
    """A draft model without memory, of which each step is rejected, and a target whose steps are
    one token: with the noise of the rejected step, the next one would be the rest of it."""
    flat = {"embed": np.zeros((11, 6), np.float32), "out": np.zeros((6, 11), np.float32)}
    sure = {"embed": np.ones((11, 6), np.float32), "out": np.eye(11, dtype=np.float32)[5:] * 99}
    said = []

    def reward(prompt, steps):
        said.append(steps[-1].tolist())
        return 0

    lm, draft = (specjax.LM.of(MODEL, weights) for weights in (sure, flat))
    found = reward_guided(lm, draft, PROMPT, reward, separator=range(5, 11), sampling=WARM)
    assert {len(step.tokens) for step in found.steps} == {1}
    pairs = [(a[1], b[0]) for a, b in zip(said, said[1:], strict=False) if len(a) > 1]
    assert len(pairs) > 20 and sum(a == b for a, b in pairs) < len(pairs) / 2


def test_rewards_are_those_of_the_obvious_way():
    steps = [np.asarray([4, 6, 0]), np.asarray([7, 5])]
    tokens = np.asarray([[*PROMPT, 4, 6, 0, 7, 5]])
    logits = np.asarray(reference.logits(LM.target, LM.params, tokens))[0].astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = math.sqrt(p[5, 7] * p[6, 5])
    assert LikelihoodReward(LM)(PROMPT, steps) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: guided(lambda *_: math.nan), "step 1 has the reward NaN"),
        (lambda: guided(threshold=math.nan), "threshold=nan"),
        (lambda: guided(separator=()), "the separator not empty"),
        (lambda: guided(max_steps=0), "max_steps=0"),
        (lambda: guided(seed=-1), "seed=-1"),
        (
            lambda: reward_guided(LM, specjax.LM.of(*bag(7, 0)), PROMPT, lambda *_: 1),
            "draft: .* vocabulary of 7, the target .* 11",
        ),
        (lambda: guided(LikelihoodReward(specjax.LM.of(*bag(7, 0)))), "reward: .* of 7, the tar"),
        (lambda: guided(separator=(4, 11)), r"separator=\(4, 11\): .* from 0 to 10"),
        (lambda: reward_guided(LM, DRAFT, "text", lambda *_: 1), "no tokenizer"),
        (lambda: guided(sampling=Sampling(frequency_penalty=1.0)), "begin anew in each step"),
    ],
)
def test_what_cannot_guide_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_scalar_head_reads_the_last_hidden_state_of_the_step(pair):
    lm = pair[0]
    reward = ScalarReward(lm, np.ones(lm.target.hidden_size) / 8, bias=0.25)
    steps = [np.asarray([4, 6, 9]), np.asarray([7, 5])]
    one, other = reward(PROMPT, steps), reward(PROMPT, [*steps[:-1], np.asarray([7, 8])])
    assert 0 < one < 1 and one != other
    flat = dataclasses.replace(reward, weight=np.zeros(lm.target.hidden_size))
    assert flat(PROMPT, steps) == pytest.approx(1 / (1 + math.exp(-0.25)))
    with pytest.raises(ValueError, match="the head is that of another model"):
        ScalarReward(lm, np.zeros(lm.target.hidden_size + 1))
    with pytest.raises(ValueError, match="hold numbers that are not finite"):
        ScalarReward(lm, np.full(lm.target.hidden_size, np.nan))
