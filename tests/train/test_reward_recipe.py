"""The recipe of a reward model: its labels are those of the obvious way, and it knows its draft."""

import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import config, reward
from test_probe_recipe import LARGE, SMALL, TOKENS, frozen, judged

import specjax
from specjax.drafters.probe import load_probe, save_probe
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM
from specjax.text import LikelihoodReward, ScalarReward, reward_guided

ENDS = (3, 4)


def obvious(found, ends=ENDS):
    """The reward up to each token, by a loop; 0 where the draft model wrote nothing."""
    log_p, token, weight = (np.asarray(found[name]) for name in ("log_p", "token", "weight"))
    wanted = np.zeros(log_p.shape)
    for row in range(len(log_p)):
        step = []
        for place in range(log_p.shape[1]):
            if weight[row, place] > 0:
                step.append(log_p[row, place])
                wanted[row, place] = np.exp(np.mean(step))
                step = [] if token[row, place] in ends else step
    return wanted


def made(seed=0):
    random = np.random.default_rng(seed)
    shape = (4, 11)
    return {
        "log_p": jnp.asarray(-random.exponential(size=shape), jnp.float32),
        "token": jnp.asarray(random.integers(0, 7, shape)),
        "weight": jnp.asarray(np.arange(11) >= 3, jnp.float32) * jnp.ones((4, 1)),
    }


def agrees(ends):
    found = made()
    got, ended = reward.rewards_of(found, ends)
    got = np.where(np.asarray(found["weight"]) > 0, got, 0)
    assert (np.asarray(ended) == np.isin(found["token"], ends)).all()
    return np.allclose(got, obvious(found), atol=1e-5)


def test_the_reward_of_a_step_is_the_geometric_mean_of_its_tokens():
    assert agrees(ENDS)


def test_fault_steps_that_do_not_end_are_seen():
    assert not agrees((3,))


def test_labels_are_the_rewards_that_the_target_gives_in_decoding():
    params, found = frozen(), judged()[0]
    lm = LM.of(CausalLM(LARGE), params["target"])
    labels, said = obvious(found), np.asarray(found["token"])
    written, places = np.asarray(found["weight"]) > 0, 0
    for row in range(4):
        where = np.flatnonzero(written[row])
        if not len(where) or 0 in said[row]:
            continue  # attention ends at the end of a document
        first = where[0]
        ends = np.flatnonzero(np.isin(said[row, first:], ENDS))
        last = first + (ends[0] if len(ends) else len(where) - 1)
        if last > where[-1] or TOKENS[row, 0] == 0:
            continue
        prompt = [int(TOKENS[row, 0]), *said[row, :first].tolist()]
        step = [said[row, first : last + 1]]
        assert labels[row, last] == pytest.approx(LikelihoodReward(lm)(prompt, step), rel=2e-3)
        places += 1
    assert places


def test_a_reward_model_is_that_of_one_draft_model_and_no_probe(tmp_path):
    draft = LM.of(CausalLM(SMALL), frozen()["drafter"])
    path = tmp_path / "head"
    head = {"weight": jnp.arange(8.0), "bias": jnp.asarray(0.5)}
    save_probe(path, head, draft, "reward")
    assert ScalarReward.load(path, draft).separator is None
    save_probe(path, head, draft, "reward", separator="\n")
    loaded = ScalarReward.load(path, draft)
    assert loaded.separator == "\n"
    with pytest.raises(ValueError, match=r"separator='\\n\\n': .* end with '\\n'.* give separator"):
        reward_guided(draft, draft, [1], loaded)
    assert loaded.bias == 0.5 and loaded.weight.tolist() == list(range(8))
    with pytest.raises(ValueError, match="the head of a reward, not of a probe"):
        load_probe(path, draft)
    save_probe(path, head, draft)
    with pytest.raises(ValueError, match="the head of a probe, not of a reward"):
        ScalarReward.load(path, draft)


def test_separators_that_no_token_holds_are_refused():
    lm = specjax.load("embedded-draft")
    found = reward.ends_of(lm, "\n")
    assert found and all("\n" in lm.tokenizer.decode([i]) for i in found)
    with pytest.raises(config.ConfigError, match="a text that one token of"):
        reward.ends_of(lm, "\n!no token holds this!")
    with pytest.raises(config.ConfigError, match="a text that ends a step"):
        reward.RewardConfig(separator="")
