"""Where a chain of DSpark ends: by chances that read no token which is then left out."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_oracle import LAYERS as BLOCK
from block_oracle import TARGET
from toys import bag, context, heads, small_layer

from specjax import Sampling, load, load_drafter, save_drafter, trees
from specjax._internal.optional import required
from specjax.analysis import sampled_law
from specjax.decoding import prefill, reference
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import run_round
from specjax.drafters import Adaptive, DSpark, Fallback, Hybrid, NGram, Schedule, Union
from specjax.drafters.draft_length.policy import Outcome
from specjax.drafters.draft_length.schedule import worth_drafting
from specjax.drafters.dspark import DSparkConfig
from specjax.types import Confidence

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOY, PARAMS = bag(3, 0)
LAYERS = small_layer(3, 6, qk_norm=True)
SHAPE = dict(layers=LAYERS, block_size=3, mask_token=0, target_layers=(1,), markov_rank=3)
SPARK = DSpark(config=DSparkConfig(**SHAPE), target=TOY, sibling_sampling="iid")
WARM, FALSE_ALARM, ROWS = Sampling(temperature=0.9), 1e-7, 40_000

# ------------------------------------------------------------------------------- the schedule


def tables(count=300, rows=2, depth=5):
    """Random chances float32 ``[N, B, K]``, and the costs of a round at each depth."""
    random = np.random.default_rng(0)
    costs = np.cumsum(random.uniform(0.05, 0.5, depth + 1)).astype(np.float32) + 1
    return random.uniform(0, 1, (count, rows, depth)).astype(np.float32), costs


def best_of_all(survival, costs, budget):
    """A fault: the depth of the greatest rate, wherever it is."""
    tokens = jnp.concatenate([jnp.ones((1,)) * len(survival), jnp.sum(survival, axis=0)])
    return jnp.argmax(jnp.cumsum(tokens) / costs)


def depths(search, chances, costs):
    """The depth for each table."""
    live = jnp.full(chances.shape[1], 99)
    survival = jnp.cumprod(jnp.asarray(chances), axis=2)
    return np.asarray(jax.vmap(lambda own: search(own, costs, live))(survival))


def anticipates(search):
    """Whether chances that read tokens beyond the depth, which are left out, change the depth."""
    chances, costs = tables()
    depth = depths(search, chances, costs)
    beyond = np.arange(chances.shape[2]) > depth[:, None, None]  # they read what is left out
    other = np.where(beyond, np.random.default_rng(1).uniform(0, 1, chances.shape), chances)
    return (depths(search, other, costs) != depth).any()


def test_the_schedule_looks_at_no_token_that_it_leaves_out():
    assert not anticipates(worth_drafting)


def test_fault_a_search_of_all_depths_anticipates():
    assert anticipates(best_of_all)


def test_the_depth_is_the_last_before_the_rate_fails_to_rise():
    chances, costs = tables()
    for own, found in zip(chances, depths(worth_drafting, chances, costs), strict=True):
        rate, depth = len(own) / costs[0], 0
        for k in range(1, own.shape[1] + 1):
            tokens = len(own) + sum(np.prod(row[:j]) for row in own for j in range(1, k + 1))
            if tokens / costs[k] <= rate:
                break
            rate, depth = tokens / costs[k], k
        assert found == depth
    assert len({*depths(worth_drafting, chances, costs).tolist()}) > 3


def test_rows_count_as_far_as_their_budget_and_costs_are_those_of_the_widths():
    survival, costs = jnp.ones((2, 4)), jnp.asarray([1.0, 1.1, 1.2, 1.3, 1.4])
    for budget, depth in (([9, 9], 4), ([3, 0], 2), ([1, 1], 0), ([0, 0], 0)):
        assert worth_drafting(survival, costs, jnp.asarray(budget)) == depth
    policy, widths = Schedule(rests=False), (0, 1, 3)
    within = policy.costs_within(widths, jnp.asarray([1.0, 2.0, 4.0]), 3)
    assert within.tolist() == [2.0, 2.0, 3.0, 4.0]
    pinned = jnp.asarray([jnp.inf, jnp.inf, 1.0])
    assert policy.choose((), widths, pinned, jnp.ones(2))[0] == 3
    low = jnp.full((2, 3), 1e-6)
    assert worth_drafting(low, policy.costs_within(widths, pinned, 3), jnp.asarray([9, 9])) == 3


# ------------------------------------------------------------------------------- the thresholds


@pytest.mark.parametrize(
    ("least", "sure"),
    [
        (0.0, None),
        (0.4, None),
        (0.0, Confidence(0.4, keeps_last=True)),
        (0.0, Confidence(0.2, along="path", keeps_last=False)),
        (0.3, Confidence(0.2, along="path", keeps_last=True)),
    ],
)
def test_a_chain_ends_at_the_first_chance_below_a_threshold(least, sure):
    chances = np.random.default_rng(2).uniform(0, 1, (60, 3)).astype(np.float32)
    drafter = dataclasses.replace(SPARK, least=least)
    asked = dataclasses.replace(context(60), confidence=sure)
    found = np.asarray(drafter.worthwhile(jnp.asarray(chances), asked))
    for row, kept in zip(chances, found, strict=True):
        wanted = next((k for k in range(3) if row[k] < least), 3)
        if sure is not None:
            seen = row if sure.along == "token" else np.cumprod(row)
            ends = next((k + sure.keeps_last for k in range(3) if seen[k] < sure.least), 3)
            wanted = min(wanted, ends)
        assert kept == wanted
    assert len({*found.tolist()}) > 1 or not (least or sure)


def test_a_row_that_ends_before_counts_for_nothing_where_depths_are_weighed():
    chances = jnp.asarray([[0.9, 0.9, 0.9], [0.9, 0.1, 0.9]])
    drafter = dataclasses.replace(SPARK, least=0.5)
    for step, depths in ((0.1, [3, 1]), (0.3, [1, 1])):
        costs = 1 + step * jnp.arange(4)
        asked = dataclasses.replace(context(2), costs=costs)
        assert drafter.worthwhile(chances, asked).tolist() == depths


def test_costs_of_a_combination_are_read_up_to_the_own_depth():
    chances = jnp.asarray([[0.9, 0.6, 0.3], [0.9, 0.8, 0.9]])
    costs = jnp.asarray([1.0, 1.1, 1.3, 1.9])
    alone = SPARK.worthwhile(chances, dataclasses.replace(context(2), costs=costs))
    deeper = dataclasses.replace(context(2), costs=jnp.append(costs, jnp.asarray([0.1, 0.1])))
    assert SPARK.worthwhile(chances, deeper).tolist() == alone.tolist() == [2, 2]
    inner = Hybrid(inner=SPARK), Fallback(first=NGram(5), inner=SPARK)
    for drafter in (*inner, Union(drafters=(NGram(5), SPARK))):
        whole = Adaptive(drafter, "schedule")
        own = (None, heads(SPARK)) if isinstance(drafter, Union) else heads(SPARK)
        params = {"inner": own, "costs": jnp.ones(len(required(whole.widths, "widths")))}

        def step(params, whole=whole):
            state = whole.init(params, PARAMS, 2, 16)
            return whole.draft_step(params, PARAMS, state, context(2))[0].tokens

        assert jax.eval_shape(step, params).shape == (2, whole.num_draft + 1)


# ------------------------------------------------------------------------------------ the law


class Anticipating(DSpark):
    """A fault: a token is left out where the chance after it, which reads it, is too small."""

    def worthwhile(self, chances, context):
        return super().worthwhile(jnp.roll(chances, -1, axis=1), context)


@pytest.mark.parametrize(("kind", "wrong"), [(DSpark, False), (Anticipating, True)])
def test_fault_a_length_that_follows_a_token_that_it_drops_is_seen(kind, wrong):
    drafter = kind(config=SPARK.config, target=TOY, least=0.5)
    first, other = np.random.default_rng(3).uniform(0, 1, (2, 200, 3)).astype(np.float32)
    kept = drafter.worthwhile(jnp.asarray(first), context(200))
    read = np.arange(3) > np.asarray(kept)[:, None]  # these chances read what is dropped
    again = drafter.worthwhile(jnp.where(read, other, first), context(200))
    assert (np.asarray(kept) != np.asarray(again)).any() == wrong


def leading(weights):
    """Weights with which token 1 is followed by a chance of 0.02, the others by one of 0.98."""
    weights["markov"]["embedding"] = 0.5 * jnp.eye(3)
    weights["confidence"]["weight"] = jnp.asarray([[0.0] * 6 + [8.0, -8.0, 8.0]])
    weights["confidence"]["bias"] = jnp.zeros(1)
    return weights


def evidence(kind, least):
    """The texts of many rows against the target's law."""
    drafter = kind(config=SPARK.config, target=TOY, sibling_sampling="iid", least=least)
    params = {"target": PARAMS, "drafter": leading(heads(drafter))}
    counts, stats = sampled_law.joint_counts(
        TOY, drafter, "rejection", params, (1, 0), 3, WARM, rows=ROWS
    )
    assert 0 < int(stats.drafted.sum()) < 3 * int(stats.rounds.sum())  # some chains are cut
    law = reference.joint_law(TOY, PARAMS, (1, 0), 3, WARM).reshape(-1)
    return sampled_law.judge(counts, law)


