"""Top chunks: drafts against a masked pass from scratch, what is read, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import starts
from compiled import cache_copies, hlo
from drawn_rounds import drawn_rounds
from masked_decoder import from_scratch, masked, softmax
from test_small_cache import CONFIG, LAYERS, TARGET, equations, params

import specjax
from specjax.drafters import Plain, SelfDraft
from specjax.models import CausalLM, TopChunks, windowed
from specjax.models.top_chunks import choose
from specjax.text.drafter_names import named

WINDOW, SINKS, DRAFTED, CHUNK, BUDGET, EVERY = 5, 2, 3, 3, 6, 2
HEADS, WHOLE = CONFIG.num_kv_heads, WINDOW + SINKS + BUDGET
CHUNKS = TopChunks(budget=BUDGET, chunk=CHUNK, every=EVERY)
LENGTHS = np.asarray([1, 9, 31, 47], np.int32)  # two are seen whole at first
PROMPTS = np.random.default_rng(0).integers(0, 67, (4, 47)).astype(np.int32)


def drafter(**settings):
    settings = dict(num_draft=DRAFTED) | settings
    return SelfDraft(target=TARGET, window=WINDOW, sinks=SINKS, chunks=CHUNKS, **settings)


# ------------------------------------------------------------------- the choice, written out


def chosen(text, fault=None):
    """For each layer and head the positions of the chunks that are chosen for a text."""
    asked, length = [], len(text)
    sees = masked(length, length, 0)
    _, entries = from_scratch(CONFIG, params()["target"], text, sees, asked)
    last = -2 if fault == "the token before the last asks" else -1
    first = 0 if fault == "chunks begin with the text" else SINKS
    found = []
    for query, (keys, _) in zip(asked, entries, strict=True):
        of_layer = []
        for head in range(HEADS):
            scores = {}
            for begin in range(first, length - WINDOW - CHUNK + 1, CHUNK):
                mean = keys[begin : begin + CHUNK, head].mean(axis=0)
                scores[begin] = float(query[last, head].sum(axis=0) @ mean)
            order = sorted(scores, key=lambda begin: scores[begin])
            order = order if fault == "the least are chosen" else order[::-1]
            best = order[: BUDGET // CHUNK]
            of_layer.append({begin + i for begin in best for i in range(CHUNK)})
        found.append(of_layer)
    if fault == "heads choose as the first":
        found = [[of_layer[0]] * HEADS for of_layer in found]
    return found


def laws(text, length, places):
    """The laws of a draft after ``length`` tokens of a text, which sees ``places``."""
    size, sees = len(text), []
    for of_layer in places or [[{*range(SINKS, SINKS + BUDGET)}] * HEADS] * LAYERS:
        mask = np.stack([masked(size, WINDOW, SINKS, length - 1)] * HEADS)
        for head, own in enumerate(of_layer):
            mask[head, length - 1 :, [j for j in own if j < size]] = True
        sees.append((mask & (np.arange(size) <= np.arange(size)[:, None]))[:, None])
    logits, _ = from_scratch(CONFIG, params()["target"], text, sees)
    return softmax(logits[length - 1 : length - 1 + DRAFTED])


@functools.cache
def rounds():
    """``(length, tokens, laws)`` of each row, round by round, at temperature 1."""
    return [found for found, _ in rounds_of(drafter(), params(), 8)]


def rounds_of(drafter, params, num):
    """What ``rounds`` returns of any drafter, and its state before each round."""
    found = []
    for state, draft in drawn_rounds(TARGET, drafter, params, PROMPTS, LENGTHS, num):
        texts = [
            [*tokens[:length], *own[1:]]
            for tokens, length, own in zip(state.tokens, state.length, draft.tokens, strict=True)
        ]
        found.append((list(zip(state.length.tolist(), texts, draft.laws, strict=True)), state))
    return found


def furthest(fault=None, every=EVERY, found=None):
    """The greatest difference of the laws of all rounds from the reference; and how many choices
    were made."""
    most, choices = 0.0, 0
    for row in zip(*(rounds() if found is None else found), strict=True):
        places, age = None, every
        for length, text, stated in row:
            if age >= every and length - 1 > WHOLE:
                places, age = chosen(text[: length - 1], fault), 0
                choices += 1
            age += 1
            most = max(most, np.abs(stated - laws(text, length, places)).max())
    return most, choices


@pytest.mark.usefixtures("quick_compilation")
def test_after_any_number_of_rounds_laws_are_those_of_a_masked_pass_over_the_chosen_chunks():
    most, choices = furthest()
    assert most < 2e-4 and choices > 12
    lengths = np.asarray([[length for length, *_ in found] for found in rounds()])
    assert (np.diff(lengths, axis=0) > 1).any() and lengths[-1].min() > 5
    assert (lengths[0] - 1 <= WHOLE).any() and (lengths[-1, lengths[0] - 1 <= WHOLE] > WHOLE).any()


FAULTS = (
    "the token before the last asks",
    "chunks begin with the text",
    "the least are chosen",
    "heads choose as the first",
)


@pytest.mark.usefixtures("quick_compilation")
def test_fault_another_choice_and_one_made_more_or_less_often_are_seen():
    for fault in FAULTS:  # in one test, so that one process compiles the rounds
        assert furthest(fault)[0] > 1e-2, fault
    for every in (1, 3):
        assert furthest(every=every)[0] > 1e-2, every


@pytest.mark.parametrize("length", [14, 25, 40])
def test_chunks_are_whole_between_sinks_and_window_and_chosen_by_each_head(length):
    """Without a loop: random keys, and queries of random states."""
    random = np.random.default_rng(length)
    shape = (1, HEADS, 41, CONFIG.head_dim)
    cache = [[jnp.asarray(random.normal(size=shape), jnp.float32)] * 2 for _ in range(LAYERS)]
    states = jnp.asarray(random.normal(size=(1, LAYERS * CONFIG.hidden_size)), jnp.float32)
    small = windowed(TARGET, WINDOW, SINKS + BUDGET).config
    given = states, jnp.asarray([length]), CHUNKS, tuple(range(LAYERS))
    places = np.asarray(choose(small, params()["target"], cache, *given))[0]
    assert places.shape == (LAYERS, HEADS, BUDGET)
    assert places.min() >= SINKS and places.max() < length - WINDOW
    for own in places.reshape(-1, BUDGET):
        starts = own[::CHUNK]
        assert len({*own.tolist()}) == BUDGET and ((starts - SINKS) % CHUNK == 0).all()
        assert (own.reshape(-1, CHUNK) == starts[:, None] + np.arange(CHUNK)).all()
    if length == 40:
        assert len({tuple(sorted(own)) for own in places.reshape(-1, BUDGET)}) > 1


# ------------------------------------------------------------------- what a round costs


def readers(capacity):
    """The operations of a draft step that read an array as long as the buffer, outside of the
    branch in which chunks are chosen, and the slots that each writes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())
    begin = dict(key=jax.random.key(0), max_new_tokens=9, capacity=capacity)

    def begun(params):
        return starts.begun(TARGET, drafter(), params, PROMPTS, LENGTHS, **begin)

    def draft(params, state):
        context = specjax.round_context(params, state)
        return specjax.draft_step(drafter(), params, state.drafter_state, context)[0]

    program = jax.make_jaxpr(draft)(shapes, jax.eval_shape(begun, shapes))
    found = set()

    def look(program):
        for equation in program.eqns:
            is_choice = equation.primitive.name == "cond" and any(
                x.aval.shape == (4, LAYERS, HEADS, BUDGET) for x in equation.outvars
            )
            if is_choice:
                continue
            inner = [x for x in jax.tree.leaves(equation.params) if hasattr(x, "jaxpr")]
            for one in inner:
                look(one.jaxpr)
            floats = [x.aval for x in equation.invars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
            if not inner and any(capacity in x.shape for x in floats):
                found.update((equation.primitive.name, x.aval.shape[2:3]) for x in equation.outvars)

    look(program.jaxpr)
    every = {equation.primitive.name for equation in equations(program.jaxpr)}
    return found, every


def test_between_two_choices_a_round_takes_what_it_sees_of_the_cache_and_reads_nothing_else():
    found, every = readers(199)
    assert found == {("gather", (WHOLE,))} and "top_k" in every


def test_the_loop_copies_no_cache():
    text = hlo(TARGET, drafter(), params(), 3, 300, 1.0)
    assert not cache_copies(text, (3, HEADS, 300, CONFIG.head_dim))


# ------------------------------------------------------------------- texts, names, refusals


@pytest.mark.usefixtures("quick_compilation")
def test_greedy_texts_are_those_of_plain_decoding():
    """One prompt is longer than a chunk of the prefill."""
    prompts = np.random.default_rng(1).integers(0, 67, (3, 300)).astype(np.int32)
    lengths = np.asarray([300, 1, 40], np.int32)
    run = functools.partial(
        specjax.decode,
        TARGET,
        params=params(),
        tokens=prompts,
        lengths=lengths,
        key=jax.random.key(0),
        max_new_tokens=30,
    )
    out, plain = run(drafter()), run(Plain())
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert not out.stats.approximate


def test_names_ask_for_chunks_and_are_named_so():
    lm = specjax.LM.of(TARGET, params()["target"])
    found = named(lm, "self:window=16,budget=32")
    assert found.chunks == TopChunks(budget=32) and found.sinks == 4
    words = "self:exit=1:window=16,sinks=2,budget=32,chunk=4,every=3"
    found = named(lm, words)
    assert found.words == words and found.features == (0,)
    assert found.chunks == TopChunks(budget=32, chunk=4, every=3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self:window=16,chunk=4", "write 'self:window=16,chunk=4,budget=512'"),
        ("self:budget=16", "write 'self:window=512,budget=16'"),
        ("self:window=16,budget=15", "give a budget that is a multiple of 8"),
        ("self:window=16,budget=0", "budget=0: it must be a whole number from 1"),
        ("self:window=16,budget=496", "budget=496: the context of the model is 512 tokens"),
        ("self:window=16,budget=16:stop=0.5", "without stop="),
    ],
)
def test_names_that_ask_for_no_chunks_are_refused(name, words):
    lm = specjax.LM.of(TARGET, params()["target"])
    with pytest.raises(ValueError, match=words):
        named(lm, name)


def test_chunks_that_cannot_be_are_refused():
    for settings in (dict(chunk=0), dict(every=0), dict(chunk=2.5), dict(chunk=True)):
        with pytest.raises(ValueError, match="whole number from 1"):
            TopChunks(**dict(budget=8) | settings)
    with pytest.raises(ValueError, match="beside a window"):
        SelfDraft(target=TARGET, exit=1, chunks=CHUNKS)
    local = dataclasses.replace(CONFIG, window=6, local_layers=(True, False))
    mixed = SelfDraft(target=CausalLM(local), window=9, chunks=CHUNKS)
    assert mixed.features == (1,)
