"""Small caches: the names that ask for them, and what is refused before anything is compiled."""

import dataclasses

import pytest
from test_small_cache import CONFIG, SMALL, TARGET, TREE, drafter, params

import specjax
from specjax.drafters import SelfDraft
from specjax.drafters.eagle import Eagle, EagleConfig
from specjax.models import CausalLM, windowed
from specjax.models.sub_network import DecoderPart
from specjax.text.drafter_names import named, resolve_drafter


@pytest.fixture(scope="module")
def lm():
    return specjax.LM.of(TARGET, params()["target"])


def test_names_ask_for_a_small_cache_and_are_named_so(lm):
    small = windowed(lm, 16)
    assert small.target == windowed(TARGET, 16, 4) and small.params is lm.params
    assert small.name == "CausalLM:window=16,sinks=4" and small.fingerprint != lm.fingerprint
    drafter, weights = resolve_drafter(lm, small, 3)
    assert weights is lm.params and drafter.model.config.cache_window == 16
    own = named(lm, "self:window=16,sinks=2")
    assert own == SelfDraft(target=TARGET, num_draft=own.num_draft, window=16, sinks=2)
    assert own.words == "self:window=16,sinks=2" and isinstance(own.part, DecoderPart)
    assert not own.part.hands_over
    both = named(lm, "self:exit=1:window=16")
    assert (both.exit, both.window, both.sinks) == (1, 16, 4)
    assert named(lm, both.words) == both
    assert named(lm, "self:window=16:sinks=2") == own
    embedded = specjax.load("embedded")
    draft = named(embedded, "draft:window=64,sinks=1")
    assert draft.target.config.cache_window == 64 and draft.target.config.sinks == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft:window=wide", "whole number"),
        ("draft:window=9,sink=1", "did you mean 'sinks'"),
        ("draft:sinks=2", "write 'draft:window=512,sinks=2'"),
        ("draf:window=9", "did you mean 'draft'"),
        ("self:window=0", "whole number of tokens from 1"),
        ("self:window=509,sinks=3", "context of 'llama' is 512 tokens"),
        ("draft:window=9:sinks=1", "with commas; write 'draft:window=9,sinks=1'"),
        ("self:sinks=3", "write 'self:window=512,sinks=3'"),
        ("self:exit=1:sinks=3", "write 'self:window=512,sinks=3'"),
        ("ngram+eagle3:window=9", "no eagle3 heads"),
    ],
)
def test_names_that_ask_for_no_small_cache_are_refused(lm, name, words):
    with pytest.raises(ValueError, match=words):
        named(lm, name)


def test_caches_that_cannot_be_are_refused_before_anything_is_compiled():
    for name in ("draft", "self"):
        with pytest.raises(ValueError, match="window of 3 tokens is smaller than the draft"):
            drafter(name, 3)
        with pytest.raises(ValueError, match="has 5 nodes with its root; give window=5"):
            drafter(name, 4, topology=TREE)
        assert drafter(name, 4) and drafter(name, 5, topology=TREE)
    for window, sinks in ((512, 0), (508, 4), (10_000, 4)):
        with pytest.raises(ValueError, match="would hold all of it"):
            windowed(TARGET, window, sinks)
    assert windowed(TARGET, 507, 4)
    for window, sinks in ((0, 4), (-1, 4), (2.5, 4), (True, 4), (8, -1), (8, 1.5)):
        with pytest.raises(ValueError, match="whole number"):
            windowed(TARGET, window, sinks)
    with pytest.raises(ValueError, match="say how many"):
        windowed(TARGET, None)
    with pytest.raises(ValueError, match="sinks are seen beside a window"):
        dataclasses.replace(CONFIG, sinks=2)
    local = dataclasses.replace(CONFIG, window=6)
    with pytest.raises(ValueError, match="every layer of 'llama' has a window of its own, of 6"):
        windowed(CausalLM(local), 9)
    mixed = windowed(CausalLM(dataclasses.replace(local, local_layers=(True, False))), 9, 1).config
    assert [mixed.slots(i, 100) for i in (0, 1)] == [6, 10]
    with pytest.raises(ValueError, match="give window= too"):
        SelfDraft(target=TARGET, exit=1, sinks=2)
    with pytest.raises(ValueError, match="a layer of heads has no small cache"):
        Eagle(
            config=EagleConfig(layer=dataclasses.replace(SMALL.config, num_layers=1)), target=SMALL
        )
    with pytest.raises(ValueError, match="has a small cache itself"):
        SelfDraft(target=SMALL, window=8)
    with pytest.raises(TypeError, match="only decoder-only models"):
        windowed(Stranger(), 9)
    with pytest.raises(TypeError, match="only decoder-only models"):
        windowed(specjax.LM.of(Stranger(), None), 9)


class Stranger(specjax.Target):
    vocab_size = 3
    init = verify = commit = None
