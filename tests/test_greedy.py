"""Greedy exactness, the contract's edges and the caches, for every drafter of the registry."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from toys import TreeDrafter, bag, like, own_params

import specjax
from specjax import Sampling, trees
from specjax.decoding import loop, reference
from specjax.drafters import NGram, Plain
from specjax.drafters.feature import FeatureDrafter
from specjax.drafters.heads import HeadDrafter
from specjax.types import Context, Draft, Segment, Verdict

VOCAB, NUM = 13, 12
MODEL, PARAMS = bag(VOCAB, 3, features=8)
CASES = cases(MODEL, PARAMS)
# test_sampled compiles the same rounds of the same registry with all of XLA's optimizations
pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = [
    np.random.default_rng(i).integers(0, VOCAB, size).tolist()
    for i, size in enumerate((1, 2, 9, 4, 7, 3, 1, 6))
]


@functools.cache
def plain_texts():
    """What plain decoding says, prompt by prompt, by passes without a cache."""
    return [reference.greedy(MODEL, PARAMS, prompt, NUM) for prompt in PROMPTS]


def pad(prompts):
    width = max(map(len, prompts))
    tokens = np.full((len(prompts), width), VOCAB - 1, np.int32)  # padding is anything
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, np.asarray([len(p) for p in prompts], np.int32)


def run(name, prompts, **settings):
    drafter, weights, _ = CASES[name]
    tokens, lengths = pad(prompts)
    settings = {"max_new_tokens": NUM, "key": jax.random.key(0), **settings}
    params = {"target": PARAMS, "drafter": weights}
    return specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


start = jax.jit(loop.start, static_argnums=(0, 1, 2, 3))
step = jax.jit(loop.burst, static_argnums=(0, 1, 2))  # donates nothing: every state is kept


@functools.cache
def states(name):
    """The states of a case after each of the first four rounds, and at the end of its text; two
    programs serve all that is asked about them."""
    drafter, weights, _ = CASES[name]
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": weights}
    request, capacity = loop.prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, Sampling(), None, ()
    )
    found = [start(MODEL, drafter, "auto", capacity, params, request)]
    for rounds in (1, 1, 1, 1, NUM * 3):
        found.append(step(MODEL, drafter, "auto", rounds, params, found[-1]))
    return found[1:-1], found[-1]


def new_tokens(out, prompts):
    ends = np.asarray(out.lengths)
    return [np.asarray(out.tokens)[i, len(p) : ends[i]].tolist() for i, p in enumerate(prompts)]


@pytest.mark.parametrize("name", CASES)
def test_greedy_is_plain_decoding_token_for_token_in_a_ragged_batch(name):
    out = loop.result(states(name)[1])
    assert new_tokens(out, PROMPTS) == plain_texts()
    stats = out.stats
    assert (np.asarray(stats.emitted) == NUM).all()
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
        assert int(out.stats.emitted[row]) == len(got)
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
    draft = Draft(
        start=jnp.zeros((batch,), jnp.int32), tokens=tokens, topology=trees.chain_parents(size - 1)
    )
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
            if isinstance(drafter, FeatureDrafter):  # what is pending is read; later stages lag
                learned = settled(drafter, params, learned, state)
                expected = settled(drafter, params, expected, state)
                behind = state.length[:, None] - drafter.num_stages
                used = (jnp.arange(capacity) < behind)[:, None, :, None]
            caches = (jax.tree.leaves(getattr(x, "cache", ())) for x in (learned, expected))
            for kept, own in zip(*caches, strict=True):
                assert jnp.allclose(jnp.where(used, kept, 0), jnp.where(used, own, 0), atol=1e-5)
        models = []
        if name.startswith("draft"):  # the draft model lags two tokens behind
            assert (state.drafter_state.filled >= state.length - 2).all()
            models = [(weights, state.drafter_state)]
        if name.startswith("union"):  # or more, where the others were right
            models = list(zip(weights, state.drafter_state.inner, strict=True))
        for own, learned in models:
            used = (jnp.arange(capacity) < learned.filled[:, None])[:, None, :, None]
            expected = rebuilt(own, state.tokens, learned.filled)
            np.testing.assert_allclose(
                jnp.where(used, learned.cache, 0), jnp.where(used, expected, 0), atol=1e-6
            )


@jax.jit
def rebuilt(params, tokens, count):
    batch, size = tokens.shape
    draft = Draft(
        start=jnp.zeros((batch,), jnp.int32),
        tokens=tokens,
        topology=trees.chain_parents(size - 1),
    )
    cache = MODEL.init(params, batch, size)
    path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    entries = MODEL.verify(params, cache, draft).entries
    return MODEL.commit(
        cache, entries, draft.start, Verdict(path=path, count=count - 1, token=count)
    )


def test_stream_commits_the_same_tokens_in_bursts():
    drafter, weights, _ = CASES["draft"]
    tokens, lengths = pad(PROMPTS)
    settings = dict(key=jax.random.key(1), max_new_tokens=NUM, sampling=Sampling(temperature=1.0))
    params = {"target": PARAMS, "drafter": weights}
    whole = specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)
    pieces = list(specjax.stream(MODEL, drafter, params, tokens, lengths, rounds=2, **settings))
    assert np.asarray(pieces[0].lengths).tolist() == lengths.tolist()
    assert all((np.diff([p.lengths[i] for p in pieces]) >= 0).all() for i in range(8))
    assert (np.asarray(pieces[-1].tokens) == np.asarray(whole.tokens)).all()
    assert str(pieces[-1].stats) == str(whole.stats)


def test_decode_works_within_jit_scan_and_vmapless_calls():
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
    assert int(total) == 2 * 8 * NUM
    width = tokens.shape[1]
    for row, prompt in enumerate(PROMPTS):
        assert both[1][row, len(prompt) : len(prompt) + NUM].tolist() == plain_texts()[row]
    assert width + NUM == both.shape[2]


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


def test_a_second_call_traces_nothing_whatever_the_values():
    drafter, weights, _ = CASES["draft"]
    traces = []

    @dataclasses.dataclass(frozen=True)
    class Counting(type(MODEL)):
        def verify(self, *args, **kwargs):
            traces.append(1)
            return super().verify(*args, **kwargs)

    model = Counting(VOCAB)
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
        if seed == 0:
            first = len(traces)
    assert len(traces) == first > 0


# ----------------------------------------------------------------------------- trees


def test_logits_of_a_tree_are_those_of_each_path_read_in_sequence():
    topology = (-1, 0, 0, 1, 1, 2, 5, 3)
    prompt = [3, 1, 4, 1, 5]
    tokens = np.asarray([prompt], np.int32)
    nodes = np.asarray([[prompt[-1], 2, 7, 1, 8, 2, 8, 1]], np.int32)
    draft = Draft(start=jnp.asarray([4]), tokens=jnp.asarray(nodes), topology=topology)
    cache = rebuilt(PARAMS, jnp.asarray(tokens), jnp.asarray([4]))
    parent = jnp.asarray([topology], jnp.int32)
    dynamic = dataclasses.replace(draft, parent=parent, topology=None)
    for shape in (draft, dynamic):
        got = MODEL.verify(PARAMS, cache, shape).logits[0]
        for node in range(8):
            path = [node]
            while topology[path[0]] >= 0:
                path.insert(0, topology[path[0]])
            sequence = prompt[:-1] + nodes[0, path].tolist()
            expected = reference.logits(MODEL, PARAMS, jnp.asarray([sequence]))[0, -1]
            np.testing.assert_allclose(got[node], expected, atol=1e-5)


def test_a_tree_drafted_level_by_level_scores_as_in_one_pass():
    draft = Draft(
        start=jnp.asarray([4]),
        tokens=jnp.asarray([[5, 2, 7, 1, 8]]),
        topology=(-1, 0, 0, 1, 1),
    )
    cache = rebuilt(PARAMS, jnp.asarray([[3, 1, 4, 1, 5]]), jnp.asarray([4]))
    whole = MODEL.verify(PARAMS, cache, draft)
    first = dataclasses.replace(draft, tokens=draft.tokens[:, :3], topology=draft.topology[:3])
    level = MODEL.verify(PARAMS, cache, first)
    rest = MODEL.verify(PARAMS, cache, draft, since=3, entries=level.entries)
    np.testing.assert_allclose(rest.logits, whole.logits[:, 3:], atol=1e-6)
    np.testing.assert_allclose(rest.entries, whole.entries, atol=1e-6)


def test_static_and_dynamic_trees_have_the_same_depths_ancestors_and_paths():
    topology = (-1, 0, 0, 1, 1, 2, 5, 3)
    tokens = jnp.zeros((2, 8), jnp.int32)
    fixed = Draft(start=jnp.zeros(2, jnp.int32), tokens=tokens, topology=topology)
    free = dataclasses.replace(
        fixed, topology=None, parent=jnp.tile(jnp.asarray([topology], jnp.int32), (2, 1))
    )
    assert (trees.ancestors(fixed) == trees.ancestors(free)).all()
    assert (trees.depths(fixed) == trees.depths(free)).all()
    path, depth = trees.path_to(fixed, jnp.asarray([6, 7]))
    assert path[0, :4].tolist() == [0, 2, 5, 6] and path[1, :4].tolist() == [0, 1, 3, 7]
    assert depth.tolist() == [3, 3]
    wide, _ = trees.path_to(free, jnp.asarray([6, 7]))
    assert (wide[:, :4] == path).all()


def test_merge_joins_equal_prefixes_and_keeps_twins():
    context = specjax.Context(
        tokens=jnp.asarray([[9]]),
        length=jnp.asarray([1]),
        budget=jnp.asarray([5]),
        key=jax.random.split(jax.random.key(0), 1),
        sampling=Sampling().rows(1),
    )
    one = trees.chain_draft(context, jnp.asarray([[4, 5]]))
    two = trees.tree_draft(context, jnp.asarray([[4, 6, 7]]), (-1, 0, 1, 0))
    both = trees.merge_drafts(one, two)
    assert both.tokens.tolist() == [[9, 4, 5, 4, 6, 7]]
    # node 4 (token 6) hangs below the first 4; the second 4 stays, as a draw without children
    assert both.parent.tolist() == [[-1, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("topology", "words"),
    [((0, 0), "begin with the root"), ((-1, 0, 2), "node 2 has parent 2"), ((), "begin")],
)
def test_a_malformed_topology_is_refused(topology, words):
    with pytest.raises(ValueError, match=words):
        trees.check_parents(topology)


def test_passengers_are_scored_read_out_and_never_emitted():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Reader(TreeDrafter):
        def readout(self, draft, scores):
            return scores.logits[:, 2]

        def observe(self, params, target_params, state, segment):
            if segment.round is not None:
                seen.append(segment.round[2].shape)
            return state

    passenger = Reader(model=MODEL, topology=(-1, 0, 0), passengers=(2,))
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    out = specjax.decode(
        MODEL, passenger, params, tokens, lengths, key=jax.random.key(0), max_new_tokens=NUM
    )
    assert new_tokens(out, PROMPTS) == plain_texts()
    assert seen and seen[0] == (8, VOCAB)
    assert int(out.stats.drafted.max()) <= NUM  # one candidate a round, the passenger is none


@dataclasses.dataclass(frozen=True)
class Recorder(TreeDrafter):
    """Writes down every segment: the pairs (feature of a token, the token after it)."""

    features = (0,)

    def init(self, params, target_params, batch, capacity, inputs=None):
        zeros = jnp.zeros((batch, capacity), jnp.int32)
        return zeros, zeros, jnp.zeros((batch, capacity, PARAMS["embed"].shape[1])), zeros

    def draft_step(self, params, target_params, state, context):
        draft, _ = super().draft_step(
            params, target_params, jnp.zeros(context.length.shape, jnp.int32), context
        )
        return draft, state

    def observe(self, params, target_params, state, segment):
        tokens, after, features, times = state
        steps = jnp.arange(segment.tokens.shape[1])
        at = jnp.where(steps < segment.num[:, None], segment.start[:, None] + steps, 10**6)
        rows = jnp.arange(at.shape[0])[:, None]
        return (
            tokens.at[rows, at].set(segment.tokens, mode="drop"),
            after.at[rows, at].set(segment.next, mode="drop"),
            features.at[rows, at].set(segment.features, mode="drop"),
            times.at[rows, at].add(1, mode="drop"),
        )


def test_segments_bring_every_token_once_with_its_feature_and_the_token_after_it():
    drafter = Recorder(model=MODEL)
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    request, capacity = loop.prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, Sampling(), None, ()
    )
    state = start(MODEL, drafter, "auto", capacity, params, request)
    state = step(MODEL, drafter, "auto", NUM * 3, params, state)
    whole = Draft(
        start=jnp.zeros((8,), jnp.int32),
        tokens=state.tokens,
        topology=trees.chain_parents(capacity - 1),
    )
    truth = MODEL.verify(PARAMS, MODEL.init(PARAMS, 8, capacity), whole, features=(0,)).features
    fed, after, features, times = state.drafter_state
    for row, length in enumerate(np.asarray(state.length)):
        assert times[row, : length - 1].tolist() == [1] * (length - 1)
        assert not times[row, length - 1 :].any()
        assert (fed[row, : length - 1] == state.tokens[row, : length - 1]).all()
        assert (after[row, : length - 1] == state.tokens[row, 1:length]).all()
        np.testing.assert_allclose(features[row, : length - 1], truth[row, : length - 1], atol=1e-5)


# ----------------------------------------------------------------------------- n-grams


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


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(tokens=np.zeros((0, 3), np.int32), lengths=np.zeros(0, np.int32)), "batch is empty"),
        (dict(lengths=np.asarray([0])), "empty prompt"),
        (dict(lengths=np.asarray([4])), "4 tokens in a row of 3"),
        (dict(tokens=np.asarray([1, 2, 3])), "must be .batch, tokens."),
        (dict(tokens=np.asarray([[1.0, 2.0, 3.0]])), "token ids are integers"),
        (dict(tokens=np.asarray([[1, 2, VOCAB]])), "another tokenizer"),
        (dict(max_new_tokens=0), "at least 1"),
        (dict(max_new_tokens=-3), "at least 1"),
        (dict(capacity=2), "does not fit"),
        (dict(rule="nonsense"), "known: auto, approximate-lenience, .*, block, coupled, delta"),
        (dict(rule="greedy", sampling=Sampling(temperature=1.0)), "temperature above 0"),
        (dict(drafter=CASES["tree iid"][0], rule="block"), "judges chains"),
        (dict(sampling=Sampling(temperature=np.ones(3, np.float32))), "3 rows, the batch has 1"),
        (dict(sampling=Sampling(logit_bias=np.zeros(5))), "logit_bias has 5 entries"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_bad_requests_are_refused_before_anything_compiles(change, words):
    settings = dict(
        drafter=Plain(),
        tokens=np.asarray([[1, 2, 3]]),
        lengths=np.asarray([3]),
        max_new_tokens=4,
        key=jax.random.key(0),
    )
    settings.update(change)
    drafter, tokens, lengths = (settings.pop(name) for name in ("drafter", "tokens", "lengths"))
    if "sampling" not in settings and settings.get("rule") == "block":
        settings["sampling"] = Sampling(temperature=1.0)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    with pytest.raises(ValueError, match=words):
        specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(temperature=-1), "temperature=-1 is out of range"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=0), "top_p=0 is out of range"),
        (dict(top_p=1.5), "in .0, 1."),
        (dict(top_k=-1), "top_k"),
        (dict(min_p=2), "min_p"),
        (dict(repetition_penalty=0), "repetition_penalty"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**settings)
