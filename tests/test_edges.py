"""Traps that a review found: each of these was wrong once."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from toys import TreeDrafter, bag, context

import specjax
from specjax import Sampling, trees
from specjax.decoding import loop, prefill, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Plain
from specjax.sampling import drawing
from specjax.sampling.distribution import Prefix
from specjax.sampling.drawing import draw
from specjax.types import Scores

MODEL, PARAMS = bag(13, 3, features=8)
start = jax.jit(prefill.start, static_argnums=(0, 1, 2, 3))
burst = jax.jit(loop.burst, static_argnums=(0, 1, 2, 3))


@jax.jit
def first_tokens(draft, logits, around):
    """The token below the root, drafted or not, int32 ``[B]``, under ``rejection``."""
    scores = Scores(logits=logits, features=None, entries=None)
    verdict = specjax.accept("rejection", {}, draft, scores, around, around.key)
    drafted = draft.tokens[jnp.arange(len(logits)), verdict.path[:, 1]]
    return jnp.where(verdict.count > 0, drafted, verdict.token)


def test_a_distinct_sibling_beyond_the_support_of_its_law_is_never_accepted():
    batch, p = 20_000, jnp.asarray([0.5, 0.2, 0.3])
    around = context(batch)
    # q knows one token; the second sibling is what is drawn from nothing: token 0
    draft = trees.tree_draft(
        around,
        jnp.broadcast_to(jnp.asarray([1, 0]), (batch, 2)),
        (-1, 0, 0),
        law=jnp.zeros((batch, 2), jnp.int32),
        laws=jnp.broadcast_to(jnp.asarray([0.0, 1.0, 0.0]), (batch, 1, 3)),
        draws="distinct",
    )
    first = first_tokens(draft, jnp.broadcast_to(jnp.log(p), (batch, 3, 3)), around)
    share = np.bincount(np.asarray(first), minlength=3) / batch
    np.testing.assert_allclose(share, p, atol=0.02)


def test_a_node_that_was_not_scored_is_never_accepted():
    around = context(2, Sampling())
    draft = trees.chain_draft(
        around, jnp.zeros((2, 1), jnp.int32), scored=jnp.asarray([[True], [False]])
    )
    scores = Scores(logits=jnp.zeros((2, 2, 5)), features=None, entries=None)
    verdict = specjax.accept("auto", {}, draft, scores, around, around.key)
    assert verdict.count.tolist() == [1, 0]


@pytest.mark.parametrize("vocab", [3, 97, 1024])
def test_the_best_tokens_come_in_order_and_equal_ones_by_their_index(vocab):
    x = np.random.default_rng(vocab).integers(0, vocab // 2, (2, 3, vocab)).astype(np.float32)
    x[0, 0, 1:] = -np.inf
    found, order = drawing.best(jnp.asarray(x), 3), np.argsort(-x, axis=-1, kind="stable")
    assert found[0, 0].tolist() == [0, -1, -1]  # what has no probability is no choice
    assert (np.asarray(found) == order[..., :3])[1].all()


def test_a_token_without_mass_is_never_drawn_where_the_cumulative_sum_steps_down():
    rng = np.random.default_rng(0)
    vocab, width = 131_072, 256
    sums = rng.random((2000, vocab // width)) * (rng.random((2000, vocab // width)) < 0.5)
    sums = sums.astype(np.float32)
    total = np.asarray(jax.jit(lambda x: jnp.cumsum(x, axis=-1))(sums))
    down = np.diff(total, axis=-1) < 0
    rows = np.flatnonzero(down.any(axis=1))[:32]
    assert len(rows) == 32, "cumulative sums have become monotone: this test may go"
    weights = np.zeros((32, vocab), np.float32)
    weights[:, ::width] = sums[rows]
    level = total[rows, down[rows].argmax(axis=1) + 1]  # where the sum has just stepped down
    found = 0
    for ulps in range(-3, 4):
        uniform = level / np.asarray(jnp.sum(sums[rows], axis=-1))
        for _ in range(abs(ulps)):
            uniform = np.nextafter(uniform, np.float32(np.sign(ulps)))
        token = np.asarray(draw(jnp.asarray(weights), np.clip(uniform, 0.0, 1 - 2**-24)))
        found += int((weights[np.arange(32), token] == 0).sum())
    assert found == 0


def test_bias_is_added_before_the_repetition_penalty_as_in_transformers():
    sampling = Sampling(repetition_penalty=2.0, logit_bias=np.asarray([3.0, 3.0])).rows(1)
    prefix = Prefix(
        tokens=jnp.asarray([[0]]), length=jnp.asarray([1]), path=jnp.full((1, 1), -1, jnp.int32)
    )
    assert sampling.adjust(jnp.asarray([[1.0, 1.0]]), prefix).tolist() == [[2.0, 4.0]]


# ----------------------------------------------------------------------------- settings


def test_sampling_survives_tree_map_to_any_values():
    rows = Sampling(temperature=0.7, top_p=0.9).rows(2)
    assert jax.tree.map(jnp.zeros_like, rows).top_p.tolist() == [0, 0]


def test_replacing_the_temperature_of_a_greedy_setting_makes_it_sample():
    assert Sampling().greedy
    assert not dataclasses.replace(Sampling(), temperature=0.8).greedy
    assert not Sampling(temperature=0, greedy=False).greedy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(temperature=jnp.asarray([0.5, -1.0])), "temperature=.*out of range"),
        (dict(top_p=jnp.asarray([0.5, 0.0])), "top_p=.*out of range"),
        (dict(temperature=np.asarray([0.5, 0.5]), greedy=True), "0 where greedy=True"),
        (dict(temperature=None), "temperature=None"),
        (dict(temperature=np.ones((2, 1))), "shape .2, 1.: give a scalar or .B."),
        (dict(logit_bias=1.0), "logit_bias"),
    ],
)
def test_settings_are_checked_before_anything_compiles(settings, words):
    with pytest.raises(ValueError, match=words):
        decode(sampling=Sampling(**settings))


def test_a_bias_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="logit_bias"):
        Sampling(logit_bias=np.asarray([0.0, np.nan]))


def decode(**changes):
    settings = dict(
        drafter=Plain(),
        tokens=np.asarray([[1, 2, 3], [4, 5, 6]]),
        lengths=np.asarray([3, 2]),
        max_new_tokens=4,
        key=jax.random.key(0),
    )
    settings.update(changes)
    drafter, tokens, lengths = (settings.pop(name) for name in ("drafter", "tokens", "lengths"))
    return specjax.decode(MODEL, drafter, {"target": PARAMS}, tokens, lengths, **settings)


# ----------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(key=jax.random.PRNGKey(0)), "give jax.random.key.seed."),
        (dict(key=0), "key has type int"),
        (dict(key=jax.random.split(jax.random.key(0), 3)), "key has shape .3,."),
        (dict(stops=5), "stops has shape"),
        (dict(stops=np.ones((3, 1), int)), "stops has shape .3, 1."),
        (dict(stops=[1.5]), "token ids are integers"),
        (dict(lengths=np.asarray([2.5, 3.0])), "lengths are integers"),
        (dict(max_new_tokens=2.5), "must be an integer"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        decode(**change)


def test_a_row_fits_into_the_context_by_its_own_budget():
    lm, tokens = specjax.load("embedded"), np.full((2, 600), 5)
    settings = dict(key=jax.random.key(0), params={"target": lm.params, "drafter": None})

    def asked(*budgets):
        weights, key = settings["params"], settings["key"]
        lengths = np.asarray([600, 10])
        return specjax.decode(
            lm.target, Plain(), weights, tokens, lengths, key=key, max_new_tokens=[*budgets]
        )

    with pytest.raises(ValueError, match="max_new_tokens=500 after a prompt of 600 tokens exceeds"):
        asked(500, 600)
    assert asked(2, 900).lengths.tolist() == [602, 910]


def test_a_stream_of_bursts_without_rounds_is_refused_instead_of_never_ending():
    tokens, lengths = np.asarray([[1, 2]]), np.asarray([2])
    for rounds in (0, None, 1.5):
        settings = dict(key=jax.random.key(0), max_new_tokens=3, rounds=rounds)
        with pytest.raises(ValueError, match=f"rounds={rounds}"):  # at the call, not at a piece
            specjax.stream(MODEL, Plain(), {"target": PARAMS}, tokens, lengths, **settings)


def test_keys_of_a_hardware_generator_keep_rows_independent_of_their_mates():
    # vmap over `rbg` keys draws every row from the first one: once that row had finished, all
    # others met the same noise again in every round
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    warm = Sampling(temperature=1.5)
    both = decode(key=keys, sampling=warm, max_new_tokens=np.asarray([1, 12]))
    alone = decode(
        key=keys[1:],
        sampling=warm,
        max_new_tokens=12,
        tokens=np.asarray([[4, 5, 6]]),
        lengths=np.asarray([2]),
    )
    assert both.tokens[1, :14].tolist() == alone.tokens[0, :14].tolist()


@pytest.mark.usefixtures("one_trace")
def test_a_text_is_the_same_whatever_arithmetic_the_program_around_it_asks_for():
    """Under ``jax_enable_x64`` a sum of int32 is int64, and strict promotion refuses much."""
    settings = dict(sampling=Sampling(temperature=0.7))
    own = decode(**settings)
    chex.clear_trace_counter()  # other settings of JAX are another program
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        with jax.numpy_dtype_promotion("strict"):
            other = decode(**settings)
    assert other.tokens.tolist() == own.tokens.tolist()
    assert [x.dtype for x in jax.tree.leaves(other)] == [x.dtype for x in jax.tree.leaves(own)]


def test_each_device_of_a_shard_map_over_any_axis_decodes_rows_of_its_own():
    mesh = jax.make_mesh((1,), ("walkers",), axis_types=(AxisType.Auto,))
    by_walker = dict(mesh=mesh, in_specs=P("walkers"), out_specs=P("walkers"), check_vma=False)
    decoded = jax.shard_map(lambda keys: decode(key=keys[0]).tokens[None], **by_walker)
    made = jax.eval_shape(decoded, jax.random.split(jax.random.key(0), 1))
    assert made.shape == (1, 2, 7)


def test_other_lengths_of_the_same_shape_compile_nothing():
    for lengths in ([3, 2], [1, 2]):
        decode(lengths=np.asarray(lengths))


# ----------------------------------------------------------------------------- trees


def test_laws_over_a_smaller_vocabulary_are_judged_by_the_targets_ids():
    batch, p = 20_000, jnp.asarray([0.5, 0.2, 0.3, 0.0])
    around, ids = context(batch), jnp.asarray([2, 0])
    q = jnp.broadcast_to(jnp.asarray([0.8, 0.2]), (batch, 1, 2))
    drawn = draw(q[:, 0], jax.random.uniform(jax.random.key(1), (batch,)))
    small = trees.chain_draft(around, ids[drawn][:, None], q, vocab=ids)
    guess = trees.chain_draft(around, jnp.full((batch, 1), 1))
    for draft in (small, trees.merge_drafts(guess, small)):
        logits = jnp.broadcast_to(jnp.log(p), (batch, draft.num_nodes, 4))
        first = first_tokens(draft, logits, around)
        share = np.bincount(np.asarray(first), minlength=4) / batch
        np.testing.assert_allclose(share, p, atol=0.02)


def test_laws_without_rows_and_merged_vocabularies_are_refused():
    around = context(1)
    laws, tokens = jnp.ones((1, 1, 2)) / 2, jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="law and laws belong together"):
        trees.tree_draft(around, tokens, (-1, 0), laws=laws)
    small = trees.chain_draft(around, tokens, laws, vocab=jnp.asarray([3, 1]))
    with pytest.raises(ValueError, match="scatter those laws"):
        trees.merge_drafts(small, trees.chain_draft(around, tokens, laws))


def test_merge_hangs_nothing_scored_below_what_is_not():
    around, no, yes = context(1), jnp.zeros((1, 2), bool), jnp.ones((1, 2), bool)
    tokens = jnp.asarray([[4, 5]])
    absent = trees.chain_draft(around, tokens, candidate=no, scored=no)
    passenger = trees.chain_draft(around, tokens, candidate=no, scored=yes)
    assert trees.merge_drafts(absent, passenger).parent.tolist() == [[-1, 0, 1, 0, 3]]


def test_a_merged_round_is_silent_only_if_every_draft_is():
    around = context(2)
    loud = trees.chain_draft(around, jnp.asarray([[4], [4]]))
    mute = dataclasses.replace(loud, candidate=jnp.asarray([[False, True], [True, True]]))
    assert trees.merge_drafts(mute, mute).candidate[:, 0].tolist() == [False, True]
    assert trees.merge_drafts(mute, loud).candidate[:, 0].tolist() == [True, True]


def test_a_round_after_a_silent_one_has_noise_of_its_own():
    drafter = TreeDrafter(model=MODEL, topology=(-1, 0), silent_every=2)
    request, capacity = prepare_inputs(
        MODEL,
        drafter,
        np.asarray([[1, 2]]),
        np.asarray([2]),
        jax.random.key(0),
        4,
        Sampling(temperature=1.0),
        None,
        (),
    )
    params = {"target": PARAMS, "drafter": PARAMS}
    state = start(MODEL, drafter, "auto", capacity, params, request)
    later = burst(MODEL, drafter, "auto", 1, params, state)
    assert later.length.tolist() == state.length.tolist() and later.num_empty_rounds.tolist() == [1]
    for role in (round.DRAFT, round.ACCEPT):
        assert (round.round_keys(state, role) != round.round_keys(later, role)).all()
    spoken = burst(MODEL, drafter, "auto", 1, params, later)
    assert spoken.length > later.length and spoken.num_empty_rounds.tolist() == [0]


def test_the_law_is_that_of_the_processors_of_transformers():
    torch = pytest.importorskip("torch")
    hf = pytest.importorskip("transformers.generation.logits_process")
    rng, vocab = np.random.default_rng(0), 50
    for trial in range(60):
        logits = (rng.normal(size=(4, vocab)) * rng.choice([0.5, 2, 6])).astype(np.float32)
        if trial % 5 == 0:
            logits[:, :7] = -np.inf
        bias = rng.normal(size=vocab).astype(np.float32)
        ids = rng.integers(0, vocab, (4, 9))
        penalty, temperature = rng.choice([0.8, 1.3]), rng.choice([0.3, 1.7])
        top_k, top_p, min_p = rng.choice([1, 3, 20, 80]), rng.choice([0.3, 0.9]), 0.05
        settings = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=penalty,
            logit_bias=bias,
        ).rows(4)
        prefix = Prefix(  # seven committed tokens, two on a path
            tokens=jnp.asarray(ids, jnp.int32),
            length=jnp.full(4, 7),
            path=jnp.asarray(ids[:, 7:], jnp.int32),
        )
        expected = torch.tensor(logits)
        for processor in (
            hf.SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in enumerate(bias)]),
            hf.RepetitionPenaltyLogitsProcessor(float(penalty)),
            hf.TemperatureLogitsWarper(float(temperature)),
            hf.TopKLogitsWarper(int(top_k)),
            hf.TopPLogitsWarper(float(top_p)),
            hf.MinPLogitsWarper(min_p),
        ):
            expected = processor(torch.tensor(ids), expected)
        got = settings.probabilities(jnp.asarray(logits), prefix)
        np.testing.assert_allclose(got, torch.softmax(expected, -1).numpy(), atol=1e-5)
