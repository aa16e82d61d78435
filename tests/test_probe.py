"""A draft model whose probe ends its chains, and the rule that trusts what the probe passed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag, like, whole

import specjax
from specjax import Sampling, trees
from specjax.analysis.sampled_law import joint_counts, judge
from specjax.decoding import reference
from specjax.decoding.round import draft_step, round_context
from specjax.drafters import DraftModel
from specjax.drafters.probe import ProbedDraftModel, score_of

MODEL, PARAMS = bag(11, 3)
SIZE = PARAMS["embed"].shape[1]
PROBE = {"weight": jnp.asarray(np.random.default_rng(0).normal(size=SIZE)), "bias": jnp.zeros(())}
NEAR = like(PARAMS, 1)
WEIGHTS = {"target": PARAMS, "drafter": {"model": NEAR, "probe": PROBE}}
PROMPT = np.asarray([[1, 2, 3]] * 4, np.int32) + np.arange(4, dtype=np.int32)[:, None]


def probed(flag=0.5, num=4):
    return ProbedDraftModel(num_draft=num, model=MODEL, flag=flag)


def text(rule, flag=0.5, temperature=0.0, num=24, drafter=None, weights=WEIGHTS):
    out = specjax.decode(
        MODEL,
        drafter or probed(flag),
        weights,
        PROMPT,
        np.full(4, 3, np.int32),
        key=jax.random.key(0),
        max_new_tokens=num,
        sampling=Sampling(temperature=temperature),
        rule=rule,
    )
    return np.asarray(out.tokens)[:, 3 : 3 + num], out.stats


def proposals(drafter, temperature):
    """The drafts of a first round, and their lengths."""
    state = specjax.decoding.init_state(
        MODEL,
        drafter,
        WEIGHTS,
        PROMPT,
        np.full(4, 3, np.int32),
        key=jax.random.key(5),
        max_new_tokens=8,
        sampling=Sampling(temperature=temperature),
    )
    draft, _ = draft_step(drafter, WEIGHTS, state.drafter_state, round_context(WEIGHTS, state))
    return np.asarray(draft.tokens), np.asarray(draft.candidate).sum(axis=1) - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_ends_at_the_first_token_that_the_probe_flags(temperature):
    tokens, sizes = proposals(probed(), temperature)
    texts = np.concatenate([PROMPT, tokens], axis=1)
    drafted = whole(jnp.asarray(texts))
    cache = MODEL.init(NEAR, 4, texts.shape[1])
    hidden = MODEL.verify(NEAR, cache, drafted, features=(1,)).features
    flagged = np.asarray(score_of(PROBE, hidden))[:, 4:] <= 0.5
    wanted = [next((i + 1 for i, flag in enumerate(row[:-1]) if flag), 4) for row in flagged]
    assert sizes.tolist() == wanted and len({*wanted}) > 1


def test_all_that_is_flagged_or_nothing_is():
    assert proposals(probed(flag=1.0), 1.0)[1].tolist() == [1] * 4
    assert proposals(probed(flag=0.0), 1.0)[1].tolist() == [4] * 4


def test_under_a_lossless_rule_the_probe_changes_the_lengths_alone():
    plain = text("greedy", drafter=DraftModel(num_draft=4, model=MODEL), weights=near())[0]
    for flag in (0.0, 0.5, 1.0):
        tokens, stats = text("auto", flag)
        assert (tokens == plain).all() and stats.approximate == ""


def near():
    return WEIGHTS | {"drafter": NEAR}


def test_where_every_token_is_flagged_the_text_is_the_targets_and_fewer_flags_keep_more():
    plain = text("greedy")[0]
    strict, stats = text("approximate-sprinter", flag=1.0)
    assert (strict == plain).all() and stats.approximate == "rule approximate-sprinter"
    taus, same = [], []
    for flag in (1.0, 0.5, 0.0):
        tokens, stats = text("approximate-sprinter", flag)
        taus.append(np.asarray(stats.emitted).sum() / np.asarray(stats.rounds).sum())
        same.append((tokens == plain).mean())
    assert taus[0] < taus[1] < taus[2] and same[0] == 1 > same[2]


HALF = PROBE | {"bias": jnp.asarray(-1.4)}  # flags two of the four tokens of the toy of `law_of`


def law_of(drafter, rule, model=bag(4, 2)):
    target, params = model
    drafter = dataclasses.replace(drafter, model=target)
    weights = {"target": params, "drafter": {"model": like(params, 1), "probe": HALF}}
    warm = Sampling(temperature=1.0)
    counts, _ = joint_counts(target, drafter, rule, weights, (1,), 3, warm, rows=40_000)
    return judge(counts, reference.joint_law(target, params, (1,), 3, warm).reshape(-1))


@pytest.mark.parametrize(
    ("flag", "rule", "sound"),
    [
        (0.5, "rejection", True),
        (1.0, "approximate-sprinter", True),
        (0.5, "approximate-sprinter", False),
    ],
)
def test_the_law_is_the_targets_where_each_trusted_token_was_verified(flag, rule, sound):
    assert law_of(probed(flag, num=2), rule).fits(1e-4) == sound


@dataclasses.dataclass(frozen=True)
class LeavesTheFlaggedOut(ProbedDraftModel):
    """A planted fault: the flagged token itself is not proposed, which looks at what was drawn."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        size = jnp.sum(draft.candidate, axis=1) - 1
        full = size == self.num_draft
        return trees.limit_depth(draft, jnp.where(full, size, size - 1)), state


def test_a_flagged_token_that_is_left_out_biases_even_rejection():
    drafter = LeavesTheFlaggedOut(num_draft=2, model=MODEL, flag=0.5)
    assert not law_of(drafter, "rejection").fits(1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: probed(flag=1.5), "flag must be from 0 to 1"),
        (lambda: ProbedDraftModel(model=MODEL, topology=trees.branching(2, 1)), "ends chains"),
        (lambda: text("auto", weights=near()), 'must be {"model": weights, "probe": probe}'),
        (lambda: text("auto", weights=other(SIZE + 1)), "that of another draft model"),
    ],
)
def test_a_probe_that_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def other(size):
    probe = {"weight": jnp.zeros(size), "bias": jnp.zeros(())}
    return WEIGHTS | {"drafter": {"model": NEAR, "probe": probe}}