def test_a_chain_that_is_cut_by_its_chances_leaves_the_law_as_it_is():
    found = evidence(DSpark, 0.5)
    assert found.fits(FALSE_ALARM), found


def test_a_chance_that_reads_the_token_it_drops_changes_the_law():
    found = evidence(Anticipating, 0.5)
    assert not found.fits(FALSE_ALARM) and found.least(FALSE_ALARM) > 0.01


@pytest.mark.parametrize(("kind", "wrong"), [(DSpark, False), (Anticipating, True)])
def test_one_depth_for_two_rows_leaves_their_law_as_it_is_unless_it_reads_what_it_drops(
    kind, wrong
):
    """The joint law of two rows over many batches, each of which has one depth by its costs."""
    inner = kind(config=SPARK.config, target=TOY, sibling_sampling="iid")
    drafter, batches = Adaptive(inner, "schedule"), 60_000
    costs = jnp.asarray([1.0, 1.1, 1.55])
    own = {"inner": leading(heads(inner)), "costs": costs}
    params, prompts = {"target": PARAMS, "drafter": own}, np.asarray([[1, 0], [2, 0]], np.int32)
    given = TOY, drafter, prompts, np.asarray([2, 2]), jax.random.key(0), 4, WARM, None, ()
    request, capacity = prepare_inputs(*given)
    state = prefill.start(TOY, drafter, "rejection", capacity, params, request)
    texts = np.asarray(state.tokens)[:, :3].tolist()  # with the token that each prompt gave

    def batch(state, key):
        now = dataclasses.replace(state, key=jax.random.split(key, 2))
        for _ in range(2):
            now = run_round(TOY, drafter, "rejection", params, now)
        return now.tokens[:, 3:5], now.stats.drafted[0]

    # a state for each batch: jaxlib 0.10.2 sums products of constants of a vmap wrongly
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (batches, *x.shape)), state)
    keys = jax.random.split(jax.random.key(7), batches)
    tokens, drafted = jax.tree.map(np.asarray, jax.jit(jax.vmap(batch))(states, keys))
    assert len({*drafted.tolist()}) > 2  # depths differ
    which = tokens[..., 0] * 3 + tokens[..., 1]
    counts = np.bincount(which[:, 0] * 9 + which[:, 1], minlength=81)
    laws = [reference.joint_law(TOY, PARAMS, tuple(row), 2, WARM).reshape(-1) for row in texts]
    found = sampled_law.judge(counts, np.outer(*laws).reshape(-1))
    assert found.fits(FALSE_ALARM) != wrong, found


