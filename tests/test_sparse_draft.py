"""A draft model over chosen entries of its cache: laws against masked passes in NumPy, what a round
reads, texts, names and refusals."""

import dataclasses
import functools

import numpy as np
import pytest
import test_snap_kv as snap_kv
import test_top_chunks as top_chunks
from compiled import cache_copies, hlo
from drawn_rounds import assert_greedy_texts
from masked_decoder import from_scratch, masked, softmax
from test_small_cache import CONFIG, LAYERS, SMALL, TARGET, params
from test_top_chunks import BUDGET, CHUNK, DRAFTED, EVERY, HEADS, LENGTHS, SINKS, WHOLE, WINDOW

import specjax
from specjax.checkpoints import HeadLM
from specjax.drafters import Cascade, NGram, SparseDraftModel
from specjax.models import CausalLM, SnapKV, TopChunks
from specjax.text.drafter_names import named, resolve_drafter

KINDS = {"chunks": top_chunks.CHUNKS, "snapkv": snap_kv.SNAP}


def drafter(kind="chunks", **settings):
    settings = dict(num_draft=DRAFTED, model=TARGET, window=WINDOW, sinks=SINKS) | settings
    return SparseDraftModel(**{"chunks": KINDS[kind]} | settings)


def cascade(kind="chunks"):
    weights = {"outer": params()["drafter"], "inner": None}
    return Cascade(drafter(kind), NGram(3)), params() | {"drafter": weights}


# ------------------------------------------------------------------- the laws, written out


