"""Draft models whose tokens are not the target's: tables, caches, names, errors, planted faults."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from flax import nnx
from pairs import CONFIG
from registry import cases
from test_sampled import MODEL, PARAMS, ROWS, WARM, exact, lawful, sample
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from toys import bag, context
from two_vocabularies import named_as, tables, tokenizer

import specjax
from specjax import trees
from specjax.acceptance import walk
from specjax.analysis.plan.api import _named
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import SLEM, TLI
from specjax.drafters.strings import retokenize
from specjax.drafters.translation import drafted_by, vocabulary_tables
from specjax.models import Decoder, save_pretrained, vocabularies
from specjax.models.tokenizer import FileTokenizer
from specjax.models.vocabularies import Spelling, shared_tokens, spelled_by
from specjax.text import drafter_names
from specjax.types import Draft, Verdict

TARGET, DRAFT = ["a", "b", "c", "ab", "bca", "d", "cc"], ["b", "a", "bc", "d", "aa", "c"]
METHODS = ("tli", "slem")


def byte_level(*words):
    """A BPE over bytes, spelled as GPT-2's, with these words (of two known parts each)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {word: i for i, word in enumerate(alphabet)}
    merges = []
    for word in words:
        word = word.replace(" ", "Ġ")
        cut = next(i for i in range(len(word) - 1, 0, -1) if {word[:i], word[i:]} <= known.keys())
        merges.append((word[:cut], word[cut:]))
        known[word] = len(known)
    backend = Tokenizer(models.BPE(known, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return backend


def sentencepiece(*words):
    """A vocabulary spelled as SentencePiece's, with single bytes besides."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *fallback, *(word.replace(" ", "▁") for word in words)]
    scores = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


OURS = byte_level(
    "in", "re", "tu", " re", "tur", "turn", " return", "de", "def", "def ", "el", "se"
)
THEIRS = sentencepiece(
    " re", " return", "def", " def", "e", "n", "r", "t", "u", "d", "f", "tu", "n("
)


def test_tokens_are_shared_by_the_bytes_they_stand_for_and_special_ones_by_what_they_are_for():
    ours = FileTokenizer(OURS, eos_ids=[OURS.token_to_id("<|end|>")])
    theirs = FileTokenizer(THEIRS, eos_ids=[2], roles={"bos_token": 1})
    both = shared_tokens(ours, theirs)
    partner = dict(zip(both.target.tolist(), both.draft.tolist(), strict=True))
    assert partner[OURS.token_to_id("Ġreturn")] == THEIRS.token_to_id("▁return")
    assert partner[OURS.token_to_id("Ċ")] == THEIRS.token_to_id("<0x0A>")
    assert partner[OURS.token_to_id("e")] == THEIRS.token_to_id("e")  # not <0x65>
    assert partner[ours.eos_ids[0]] == 2 and both.words == len(partner) - 1
    assert len({*partner.values()}) == len(partner)
    ours_spell, theirs_spell = Spelling(ours).bytes_of, Spelling(theirs).bytes_of
    for token, pieces in spelled_by(ours, theirs).items():
        if token in ours_spell:
            assert b"".join(theirs_spell[i] for i in pieces) == ours_spell[token]


def test_the_token_that_begins_a_text_is_not_drafted_where_it_is_spelled_by_nothing():
    both = []
    for words in (("re", "tu"), ("tu", "re", "n(")):
        backend = sentencepiece(*words)
        first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        backend.post_processor = first
        both.append(FileTokenizer(backend, eos_ids=[2], roles={"bos_token": 1}))
    found = vocabulary_tables(*both, 261, 262)
    assert 1 not in found.shared and 2 in found.shared and 259 in found.shared
    counts = np.sum(np.asarray(found.pieces)[np.asarray(found.shared)] >= 0, axis=1)
    assert set(counts.tolist()) == {1} and not np.any(found.pieces[1] >= 0)


def test_rows_without_room_take_nothing_through_the_pass():
    draft = trees.chain_draft(context(2), jnp.ones((2, 3), jnp.int32))
    draft = drafted_by(draft, jnp.asarray([True, False]))
    assert draft.scored.tolist() == [[True] * 4, [True, False, False, False]]
    assert not walk.passengers(draft).any()


cut_in_the_loop = jax.jit(retokenize, static_argnums=2)


def test_a_string_is_cut_in_the_loop_as_it_is_on_the_host():
    both, spelling = tables(TARGET, DRAFT), Spelling(tokenizer(TARGET))
    drafted = np.random.default_rng(0).integers(0, len(DRAFT), (200, 5))
    tokens, count = cut_in_the_loop(both.strings, jnp.asarray(drafted), 3)
    for row, draft in enumerate(drafted):
        wanted = spelling.match("".join(DRAFT[i] for i in draft).encode())[:3]
        assert tokens[row, : count[row]].tolist() == wanted


def test_a_longer_string_may_be_cut_otherwise_on_the_host_so_no_round_is_predicted_from_it():
    drafted = np.full((200, 5), -1)
    drafted[1, :1], drafted[2, :2], drafted[3, :3] = [1], [1, 0], [1, 0, 5]  # a, b, c
    tokens, count = cut_in_the_loop(tables(TARGET, DRAFT).strings, jnp.asarray(drafted), 3)
    cut = [[TARGET[i] for i in tokens[row, : count[row]]] for row in (1, 2, 3)]
    assert cut == [["a"], ["ab"], ["ab", "c"]]
    assert not SLEM.can_rewind and TLI.can_rewind


def test_a_word_takes_the_last_of_several_spaces_where_the_target_cuts_so():
    words, own = ["  ", "    ", " ", "x", " x", "\n"], ["    ", "  ", "x", "\n"]
    cut = []
    for lends in (True, False):
        strings = dataclasses.replace(tables(words, own).strings, lends=jnp.asarray(lends))
        drafted = jnp.asarray([[0, 2, -1], [1, 3, 2], [0, 1, -1]])
        tokens, count = retokenize(strings, drafted, 4)
        cut.append(
            [["".join(words[t]) for t in row[:n]] for row, n in zip(tokens, count, strict=True)]
        )
    assert cut[0] == [["  ", " ", " x"], ["  ", "\n", "x"], ["    ", "  "]]
    assert cut[1] == [["    ", "x"], ["  ", "\n", "x"], ["    ", "  "]]


def decoding(drafter, weights, temperature=0.0, new=12):
    """What decodes four prompts of the toy target: a function of its key."""
    model, params = bag(len(TARGET), 3)
    prompts = [
        np.random.default_rng(i).integers(0, len(TARGET), n) for i, n in enumerate((1, 2, 9, 4))
    ]
    tokens = np.zeros((4, 9), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    both = {"target": params, "drafter": weights}
    sampling = specjax.Sampling(temperature=temperature)
    given = dict(max_new_tokens=new, sampling=sampling)
    return lambda key: specjax.decode(model, drafter, both, tokens, lengths, key=key, **given)


@pytest.mark.parametrize(("kind", "temperature"), [(TLI, 0.0), (SLEM, 0.0), (TLI, 1.0)])
def test_all_is_accepted_of_the_target_itself_by_other_names_and_nothing_compiles_twice(
    kind, temperature
):
    names = [TARGET[i] for i in np.random.default_rng(1).permutation(len(TARGET))]
    model, params = bag(len(TARGET), 3)
    weights = {"model": named_as(names, TARGET, params), "tables": tables(TARGET, names)}
    run = decoding(kind(num_draft=3, model=model, ratio=1.0), weights, temperature)
    out = run(jax.random.key(0))
    assert out.stats.accepted.tolist() == out.stats.drafted.tolist() == [9, 9, 9, 9]
    assert compilations(lambda: run(jax.random.key(1))) == 0


@pytest.mark.parametrize("name", ["tli", "tli tree", "slem", "hybrid tli", "adaptive slem"])
def test_the_models_own_text_and_cache_are_those_of_a_fresh_pass_after_any_number_of_rounds(name):
    target, params = bag(13, 3, features=8)
    drafter, weights, _ = cases(target, params)[name]
    inner = getattr(drafter, "inner", drafter)
    own = weights["inner"] if name.startswith("adaptive") else weights
    tokens = np.random.default_rng(0).integers(0, 13, (3, 7)).astype(np.int32)
    lengths = np.asarray([7, 4, 1], np.int32)
    both, sampling = {"target": params, "drafter": weights}, specjax.Sampling(temperature=1.0)
    request, size = prepare_inputs(
        target, drafter, tokens, lengths, jax.random.key(0), 12, sampling, None, ()
    )
    state = loop.jit_start(target, drafter, "auto", size, both, request)
    for _ in range(4):
        state = loop.jit_burst(target, drafter, "auto", 1, both, state)
        found = getattr(state.drafter_state, "inner", state.drafter_state)
        pieces = np.asarray(own["tables"].pieces)
        for row, length in enumerate(state.length.tolist()):
            wanted = pieces[np.asarray(state.tokens)[row, :length]]
            wanted = wanted[wanted >= 0].tolist()
            assert found.ends[row, length] == len(wanted)
            assert found.tokens[row, : len(wanted)].tolist() == wanted
        filled = found.model.filled
        fresh = read(inner.model, own["model"], found.tokens, filled)
        kept = (jnp.arange(fresh.shape[2]) < filled[:, None])[:, None, :, None]
        cache = jnp.where(kept, found.model.cache[:, :, : fresh.shape[2]], 0)
        np.testing.assert_allclose(cache, jnp.where(kept, fresh, 0), atol=1e-5)
    assert filled.max() > 4


def read(model, params, tokens, filled):
    """The cache of ``tokens[:filled]``, built from scratch."""
    rows, size = tokens.shape
    prompt = Draft(
        start=jnp.zeros((rows,), jnp.int32), tokens=tokens, topology=trees.chain_parents(size - 1)
    )
    cache = model.init(params, rows, size)
    entries = model.verify(params, cache, prompt).entries
    path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (rows, size))
    verdict = Verdict(path=path, count=filled - 1, token=filled)
    return model.commit(cache, entries, prompt.start, verdict)


@dataclasses.dataclass(frozen=True)
class NotRenormalized(TLI):
    """States the law of the draft model at the shared tokens, as it was before they were cut out:
    it sums to less than one."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        return dataclasses.replace(draft, laws=0.7 * draft.laws), state


def test_fault_a_law_that_was_not_renormalized_over_the_shared_tokens():
    drafter, weights, _ = cases(MODEL, PARAMS)["tli"]
    drafter = NotRenormalized(num_draft=3, model=drafter.model, ratio=drafter.ratio)
    counts, _ = sample(drafter, weights, "rejection", WARM, rows=ROWS // 4)
    assert not lawful(counts, exact("warm"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a target and of a draft model, each with its own of the two tokenizers."""
    root = tmp_path_factory.mktemp("vocabularies")
    for seed, (name, backend, end) in enumerate((("target", OURS, 268), ("draft", THEIRS, 2))):
        size = backend.get_vocab_size()
        shape = dataclasses.replace(CONFIG, vocab_size=size, eos_ids=(end,))
        save_pretrained(Decoder(shape, rngs=nnx.Rngs(seed)), root / name, tokenizer=backend)
    return {name: str(root / name) for name in ("target", "draft")}


@pytest.mark.parametrize("before", ["", "ngram+", "cascade:self:window=9:"])
@pytest.mark.parametrize("method", METHODS)
def test_an_outer_level_with_other_tokens_is_refused_before_anything_is_loaded(method, before):
    lm = specjax.LM.of(MODEL, PARAMS)
    for settings in ("", ":window=8"):
        name = f"{before}cascade:{method}:owner/name{settings}:ngram"
        with pytest.raises(ValueError, match=f"{method}:owner/name.*must share one vocabulary; gi"):
            drafter_names.named(lm, name)
    with pytest.raises(ValueError, match="write 'cascade:OUTER:INNER'"):
        drafter_names.named(lm, f"{before}cascade:{method}:owner/name")


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_is_named_after_the_method_and_drafts_losslessly(method, folders):
    lm, name = specjax.load(folders["target"]), f"{method}:{folders['draft']}"
    given = dict(max_new_tokens=16, stop=())
    plain = specjax.generate(lm, ["def turn(", "re"], drafter="none", **given)
    for drafter in (name, f"ngram+{name}"):
        out = specjax.generate(lm, ["def turn(", "re"], drafter=drafter, **given)
        assert [row.tolist() for row in out.tokens] == [row.tolist() for row in plain.tokens]
        assert out.stats.drafted.sum() > 0


def test_another_tokenizer_is_refused_with_the_ways_across_and_what_the_two_share(folders):
    lm = specjax.load(folders["target"])
    wanted = r"give drafter='tli:.*draft' or 'slem:.*draft'.*share 261 tokens, 97% of the target's"
    with pytest.raises(ValueError, match=wanted):
        specjax.generate(lm, "def", drafter=folders["draft"])
    alone = "by token id: take a drafter of the target's own family"
    for levels in ("{draft}:ngram", "{draft}:window=8,budget=8:ngram", "{target}:ngram+{draft}"):
        with pytest.raises(ValueError, match=alone) as refused:  # and tli cannot be a level
            specjax.generate(lm, "def", drafter="cascade:" + levels.format(**folders))
        assert "tli" not in str(refused.value)


def test_a_plan_finds_out_by_which_method_a_model_with_another_tokenizer_drafts(folders):
    lm, path = specjax.load(folders["target"]), folders["draft"]
    both = [f"{method}:{path}" for method in METHODS]
    assert [*_named(lm, [path])] == both and [*_named(lm, [both[1]])] == both[1:]
    copied = _named(lm, [f"ngram+{path}", "ngram"])
    assert [*copied] == [*(f"ngram+{name}" for name in both), "ngram"]
    assert isinstance(copied[f"ngram+{both[0]}"].inner.drafter, TLI)
    assert [*_named(lm, folders["target"])] == [folders["target"]]
    with pytest.raises(ValueError, match="each once"):
        _named(lm, [both[0], path])


def test_a_folder_with_another_tokenizer_is_planned_by_both_methods(folders):
    lm, path = specjax.load(folders["target"]), folders["draft"]
    found = specjax.plan(lm, ["def"], drafters=[path], num_drafts=[1], max_new_tokens=2, turns=1)
    assert {candidate.drafter for candidate in found.candidates} == {
        "plain",
        *(f"{method}:{path}" for method in METHODS),
    }


def test_a_folder_is_loaded_and_tabled_once_until_it_changes(folders, monkeypatch):
    made = []

    class Counted(Spelling):
        def __init__(self, tokenizer):
            made.append(tokenizer)
            super().__init__(tokenizer)

    monkeypatch.setattr(vocabularies, "Spelling", Counted)
    lm, name = specjax.load(folders["target"]), f"slem:{folders['draft']}"
    first = drafter_names.named(lm, name)
    assert len(made) == 2 and drafter_names.named(lm, name) is first
    assert drafter_names.named(lm, f"ngram+{name}").inner is first
    os.utime(f"{folders['draft']}/config.json")
    assert drafter_names.named(lm, name) is not first and len(made) == 4
    plain = drafter_names.named(lm, folders["target"])
    assert drafter_names.named(lm, folders["target"]) is plain


@pytest.mark.parametrize(("method", "widths"), [("tli", (0, 1, 3, 7)), ("slem", (0, 1, 3, 7))])
def test_as_many_tokens_as_pay_are_up_to_seven_as_of_any_draft_model(method, widths):
    lm = toy(TARGET, 3)
    drafter = specjax.text.translated(lm, toy(DRAFT, 4), method)
    assert drafter_names.resolve_drafter(lm, drafter, "auto")[0].widths == widths


def toy(words, seed, **settings):
    model, params = bag(len(words), seed)
    tokens = None if settings.pop("mute", False) else tokenizer(words)
    return specjax.LM.of(model, params, tokens, name="".join(words[:2]), **settings)


REFUSED = {
    "no common token": (dict(), "xy", "tli", "ab .7 tokens. and xy .2. share no token of text"),
    "no common string": (dict(), "xy", "slem", "have no string in common"),
    "no tokenizer": (dict(mute=True), "ab", "tli", "was loaded without a tokenizer"),
    "no such method": (dict(), "ab", "sleme", "method='sleme' is unknown; accepted: tli, slem"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_draft_is_refused_before_anything_compiles(what):
    settings, words, method, message = REFUSED[what]
    lm, small = toy(TARGET, 3), toy(list(words), 4, **settings)

    def call():
        with pytest.raises(ValueError, match=message):
            specjax.text.translated(lm, small, method)

    assert compilations(call) == 0


class Bytes:
    """A tokenizer of one's own, whose end of a text decodes to nothing."""

    eos_ids = (256,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class Mirrored(Bytes):
    def encode(self, text):
        return [255 - byte for byte in text.encode()]

    def decode(self, ids):
        return bytes(255 - i for i in ids).decode(errors="replace")


def test_an_end_that_decodes_to_nothing_is_shared_by_what_it_does_not_stand_for():
    models = [bag(257, seed) for seed in (3, 4)]
    lm, small = (
        specjax.LM.of(*model, kind(), name=kind.__name__)
        for model, kind in zip(models, (Bytes, Mirrored), strict=True)
    )
    both = shared_tokens(lm.tokenizer, small.tokenizer)
    assert dict(zip(both.target.tolist(), both.draft.tolist(), strict=True))[256] == 256
    with pytest.raises(ValueError, match="give drafter='tli:Mirrored' or 'slem:Mirrored'"):
        specjax.generate(lm, "ab", drafter=small, max_new_tokens=2)


@pytest.mark.parametrize(
    ("method", "drafting", "message"),
    [
        ("slem", dict(tree="2x2"), "a string is a chain of tokens"),
        ("slem", dict(sibling_sampling="distinct"), "has no choice of how siblings are drawn"),
    ],
)
def test_drafting_that_a_method_does_not_know_is_refused(method, drafting, message):
    lm = toy(TARGET, 3)
    drafter = specjax.text.translated(lm, toy(DRAFT, 4), method)
    drafting = specjax.Drafting(**drafting)
    with pytest.raises(ValueError, match=message):
        specjax.generate(lm, [1, 2], drafter=drafter, drafting=drafting, max_new_tokens=2)