# ------------------------------------------------------------------------------ temperatures


def test_the_temperature_of_a_place_divides_the_logit_of_its_chance_in_a_draft():
    logits = np.random.default_rng(5).normal(size=(4, 3)).astype(np.float32)
    scaled = dataclasses.replace(SPARK, temperatures=(0.5, 1, 4.0))
    for places in (3, 2):
        own = logits[:, :places]
        wanted = 1 / (1 + np.exp(-own / np.asarray([0.5, 1, 4])[:places]))
        np.testing.assert_allclose(scaled.chances(jnp.asarray(own)), wanted, rtol=1e-5)
    params = leading(heads(SPARK))  # each chance is 0.02 or 0.98, by the token before
    for temperatures, most in (((), 3), ((1, 1, 100.0), 2), ((1, 100.0, 1), 1), ((100.0, 1, 1), 0)):
        drafter = dataclasses.replace(SPARK, least=0.6, temperatures=temperatures)

        def step(params, drafter=drafter):
            state = drafter.init(params, PARAMS, 64, 16)
            return drafter.draft_step(params, PARAMS, state, context(64))[0].candidate

        depth = np.asarray(step(params)).sum(axis=1) - 1
        assert depth.max() == most


@pytest.mark.parametrize("format", ["dspark", "block-speculators"])
def test_temperatures_are_stored_with_the_heads(format, tmp_path):
    lm = load(TARGET, tokenizer=False, dtype="float32")
    layers = dataclasses.replace(BLOCK, model_type="qwen3")
    config = DSparkConfig(**SHAPE | dict(layers=layers, target_layers=(1, 2)))
    drafter = DSpark(config=config, target=lm.target, temperatures=(0.5, 1.0, 2.0))
    for own in (drafter, dataclasses.replace(drafter, temperatures=())):
        folder = tmp_path / str(len(own.temperatures))
        save_drafter(own, heads(own), folder, target=lm, format=format)
        assert load_drafter(folder, lm).drafter == own
        file = folder / "config.json"
        written = json.loads(file.read_text())
        assert ("confidence_temperatures" in written["specjax"]) == bool(own.temperatures)
    for wrong, words in (("warm", "must be a list"), ([1], r"accepted are 3 numbers above 0")):
        written["specjax"]["confidence_temperatures"] = wrong
        file.write_text(json.dumps(written))
        with pytest.raises(ValueError, match=words):
            load_drafter(folder, lm)


