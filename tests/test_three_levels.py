"""The target over its small cache between the target and a draft model: TriForce's three levels."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import test_top_chunks as top_chunks
from compiled import cache_copies, hlo
from drawn_rounds import assert_greedy_texts
from masked_decoder import from_scratch, masked
from test_small_cache import CONFIG, LAYERS, SINKS, TARGET, WINDOW, held_after, params

import specjax
from specjax.drafters import Cascade, DraftModel, NGram, SelfDraft
from specjax.models import windowed
from specjax.models.contrastive import Contrastive
from specjax.models.part_model import PartModel
from specjax.text import drafter_names

SMALL = windowed(TARGET, WINDOW, SINKS)


def three(outer=None):
    """The drafter, and all weights."""
    outer = top_chunks.drafter() if outer is None else outer
    drafter = Cascade(outer, DraftModel(2, model=SMALL))
    weights = {"outer": None, "inner": params()["drafter"]}
    return drafter, params() | {"drafter": weights}


@functools.cache
def rounds():
    return top_chunks.rounds_of(*three(), 8)


@pytest.mark.usefixtures("quick_compilation")
def test_in_every_round_the_stated_law_is_that_of_the_target_over_its_chosen_chunks():
    most, choices = top_chunks.furthest(found=[found for found, _ in rounds()])
    assert most < 2e-4 and choices > 12
    accepted = np.asarray([state.stats.accepted for _, state in rounds()])
    assert accepted.max() > 3 and (np.diff(accepted.sum(axis=1)) > 0).all()


@pytest.mark.usefixtures("quick_compilation")
def test_after_any_round_the_small_cache_of_the_innermost_model_is_that_of_a_fresh_pass():
    """Although it was ahead of the text, by what was then rejected."""
    drafter, weights = three()
    size = WINDOW + drafter.inner.model.config.spare
    ahead = 0
    for _, state in rounds():
        known = state.drafter_state.inner
        for row, filled in enumerate(known.filled):
            if not filled:
                continue
            text = state.tokens[row, : int(filled)]
            sees = masked(len(text), WINDOW, SINKS)
            _, entries = from_scratch(CONFIG, weights["drafter"]["inner"], text, sees)
            for slots, made in zip(known.cache, entries, strict=True):
                assert slots[0].shape[2] == SINKS + size
                for position in {*range(min(SINKS, filled)), *range(filled - WINDOW, filled)}:
                    if position >= 0:
                        slot = position
                        if position >= SINKS:
                            slot = SINKS + (position - SINKS) % size
                        for a, b in zip(slots, made, strict=True):
                            np.testing.assert_allclose(a[row, :, slot], b[position], atol=2e-4)
            ahead += int(state.stats.drafted[row] > state.stats.accepted[row])
    assert ahead > 4


def taken_back(spare):
    """What the window shows of a ring with spare slots, and what it should show, after five tokens
    were taken back and one other was committed."""
    slots, length = SINKS + WINDOW + spare, 14
    shown = held_after([(i, 1) for i in range(18)] + [(length - 1, 1)], slots, SINKS)
    held = np.asarray(specjax.kv_cache.held(slots, jnp.asarray([length]), SINKS))[0]
    near = (held > length - 1 - WINDOW) & (held < length)
    return shown[near], held[near]


def test_fault_a_ring_without_spare_slots_forgets_what_the_window_shows_again():
    for spare, kept in ((4, True), (3, False)):
        shown, wanted = taken_back(spare)
        assert len(wanted) == WINDOW and (shown == wanted).all() == kept


def test_levels_have_spare_slots_for_all_that_is_drafted_above_them():
    outer = SelfDraft(3, target=TARGET, window=WINDOW)
    small = DraftModel(2, model=SMALL)
    below = lambda drafter: drafter.model.config.spare  # noqa: E731
    assert below(small) == 0 and below(Cascade(outer, small).inner) == 5
    assert Cascade(outer, small).outer == outer
    two = Cascade(DraftModel(4, model=SMALL), small)
    assert below(two.outer) == below(two.inner) == 6
    deep = Cascade(DraftModel(3, model=TARGET), two)
    assert deep.outer == DraftModel(3, model=TARGET)  # a whole cache forgets nothing
    assert below(deep.inner.outer) == below(deep.inner.inner) == 11
    again = Cascade(deep.outer, deep.inner)
    assert again == deep and hash(again) == hash(deep)
    assert Cascade(outer, NGram(3)).outer.text_model == PartModel(
        windowed(TARGET, WINDOW, 4), (frozenset(),) * LAYERS
    )
    both = DraftModel(2, model=Contrastive(SMALL, TARGET)).rewindable(3).model
    assert both == Contrastive(SMALL.rewindable(3), TARGET)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("part", [{}, {"exit": 1}, {"skip": "attention.0,mlp.1"}], ids=str)
def test_greedy_texts_are_those_of_plain_decoding(part):
    outer = SelfDraft(3, target=TARGET, window=WINDOW, sinks=SINKS, **part)
    drafter, weights = three(None if not part else outer)
    assert_greedy_texts(TARGET, drafter, weights, 67)


def test_the_loop_copies_no_cache():
    text = hlo(TARGET, *three(), 3, 300, 1.0)
    assert not cache_copies(text, (3, 2, 300, 8))


def test_names_of_three_levels_say_which_settings_belong_to_which_level():
    lm = specjax.load("embedded")
    resolve = functools.partial(drafter_names.resolve_drafter, lm)
    drafter, weights = resolve("cascade:self:window=64,budget=32:draft:window=24,sinks=1")
    assert weights["outer"] is None and drafter.num_draft == 6
    assert (drafter.outer.window, drafter.outer.chunks.budget) == (64, 32)
    small = drafter.inner.model.config
    assert (small.cache_window, small.sinks, small.spare) == (24, 1, 8)
    drafter, _ = resolve("cascade:draft:window=24:cascade:draft:ngram:longest=9", 4)
    assert drafter.num_draft == 4 and drafter.inner.inner.longest == 9
    assert drafter.outer.model.config.cache_window == 24


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cascade:self:window=64", "write 'cascade:OUTER:INNER'"),
        ("cascade:self:ngram", "does not say which layers draft"),
        ("self:exit=1:exit=2", "'exit' is given twice"),
        ("cascade:self:exit=1:ngram", "reads the whole cache of its target.*window=512"),
        ("cascade:self:window=64:stop=0.5:ngram", "stop=CumulativeStop"),
        ("cascade:ngram:window=9:draft", "is no draft model"),
        ("cascade:draft:cascade:self:window=9:ngram", "layers of another model"),
        ("cascade:self:window=64:ngram:window=9", "no setting of 'ngram'"),
        ("cascade:draft:window=3:ngram", "window of 3 tokens is smaller than the draft"),
    ],
)
def test_names_that_are_no_levels_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        drafter_names.resolve_drafter(specjax.load("embedded"), name)
