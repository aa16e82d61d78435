"""SnapKV: what is chosen of the prompt, against NumPy; drafts against a masked pass."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_top_chunks as top_chunks
from masked_decoder import from_scratch, masked, softmax
from test_small_cache import CONFIG, TARGET, params
from test_top_chunks import BUDGET, DRAFTED, HEADS, LENGTHS, SINKS, WHOLE, WINDOW

import specjax
from specjax.checkpoints.sub_network import load_layers, save_layers
from specjax.drafters import SelfDraft
from specjax.models import SnapKV, TopChunks, windowed
from specjax.models.chosen_entries import NEVER, queries
from specjax.text.drafter_names import named
from specjax.types import Segment

OBSERVE, POOL, LAST = 4, 3, 33
SNAP = SnapKV(budget=BUDGET, observe=OBSERVE, pool=POOL)


def drafter():
    return SelfDraft(DRAFTED, target=TARGET, window=WINDOW, sinks=SINKS, chunks=SNAP)


# ------------------------------------------------------------------- the choice, written out


def chosen(query, keys, last, length, fault=None, begin=0):
    """The tokens that a head chooses.

    ``query [O, G, E]`` of the tokens up to ``last``, of which those from ``begin`` on ask;
    ``keys [S, E]``, ``length`` of them in use.
    """
    score = np.zeros(length)
    for i, heads in enumerate(query):
        stands = last - len(query) + 1 + i
        if stands < (0 if fault == "an earlier prompt asks" else begin):
            continue
        if fault == "the last token alone asks" and stands < last:
            continue
        for q in heads:
            said = keys[: min(stands + 1, length)] @ q / math.sqrt(len(q))
            if fault == "products are summed":
                score[: len(said)] += said
            else:
                score[: len(said)] += softmax(said)
    score = score[: length - WINDOW]
    if fault != "sinks lift their neighbours":
        score[:SINKS] = 0
    pool = 1 if fault == "neighbours have no part" else POOL
    score = np.convolve(score, np.ones(pool), mode="same")
    best = SINKS + np.argsort(-score[SINKS:], kind="stable")[:BUDGET]
    if fault == "the least are chosen":
        best = SINKS + np.argsort(score[SINKS:], kind="stable")[:BUDGET]
    return {*best.tolist()}


FAULTS = (
    "the last token alone asks",
    "products are summed",
    "neighbours have no part",
    "the least are chosen",
)


@functools.cache
def made(begin=0, sunk=False):
    """What a layer chooses of random keys, and the queries ``[O, K, G, E]`` and the keys."""
    random, length = np.random.default_rng(0), 37
    keys = random.normal(size=(1, HEADS, 41, CONFIG.head_dim)).astype(np.float32)
    if sunk:  # all tokens look at the last sink
        keys[:, :, SINKS - 1] *= 8
    states = random.normal(size=(1, OBSERVE, CONFIG.hidden_size)).astype(np.float32)
    small = windowed(TARGET, WINDOW, SINKS + BUDGET).config

    @jax.jit
    def run(own, keys, states):
        last = jnp.asarray([LAST])
        given = [(keys, keys)], states, last, jnp.asarray([begin]), jnp.asarray([length]), (0,)
        where = last[:, None] + jnp.arange(1 - OBSERVE, 1)
        return SNAP.choose(small, own, *given)[0, 0], queries(small, own, states, where, (0,))[0][0]

    found, asked = map(np.asarray, run(params()["target"], keys, states))
    return found, asked.transpose(3, 0, 2, 1), keys[0], length


def agreeing(fault=None, begin=0, sunk=False):
    """In how many heads the choice is that of NumPy."""
    found, asked, keys, length = made(begin, sunk)
    pairs = [
        (found[head], chosen(asked[:, head], keys[head], LAST, length, fault, begin))
        for head in range(HEADS)
    ]
    return sum({*own.tolist()} == wanted for own, wanted in pairs)


@pytest.mark.usefixtures("quick_compilation")
def test_fault_the_choice_is_that_of_numpy_and_another_one_is_seen():
    assert agreeing() == HEADS
    for fault in FAULTS:
        assert agreeing(fault) < HEADS, fault
    for fault, given in (
        ("an earlier prompt asks", dict(begin=LAST - 1)),
        ("sinks lift their neighbours", dict(sunk=True)),
    ):
        assert agreeing(**given) == HEADS and agreeing(fault, **given) < HEADS, fault


def segment(start, num):
    features = jnp.full((1, num, len(drafter().features) * CONFIG.hidden_size), start + 1.0)
    tokens, where = jnp.zeros((1, num), jnp.int32), (jnp.asarray([start]), jnp.asarray([num]))
    return Segment(tokens=tokens, next=tokens, features=features, start=where[0], num=where[1])


def test_a_second_prompt_that_is_short_has_no_states_of_the_first():
    own = drafter()
    state = own.init(None, None, 1, 64)
    for start, num, begin in ((0, 3, 0), (3, 2, 0), (9, 2, 9), (11, 1, 9)):
        state = own.observe(None, None, state, segment(start, num))
        assert (state.begin, state.last) == (begin, start + num - 1)
    seen = np.arange(OBSERVE) > OBSERVE - 1 - (state.last - state.begin + 1)[0]
    assert ((np.asarray(state.states[0, :, 0]) >= 9) == seen).all() and not seen.all()


def test_a_round_that_wants_no_token_chooses_nothing():
    own, length = drafter(), WHOLE + 2
    cache = [[jnp.ones((1, HEADS, length, CONFIG.head_dim))] * 2] * len(own.features)
    state = own.observe(None, None, own.init(None, None, 1, length), segment(0, length - 1))
    shared = dict(cache=cache, length=jnp.asarray([length]), asked_rows=jnp.asarray([True]))
    for width, rounds in ((1, 1), (0, NEVER + 1)):
        context = SimpleNamespace(width=jnp.asarray(width), **shared)
        _, after = own.begin_text(None, params()["target"], state, context)
        assert after.age == rounds, width


# ------------------------------------------------------------------- rounds


def places(text, prompt, fault=None):
    """For each layer and head the tokens that are chosen of a text after a prompt."""
    asked, length = [], len(text)
    sees = masked(length, length, 0)
    _, entries = from_scratch(CONFIG, params()["target"], text, sees, asked)
    last = prompt - 2  # the prompt's last token is the first root, which no pass has read
    if fault == "the end of the text asks":
        last = length - 1
    first = max(last - OBSERVE + 1, 0)
    return [
        [
            chosen(query[first : last + 1, head], keys[:, head], last, length, fault)
            for head in range(HEADS)
        ]
        for query, (keys, _) in zip(asked, entries, strict=True)
    ]


@functools.cache
def rounds():
    return [found for found, _ in top_chunks.rounds_of(drafter(), params(), 8)]


def furthest(fault=None, every=1000):
    """The greatest difference of the laws of all rounds from those over the tokens that NumPy
    chooses; and how many choices were made."""
    most, choices = 0.0, 0
    for prompt, row in zip(LENGTHS, zip(*rounds(), strict=True), strict=True):
        kept, age = None, every
        for length, text, stated in row:
            if length - 1 > WHOLE and age >= every:
                kept, age, choices = places(text[: length - 1], prompt, fault), 0, choices + 1
            age += 1
            most = max(most, np.abs(stated - top_chunks.laws(text, length, kept)).max())
    return most, choices


@pytest.mark.usefixtures("quick_compilation")
def test_after_any_number_of_rounds_laws_are_those_of_a_masked_pass_over_the_chosen_tokens():
    most, choices = furthest()
    assert most < 2e-4 and choices == len(LENGTHS)
    lengths = np.asarray([[length for length, *_ in found] for found in rounds()])
    assert (lengths[0] - 1 <= WHOLE).any() and (lengths[-1, lengths[0] - 1 <= WHOLE] > WHOLE).any()
    for fault in (*FAULTS, "the end of the text asks"):
        assert furthest(fault)[0] > 1e-2, fault
    assert furthest(every=2)[0] > 1e-2


# ------------------------------------------------------------------- names, files, refusals


def test_names_ask_for_it_and_are_named_so(tmp_path):
    lm = specjax.LM.of(TARGET, params()["target"])
    found = named(lm, "self:window=16,budget=32,observe=8")
    assert found.chunks == SnapKV(budget=32, observe=8) and found.sinks == 4
    assert not found.reads_last and found.features == (0, 1)
    words = "self:exit=1:window=16,sinks=2,budget=32,observe=8,pool=7"
    found = named(lm, words)
    assert found.words == words
    path = save_layers(found, lm, tmp_path / "self.json")
    assert load_layers(path, lm) == found
    chunks = dataclasses.replace(found, chunks=TopChunks(budget=32))
    assert load_layers(save_layers(chunks, lm, path), lm) == chunks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self:window=16,observe=4", "write 'self:window=16,observe=4,budget=512'"),
        ("self:window=16,budget=32,observe=4,every=2", "observe choose tokens once.*every chunks"),
        ("self:window=16,budget=32,pool=4", "odd number such as 5"),
        ("self:window=16,budget=32,observe=0", "observe=0: it must be a whole number from 1"),
    ],
)
def test_names_that_ask_for_no_choice_are_refused(name, words):
    lm = specjax.LM.of(TARGET, params()["target"])
    with pytest.raises(ValueError, match=words):
        named(lm, name)
