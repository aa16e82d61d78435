"""Greedy exactness and the caches, for every drafter of the registry."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import (
    MODEL,
    NUM,
    PARAMS,
    PROMPTS,
    VOCAB,
    new_tokens,
    pad,
    plain_texts,
    rebuilt,
    start,
    step,
)
from registry import cases
from toys import own_params, unseen, whole

import specjax
from specjax import Sampling
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import result
from specjax.drafters import NGram
from specjax.drafters.feature_cache import FeatureReader
from specjax.drafters.heads import HeadDrafter
from specjax.drafters.specdec import SpecDec
from specjax.types import Context, Segment

CASES = cases(MODEL, PARAMS)
# test_sampled compiles the same rounds of the same registry with all of XLA's optimizations
pytestmark = pytest.mark.usefixtures("quick_compilation")


def run(name, prompts, **settings):
    drafter, weights, _ = CASES[name]
    tokens, lengths = pad(prompts)
    settings = {"max_new_tokens": NUM, "key": jax.random.key(0), **settings}
    params = {"target": PARAMS, "drafter": weights}
    return specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


@functools.cache
def states(name):
    """The states of a case after each of the first four rounds, and at the end of its text; two
    programs serve all that is asked about them."""
    drafter, weights, _ = CASES[name]
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": weights}
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, Sampling(), None, ()
    )
    found = [start(MODEL, drafter, "auto", capacity, params, request)]
    for rounds in (1, 1, 1, 1, NUM * 3):
        found.append(step(MODEL, drafter, "auto", rounds, params, found[-1]))
    return found[1:-1], found[-1]


@pytest.mark.parametrize("name", CASES)
def test_greedy_is_plain_decoding_token_for_token_in_a_ragged_batch(name):
    out = result(states(name)[1])
    assert new_tokens(out, PROMPTS) == plain_texts()
    stats = out.stats
    assert (np.asarray(stats.emitted) == NUM - 1).all()  # the first token is no round's
    # each round emits its accepted tokens and one more, unless the budget cuts it short, or the
    # drafter is silent: every third round, beginning with the first
    extra = np.asarray(stats.accepted + stats.rounds - stats.emitted)
    silent = -(-np.asarray(stats.rounds) // 3) if name == "silent" else 0
    assert ((extra == silent) | (extra == silent + 1)).all()
    assert np.asarray(stats.accepted_at).sum() == np.asarray(stats.accepted).sum()
    flags = [np.asarray(out.from_draft)[i, len(p) :].sum() for i, p in enumerate(PROMPTS)]
    assert flags == np.asarray(stats.accepted).tolist()


@pytest.mark.parametrize("name", ["draft", "ngram", "tree per row"])
def test_a_row_alone_is_the_row_in_a_batch(name):
    warm = Sampling(temperature=1.1)
    keys = jax.random.split(jax.random.key(7), len(PROMPTS))
    together = new_tokens(run(name, PROMPTS, key=keys, sampling=warm), PROMPTS)
    for i in (0, 2, 6):
        alone = run(name, PROMPTS[i : i + 1], key=keys[i : i + 1], sampling=warm)
        assert new_tokens(alone, PROMPTS[i : i + 1]) == [together[i]]


@pytest.mark.parametrize("name", ["plain", "draft", "draft itself", "tree top"])
def test_stops_and_budgets_cut_within_an_accepted_block(name):
    stops = sorted({plain_texts()[2][4], plain_texts()[3][6]})
    budgets = np.asarray([1, 2, 12, 12, 5, 3, 7, 4], np.int32)
    out = run(name, PROMPTS, stops=stops, max_new_tokens=budgets, capacity=9 + NUM)
    for row, (got, full) in enumerate(zip(new_tokens(out, PROMPTS), plain_texts(), strict=True)):
        cut = next((i + 1 for i, t in enumerate(full) if t in stops), NUM)
        assert got == full[: min(cut, budgets[row])]
        assert int(out.stats.emitted[row]) == len(got) - 1  # the first token is no round's
    assert (
        np.asarray(out.tokens)[np.arange(9 + NUM) >= np.asarray(out.lengths)[:, None]] == 0
    ).all()


@pytest.mark.parametrize("name", ["plain", "draft itself", "ngram", "tree top"])
def test_the_last_slot_of_the_buffer_is_used_and_nothing_beyond(name):
    out = run(name, PROMPTS, capacity=9)  # the third prompt fills it
    assert new_tokens(out, PROMPTS) == [
        full[: 9 - len(p)] for p, full in zip(PROMPTS, plain_texts(), strict=True)
    ]
    assert out.tokens.shape == (8, 9) and (np.asarray(out.lengths) == 9).all()


def test_rows_may_stop_each_at_its_own_tokens():
    stops = np.asarray([[plain_texts()[i][2], -1] for i in range(8)])
    out = run("draft", PROMPTS, stops=stops)
    for got, full in zip(new_tokens(out, PROMPTS), plain_texts(), strict=True):
        assert got == full[: full.index(full[2]) + 1]


@pytest.mark.parametrize("name", ["plain", "draft", "tree distinct"])
def test_an_array_of_temperatures_is_exact_for_its_rows_at_zero(name):
    temperature = np.asarray([0, 1, 0, 1, 0, 1, 0, 1], np.float32)
    out = run(name, PROMPTS, sampling=Sampling(temperature=temperature))
    got = new_tokens(out, PROMPTS)
    assert [got[i] for i in (0, 2, 4, 6)] == [plain_texts()[i] for i in (0, 2, 4, 6)]
    assert got != plain_texts()


@pytest.mark.parametrize("name", ["draft", "ngram", "tree top"])
def test_penalty_and_bias_at_temperature_zero_equal_plain_decoding(name):
    bias = np.zeros(VOCAB, np.float32)
    bias[plain_texts()[0][0]] = -2.0
    settings = Sampling(repetition_penalty=1.5, logit_bias=bias)
    plain = new_tokens(run("plain", PROMPTS, sampling=settings), PROMPTS)
    assert new_tokens(run(name, PROMPTS, sampling=settings), PROMPTS) == plain != plain_texts()


@functools.partial(jax.jit, static_argnums=0)
def fresh(drafter, params, tokens, length):
    """The state of heads that have read the first ``length`` tokens of each row at once."""
    batch, size = tokens.shape
    draft = whole(tokens)
    cache = MODEL.init(params["target"], batch, size)
    features = MODEL.verify(params["target"], cache, draft, features=drafter.features).features
    after = jnp.roll(tokens, -1, axis=1)
    segment = Segment(tokens=tokens, next=after, features=features, start=draft.start, num=length)
    return drafter.observe(
        *own_params(params), drafter.init(*own_params(params), batch, size), segment
    )


@functools.partial(jax.jit, static_argnums=0)
def settled(drafter, params, learned, state):
    context = Context(
        tokens=state.tokens,
        length=state.length,
        budget=state.budget,
        key=state.key,
        sampling=state.sampling,
    )
    return drafter.sync(*own_params(params), learned, context, before="prompt")


@functools.partial(jax.jit, static_argnums=0)
def read(drafter, params, learned, state):
    """The state of a drafter that reads the text when it drafts, after it was read."""
    context = Context(
        tokens=state.tokens,
        length=state.length,
        budget=jnp.ones_like(state.budget),
        key=state.key,
        sampling=state.sampling,
        begin=state.begin,
    )
    network = drafter.heads(params["drafter"])
    learned = drafter._encode_prompt(network, learned, context)
    return drafter._read_text(network, learned, context)


@pytest.mark.parametrize("name", CASES)
def test_after_any_number_of_rounds_the_cache_is_that_of_a_fresh_pass(name):
    drafter, weights, _ = CASES[name]
    params = {"target": PARAMS, "drafter": weights}
    for state in states(name)[0]:
        capacity = state.tokens.shape[1]
        used = (jnp.arange(capacity) < state.length[:, None] - 1)[:, None, :, None]
        expected = rebuilt(PARAMS, state.tokens, state.length - 1)
        np.testing.assert_allclose(
            jnp.where(used, state.cache, 0), jnp.where(used, expected, 0), atol=1e-6
        )
        if isinstance(drafter, HeadDrafter):
            expected = fresh(drafter, params, state.tokens, state.length - 1)
            if hasattr(expected, "feature"):
                np.testing.assert_allclose(state.drafter_state.feature, expected.feature, atol=1e-5)
            learned = state.drafter_state
            if isinstance(drafter, FeatureReader):  # what is pending is read; later stages lag
                learned = settled(drafter, params, learned, state)
                expected = settled(drafter, params, expected, state)
                behind = state.length[:, None] - drafter.num_stages
                used = (jnp.arange(capacity) < behind)[:, None, :, None]
            if isinstance(drafter, SpecDec):  # whose text begins where its prompt ends
                learned, expected = (read(drafter, params, x, state) for x in (learned, expected))
                assert (learned.filled == state.length - state.begin).all()
                used = (jnp.arange(capacity) < learned.filled[:, None])[:, None, :, None]
            caches = (jax.tree.leaves(getattr(x, "cache", ())) for x in (learned, expected))
            for kept, own in zip(*caches, strict=True):
                assert jnp.allclose(jnp.where(used, kept, 0), jnp.where(used, own, 0), atol=1e-5)
        models = []
        if name.startswith("draft"):  # the draft model lags two tokens behind
            assert (state.drafter_state.filled >= state.length - 2).all()
            models = [(weights, state.drafter_state)]
        if name.startswith("union"):  # or more, where the others were right
            inner = zip(weights, state.drafter_state.inner, strict=True)
            models = [(own, learned) for own, learned in inner if own is not None]
        for own, learned in models:
            used = (jnp.arange(capacity) < learned.filled[:, None])[:, None, :, None]
            expected = rebuilt(own, state.tokens, learned.filled)
            np.testing.assert_allclose(
                jnp.where(used, learned.cache, 0), jnp.where(used, expected, 0), atol=1e-6
            )


def test_stream_commits_the_same_tokens_in_bursts():
    drafter, weights, _ = CASES["draft"]
    tokens, lengths = pad(PROMPTS)
    settings = dict(key=jax.random.key(1), max_new_tokens=NUM, sampling=Sampling(temperature=1.0))
    params = {"target": PARAMS, "drafter": weights}
    whole = specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)
    pieces = list(specjax.stream(MODEL, drafter, params, tokens, lengths, rounds=2, **settings))
    assert np.asarray(pieces[0].lengths).tolist() == (lengths + 1).tolist()
    assert all((np.diff([p.lengths[i] for p in pieces]) >= 0).all() for i in range(8))
    assert (np.asarray(pieces[-1].tokens) == np.asarray(whole.tokens)).all()
    assert str(pieces[-1].stats) == str(whole.stats)


def test_decode_works_within_jit_and_scan():
    drafter, weights, _ = CASES["draft"]
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": weights}

    @jax.jit
    def twice(params, tokens, lengths, key):
        def one(carry, key):
            out = specjax.decode(
                MODEL, drafter, params, tokens, lengths, key=key, max_new_tokens=NUM
            )
            return carry + out.stats.emitted.sum(), out.tokens

        return jax.lax.scan(one, 0, jax.random.split(key, 2))

    total, both = twice(params, tokens, lengths, jax.random.key(0))
    assert int(total) == 2 * 8 * (NUM - 1)  # the first token is no round's
    width = tokens.shape[1]
    for row, prompt in enumerate(PROMPTS):
        assert both[1][row, len(prompt) : len(prompt) + NUM].tolist() == plain_texts()[row]
    assert width + NUM == both.shape[2]


def test_decode_under_vmap_gives_each_lane_the_text_of_its_key():
    drafter, weights, _ = CASES["eagle3"]
    params = {"target": PARAMS, "drafter": weights}
    tokens, lengths = jnp.asarray([[1, 0, 2], [3, 1, 0]]), jnp.asarray([3, 2])
    settings = dict(max_new_tokens=6, sampling=Sampling(temperature=0.9))

    def text(key):
        return specjax.decode(MODEL, drafter, params, tokens, lengths, key=key, **settings).tokens

    # in another program, jaxlib 0.10.2 summed a product of constants of so many lanes wrongly
    keys = jax.random.split(jax.random.key(1), 80)
    lanes, each = jax.jit(jax.vmap(text))(keys), jax.lax.map(text, keys)
    assert np.array_equal(lanes, each) and len(np.unique(lanes, axis=0)) > 40


def test_a_caller_is_traced_once_whatever_the_values():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params, tokens, lengths, key, temperature):
        return specjax.decode(
            MODEL,
            CASES["draft"][0],
            params,
            tokens,
            lengths,
            key=key,
            max_new_tokens=3,
            capacity=30,
            sampling=Sampling(temperature=temperature),
        )

    params = {"target": PARAMS, "drafter": CASES["draft"][1]}
    for seed, prompts in ((0, PROMPTS), (1, PROMPTS[::-1])):
        temperature = jnp.full(8, 0.5 + seed, jnp.float32)
        run(params, *pad(prompts), jax.random.key(seed), temperature)


@pytest.mark.usefixtures("one_trace")
def test_a_second_call_traces_nothing_whatever_the_values():
    drafter, weights, _ = CASES["draft"]
    model = unseen(MODEL)
    params = {"target": PARAMS, "drafter": weights}
    for seed, prompts in ((0, PROMPTS), (1, PROMPTS[::-1])):
        tokens, lengths = pad(prompts)
        specjax.decode(
            model,
            drafter,
            params,
            tokens,
            lengths,
            key=jax.random.key(seed),
            max_new_tokens=NUM - seed,
            capacity=30,
            sampling=Sampling(temperature=np.full(8, 0.5 + seed, np.float32), top_p=0.9),
        )


def propose(tokens, num=4, longest=3):
    context = specjax.Context(
        tokens=jnp.asarray([tokens + [0, 0]]),
        length=jnp.asarray([len(tokens)]),
        budget=jnp.asarray([9]),
        key=jax.random.split(jax.random.key(0), 1),
        sampling=Sampling().rows(1),
    )
    draft, _ = NGram(num_draft=num, longest=longest, shortest=1).draft_step(None, None, (), context)
    return draft.tokens[0, 1:].tolist(), bool(draft.candidate[0, 1])


def test_prompt_lookup_takes_the_longest_then_most_recent_match():
    assert propose([1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3])[0][:2] == [5, 7]  # most recent of two
    assert propose([1, 2, 3, 4, 8, 9, 3, 6, 6, 1, 2, 3])[0][:3] == [4, 8, 9]  # the longest
    assert propose([1, 2, 3, 4, 5])[1] is False
    assert propose([7, 8, 7, 8]) == ([7, 8, 7, 8], True)  # the copy runs on periodically
    assert propose([5])[1] is False