# ------------------------------------------------------------------------------------- shapes


def test_shapes_that_do_not_fit_are_named():
    for wrong, words in (
        (dict(markov="lstm"), "markov='lstm': accepted are vanilla, gated, rnn"),
        (dict(markov="rnn", from_root=False), "markov='rnn' with from_root=False is not sup"),
        (dict(markov_rank=-1), "markov_rank=-1"),
        (dict(markov_rank=0), "give confidence_reads_token=False"),
    ):
        with pytest.raises(ValueError, match=words):
            DSparkConfig(**SHAPE | wrong)
    blind = DSparkConfig(**SHAPE, confidence=False)
    for settings, words in (
        (dict(config=blind, least=0.5), "no confidence head"),
        (dict(config=SPARK.config, least=0.5, topology=trees.branching(2, 1)), "drafts a tree"),
        (dict(config=SPARK.config, least=1.5), "least=1.5"),
        (dict(config=SPARK.config, temperatures=(1, 1)), "accepted are 3 numbers above 0"),
        (dict(config=SPARK.config, temperatures=(1, 1, 0)), "one for each place"),
        (dict(config=blind, temperatures=(1, 1, 1)), "with a confidence head"),
        (dict(config=SPARK.config, topology=trees.chain(4)), "4 deep, .* has 3 places for drafted"),
    ):
        with pytest.raises(ValueError, match=words):
            DSpark(target=TOY, **settings)


def test_its_heads_are_not_left_out_where_dflash_is_written(tmp_path):
    shape = DSparkConfig(**SHAPE, from_root=False)
    drafter = DSpark(config=shape, target=TOY)
    with pytest.raises(ValueError, match="no place for the heads of a DSpark; take 'dspark'"):
        save_drafter(drafter, heads(drafter), tmp_path, format="dflash")


def test_the_schedule_rests_where_drafts_lose_and_not_where_they_pay():
    policy, widths = Schedule(), (0, 1, 3)
    costs, budget = jnp.asarray([1.0, 1.5, 2.0]), jnp.full((2,), 1000)
    for accepted, rests in ((0, True), (3, False)):
        memory, chosen = policy.init(2, 3), []
        for _ in range(30):
            width, memory = policy.choose(memory, widths, costs, budget)
            chosen.append(int(width))
            outcome = Outcome(
                width=jnp.full((2,), width),
                offered=jnp.full((2,), width),
                accepted=jnp.full((2,), min(accepted, int(width))),
                live=jnp.ones((2,), bool),
            )
            if chosen[-1]:  # ``Adaptive`` tells it nothing of rests
                memory = policy.update(memory, outcome)
        assert ((0 in chosen[5:]) is rests) and max(chosen) == 3, (accepted, chosen)
    assert not Schedule(rests=False).can_rest