def chunks_of(query, keys, length, fault):
    """The tokens of the chunks that a head chooses: ``query [E]``, ``keys [S, E]``."""
    begins = range(SINKS, length - WINDOW - CHUNK + 1, CHUNK)
    order = sorted(begins, key=lambda begin: -float(query @ keys[begin : begin + CHUNK].mean(0)))
    order = order[::-1] if fault == "the least are chosen" else order
    return {begin + i for begin in order[: BUDGET // CHUNK] for i in range(CHUNK)}


class Row:
    """A row's reference, which keeps for each token that was read which tokens it saw."""

    def __init__(self, prompt, kind, writes_apart, fault):
        self.kind, self.apart, self.fault = kind, writes_apart, fault
        self.sees = [np.zeros((HEADS, 0, 0), bool)] * LAYERS
        self.places, self.age, self.last = None, EVERY, prompt - 2
        self.asked = None  # the queries of the prompt, once it was read

    def read(self, until, text, rows=None):
        """Lets the tokens that are new see every earlier one, or ``rows [i, j]`` of each layer."""
        self.text = text[:until]
        i, j = np.arange(until)[:, None], np.arange(until)
        for layer, old in enumerate(self.sees):
            new = np.broadcast_to(j <= i, (HEADS, until, until)).copy()
            known = min(old.shape[1], until)
            new[:, :known, :known] = old[:, :known, :known]
            if rows is not None:
                new[:, rows[0] :] = rows[1][layer][:, rows[0] :] & (j <= i)[rows[0] :]
            self.sees[layer] = new

    def passed(self):
        asked = []
        sees = [of[:, None] for of in self.sees]
        return *from_scratch(CONFIG, params()["drafter"], self.text, sees, asked), asked

    def choose(self, length):
        """The choice over a cache of ``length`` entries, by the queries that are due."""
        _, entries, asked = self.passed()
        found = []
        for layer in range(LAYERS):
            keys, own = entries[layer][0], []
            for head in range(HEADS):
                if self.kind == "chunks":
                    last = self.last - (self.fault == "the token before the last asks")
                    query = asked[layer][last, head].sum(axis=0)
                    own.append(chunks_of(query, keys[:, head], length, self.fault))
                else:
                    last = len(self.asked[layer]) - 1
                    query = self.asked[layer][max(last - snap_kv.OBSERVE + 1, 0) :, head]
                    given = query, keys[:, head], last, length, self.fault
                    own.append(snap_kv.chosen(*given))
            found.append(own)
        self.places, self.age = found, 0

    def laws(self, length, text, prompt):
        """The laws of a round, which begins with ``length`` committed tokens."""
        start = length - 1 if self.apart else max(length - 2, 0)
        if self.asked is None:
            self.read(prompt - 1, text)
            nothing = [np.zeros((0, HEADS, 1, CONFIG.head_dim))] * LAYERS
            self.asked = self.passed()[2] if prompt > 1 else nothing
        if self.apart:
            self.read(length - 1, text)
            self.last = length - 2
        every = EVERY if self.kind == "chunks" else 10**6
        due = self.age >= every or self.places is None
        if due and start > WHOLE:
            self.choose(start)
        self.age += 1
        size, rows = len(text), []
        for layer in range(LAYERS):
            if self.places is None or start <= WHOLE:
                rows.append(np.stack([masked(size, WINDOW, SINKS + BUDGET)] * HEADS))
                continue
            mask = np.stack([masked(size, WINDOW, SINKS)] * HEADS)
            for head, own in enumerate(self.places[layer]):
                mask[head][:, sorted(own)] = True
            rows.append(mask)
        before = [of.copy() for of in self.sees]
        self.read(size, text, (start, rows))
        logits = self.passed()[0]
        if self.apart or self.fault == "accepted tokens are read anew":
            self.sees = before
        return softmax(logits[length - 1 : length - 1 + DRAFTED])


def furthest(kind, rounds, fault=None, apart=False):
    """The greatest difference of the laws of all rounds from the reference; and of how many of
    them the text did not fit into sinks, budget and window."""
    most, beyond = 0.0, 0
    for prompt, row in zip(LENGTHS, zip(*rounds, strict=True), strict=True):
        own = Row(int(prompt), kind, apart, fault)
        for (length, text, stated), (after, *_) in zip(row, [*row[1:], (None,)], strict=True):
            most = max(most, np.abs(stated - own.laws(length, text, int(prompt))).max())
            beyond += own.places is not None
            if after is not None and after > length and not apart:
                own.read(after - 2, text[: after - 2])
                own.last = after - 3
    return most, beyond


@functools.cache
def rounds(kind, levels=1):
    made = (drafter(kind), params()) if levels == 1 else cascade(kind)
    return [found for found, _ in top_chunks.rounds_of(*made, 8)]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_number_of_rounds_laws_are_those_of_passes_over_the_chosen_entries(kind):
    most, beyond = furthest(kind, rounds(kind))
    assert most < 2e-4 and beyond > 14
    lengths = np.asarray([[length for length, *_ in found] for found in rounds(kind)])
    assert (np.diff(lengths, axis=0) > 1).any() and (np.diff(lengths, axis=0) == 1).any()
    faults = ["the least are chosen", "accepted tokens are read anew"]
    faults += ["the token before the last asks"] * (kind == "chunks")
    for fault in faults:
        assert furthest(kind, rounds(kind), fault)[0] > 1e-2, fault


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_drafts_for_it_in_a_cascade_whose_law_is_that_of_the_draft_model(kind):
    most, beyond = furthest(kind, rounds(kind, 2), apart=True)
    assert most < 2e-4 and beyond > 14


# ------------------------------------------------------------------- what a round costs, and texts


def test_the_loop_copies_no_cache():
    text = hlo(TARGET, drafter(), params(), 3, 300, 1.0)
    assert not cache_copies(text, (3, HEADS, 300, CONFIG.head_dim))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [1, 2])
def test_greedy_texts_are_those_of_plain_decoding(kind, levels):
    own, weights = (drafter(kind), params()) if levels == 1 else cascade(kind)
    assert_greedy_texts(TARGET, own, weights, 67)


# ------------------------------------------------------------------- names, refusals


@functools.cache
def pair():
    """A target whose folder has no draft model, and an ``LM`` that drafts for it."""
    lm = specjax.LM.of(TARGET, params()["target"])
    return lm, specjax.load("embedded")


def test_the_words_of_a_choice_are_those_of_self():
    lm = pair()[1]
    for words, chunks in (
        ("window=64,budget=128", TopChunks(budget=128)),
        ("window=64,budget=96,chunk=4,every=3", TopChunks(budget=96, chunk=4, every=3)),
        ("window=64,sinks=2,budget=128,observe=16,pool=7", SnapKV(budget=128, observe=16, pool=7)),
    ):
        found, own = named(lm, f"draft:{words}"), named(lm, f"self:{words}")
        assert isinstance(found, HeadLM) and found.drafter.chunks == own.chunks == chunks
        assert (found.drafter.window, found.drafter.sinks) == (own.window, own.sinks)
    first, weights = resolve_drafter(lm, f"draft:{words}", 3)
    assert first.num_draft == 3 and weights is found.params
    small = named(lm, "draft:window=64,budget=128,cache=int8").drafter.model
    assert small.config.cache_bits == "int8" and small.cache_window is None
    outer = resolve_drafter(lm, "cascade:draft:window=64,budget=128:ngram")[0].outer
    assert isinstance(outer, SparseDraftModel) and outer.chunks == TopChunks(budget=128)
    assert resolve_drafter(lm, "ngram+draft:window=64,budget=128")[0].inner.window == 64


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft:budget=16", "write 'draft:window=512,budget=16'"),
        ("draft:window=16,chunk=4", "write 'draft:window=16,chunk=4,budget=512'"),
        ("draft:window=16,budget=32,observe=4,every=2", "observe choose tokens once"),
        (
            "draft:window=16,budget=100000",
            "budget=100000: the context .* is 1024 .*at most 1000, a multiple of chunk=8",
        ),
        ("draft:window=16,budget=1004,observe=8", "budget=1004: .* budget of at most 1003$"),
        ("self:window=16,budget=100000", "budget=100000: .* budget of at most 1000, a multiple"),
        ("cascade:self:window=16,budget=1004,pool=5:ngram", "budget=1004: .*at most 1003$"),
        ("draft:window=1020,budget=8", "no room for one: give a smaller window"),
        ("draft:window=3,budget=16", "window of 3 tokens is smaller than the draft"),
        ("draft:window=16,bugdet=16", "did you mean 'budget'"),
        ("ngram:window=16,budget=16", "no setting of 'ngram'"),
        (
            "cascade:draft:cascade:draft:window=16,budget=16:ngram",
            "cannot be taken back|taken back",
        ),
    ],
)
def test_names_that_ask_for_no_choice_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        resolve_drafter(pair()[1], name)


def test_choices_that_cannot_be_are_refused_before_anything_is_compiled():
    with pytest.raises(TypeError, match="decoder-only models of specjax.load"):
        drafter(model=Stranger())
    with pytest.raises(ValueError, match="give window= and"):
        drafter(chunks=None)
    with pytest.raises(ValueError, match="give window= and"):
        drafter(window=None)
    with pytest.raises(ValueError, match="holds every token"):
        drafter(model=SMALL)
    with pytest.raises(ValueError, match="budget=512: the context of the model is 512"):
        drafter(chunks=SnapKV(budget=512))
    local = CausalLM(dataclasses.replace(CONFIG, window=6, local_layers=(True, False)))
    assert drafter(model=local).part.choosing_layers == (1,)
    with pytest.raises(ValueError, match="taken back"):
        Cascade(drafter(), drafter(num_draft=2))


class Stranger(specjax.Target):
    vocab_size = 67
    init = verify = commit = None
