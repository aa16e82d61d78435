"""Text in, text out: the same words with every drafter, few programs, one clear error."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat, prepared
from compiled import compilations
from interruptions import interrupting
from test_text_refusals import Weighted
from tokenizers import Tokenizer, models

import specjax
from specjax import kernels
from specjax.analysis import comparison
from specjax.decoding import loop, prefill, reference
from specjax.kernels import xla_cpu
from specjax.kernels.cpu import library
from specjax.kernels.cpu.backend import CpuBackend
from specjax.models.stream_decoder import StreamDecoder
from specjax.models.tokenizer import load_tokenizer, wrap_tokenizer
from specjax.text import prepare, task
from specjax.text.drafter_names import resolve_drafter
from specjax.text.options import Options

pytest_plugins = ["pairs"]
PROMPTS = ["def f(x):", "import os\n\n\nclass A:\n    def"]


def test_heads_draw_their_tokens_above_temperature_zero_unless_a_rule_wants_others():
    lm = specjax.load("embedded")

    def how(drafter="eagle3", **options):
        return prepared(lm, PROMPTS, drafter=drafter, **options).drafter

    for temperature, wanted in ((0.0, "top"), (0.3, "iid"), (np.float32([0, 1]), "iid")):
        assert how(temperature=temperature).sibling_sampling == wanted
    assert how(temperature=1.0, tree="2x2").sibling_sampling == "distinct"
    mixed = np.float32([0, 1])  # a greedy row would have a chain in place of the tree
    assert how(temperature=mixed, tree="2x2").sibling_sampling == "top"
    heads = specjax.load_drafter(Path(specjax.__file__).parent / "models/embedded/eagle3", lm)
    tree = dataclasses.replace(heads.drafter, sibling_sampling="iid").with_topology(
        specjax.trees.branching(2, 2)
    )
    chosen = dataclasses.replace(heads, drafter=tree)
    assert how(chosen, temperature=1.0).sibling_sampling == "iid"
    assert how(temperature=1.0, tree="expand:2x2x3").sibling_sampling == "top"
    assert how(temperature=1.0, rule="delta").sibling_sampling == "top"
    own = specjax.Drafting(sibling_sampling="top")
    assert how(temperature=1.0, drafting=own).sibling_sampling == "top"
    assert how("ngram+medusa", temperature=1.0).inner.sibling_sampling == "iid"


def test_everything_that_names_a_drafter_is_understood(pair):
    target, draft = pair
    ngram = specjax.drafters.NGram(num_draft=2)
    assert resolve_drafter(target, None, 5)[0] == specjax.drafters.Plain()
    assert resolve_drafter(target, "plain", 5)[0] == specjax.drafters.Plain()
    assert resolve_drafter(target, "ngram", 5)[0].num_draft == 5
    assert resolve_drafter(target, ngram, 5, "weights") == (ngram, "weights")
    drafter, params = resolve_drafter(target, draft, 5)
    assert drafter.num_draft == 5 and params is draft.params
    options = dict(drafter=draft, tree="2x2", temperature=1.0)
    for rule, how in (("auto", "iid"), ("kseq", "iid"), ("hub", "hub")):  # as the rule wants it
        assert prepared(target, PROMPTS, rule=rule, **options).drafter.picks == how
    cold = dict(drafter=draft, tree="expand:2x2x3", rule="kseq")  # nothing is drawn
    assert prepared(target, PROMPTS, **cold).drafter.picks == "top"
    auto, _ = resolve_drafter(target, draft, "auto", tree=np.asarray([-1, 0, 0]))
    assert auto.inner.num_draft == 2
    with pytest.raises(ValueError, match="it follows a text that is known, and is for measuring"):
        resolve_drafter(target, draft, None, tree=specjax.trees.Follow(2, 3))


def test_tables_take_settings_after_their_name_and_numbers_where_they_have_one(pair):
    vocab = pair[0].target.vocab_size
    found = resolve_drafter(pair[0], "lookahead:window=5,ngram=3,guesses=4,reads_text=true")[0]
    settings = dict(window=5, ngram=3, guesses=4, reads_text=True)
    assert found == specjax.drafters.Lookahead(vocab_size=vocab, **settings)
    jacobi = specjax.drafters.Jacobi
    assert resolve_drafter(pair[0], "jacobi:mode=blocks", 5)[0] == jacobi(5, mode="blocks")
    assert resolve_drafter(pair[0], "jacobi")[0] == jacobi()
    suffix = resolve_drafter(pair[0], "suffix:longest=9,factor=1.5")[0]
    assert suffix == specjax.drafters.Suffix(longest=9, factor=1.5)
    auto, _ = resolve_drafter(pair[0], "lookahead:ngram=3", "auto")
    assert auto.inner == specjax.drafters.Lookahead(vocab_size=vocab, ngram=3)


@pytest.mark.parametrize(
    ("name", "num", "words"),
    [
        (
            "lookahead:windows=5",
            None,
            r"'windows=5' is no setting .*did you mean 'window'. .*: window \(int\)",
        ),
        ("lookahead:window=five", None, "window='five' is not a whole number"),
        ("lookahead:window=5,window=6", None, "'window' is given twice"),
        ("lookahead:num_draft=5", None, "'num_draft=5' is no setting"),
        ("lookahead", 3, "num=3: how much drafter='lookahead' drafts follows .*window=7,ngram=4,"),
        ("jacobi:mode=rows", None, "accepted are whole, blocks, hybrid"),
        ("lookaheads:window=5", None, "'lookaheads:window=5' is unknown: did you mean 'look"),
    ],
)
def test_settings_that_a_table_does_not_have_are_refused(pair, name, num, words):
    with pytest.raises(ValueError, match=words):
        specjax.generate(pair[0], "a", drafter=name, drafting=specjax.Drafting(num=num))


@pytest.fixture(params=["ngram", "draft"])
def drafter(request, pair):
    """Options of ``generate``."""
    return {"drafter": pair[1] if request.param == "draft" else request.param, "num_draft": 3}


def test_every_drafter_gives_the_words_of_plain_decoding_alone_and_in_a_batch(pair, drafter):
    options = {"max_new_tokens": 24, "stop": ()}
    plain = [specjax.generate(pair[0], p, **flat(drafter=None, **options)) for p in PROMPTS]
    both = specjax.generate(pair[0], PROMPTS, **flat(**options, **drafter))
    assert both.texts == [out.text for out in plain]
    assert [len(row) for row in both.tokens] == [24, 24]
    assert both.stats.rounds.sum() <= 48 and both.finished


def test_a_drafter_that_is_the_target_is_always_accepted(pair):
    options = {"drafter": pair[0], "num_draft": 3, "max_new_tokens": 24, "stop": ()}
    out = specjax.generate(pair[0], PROMPTS, **flat(**options))
    assert out.stats.acceptance == 1.0
    for row in out.from_draft:
        assert row.tolist() == [False, *5 * [True, True, True, False], *3 * [True]]


def test_pieces_join_to_the_text_and_carry_its_origin(pair):
    options = {"drafter": pair[0], "num_draft": 3, "max_new_tokens": 24, "stop": ()}
    stream = specjax.stream_text(pair[0], PROMPTS, **flat(**options))
    pieces = list(stream)
    whole = specjax.generate(pair[0], PROMPTS, **flat(**options))
    for row in range(2):
        mine = [piece for piece in pieces if piece.row == row]
        assert "".join(piece.text for piece in mine) == whole.texts[row]
        # the first token, then six rounds of three drafted tokens and one more, which may be half
        # a character; the last round ends at the budget
        drafted = [piece.from_draft for piece in mine]
        assert drafted[:3] == [False, True, False] and drafted.count(True) == 6
    assert stream.generation.texts == whole.texts and stream.num_tokens == 48


def test_another_prompt_compiles_nothing(pair):
    def run(prompt, seed):
        return specjax.generate(
            pair[0],
            prompt,
            drafter=pair[1],
            seed=seed,
            max_new_tokens=9 + seed,
            drafting=specjax.Drafting(num=1),
            sampling=specjax.Sampling(temperature=0.7),
        )

    run("def f(x):", 0)
    assert compilations(lambda: jax.jit(lambda x: 2 * x)(3)) > 0  # the counter counts
    assert compilations(lambda: run("class Another:\n    pass\n", 1)) == 0


def test_a_round_is_traced_once_for_the_check_of_a_request_and_its_decoding(pair, monkeypatch):
    traced, run = [], loop.run_round
    monkeypatch.setattr(loop, "run_round", lambda *given: traced.append(given) or run(*given))
    drafting = specjax.Drafting(num=11)
    specjax.generate(pair[0], PROMPTS[0], drafter="ngram", drafting=drafting, max_new_tokens=3)
    assert len(traced) == 1


def test_sizes_are_few_and_never_exceed_the_context(pair):
    lm = pair[0]  # a context of 600
    sizes = set()
    for length in range(1, 570, 7):
        tokens, lengths, capacity = prepare.fit(lm, [[5] * length], 30)
        assert tokens.shape[1] >= length and length + 30 <= capacity <= 600
        sizes.add((tokens.shape[1], capacity))
    assert len(sizes) <= 8
    with pytest.raises(ValueError, match=r"571 tokens and 30 new.*600.*at most 29"):
        prepare.fit(lm, [[5] * 571], 30)


def test_a_prompt_and_its_answer_may_fill_the_context_to_the_last_slot(pair):
    out = specjax.generate(pair[0], [7] * 590, drafter="ngram", max_new_tokens=10, stop=())
    assert len(out.tokens[0]) == 10


def test_stops_end_a_row_and_are_kept_but_not_shown(pair):
    free = specjax.generate(pair[0], PROMPTS[0], drafter=None, max_new_tokens=20, stop=())
    stop = int(free.tokens[0][9])  # whatever stands there
    first = free.tokens[0].tolist().index(stop)
    out = specjax.generate(pair[0], PROMPTS[0], drafter="ngram", max_new_tokens=20, stop=[stop])
    assert out.tokens[0].tolist() == free.tokens[0][: first + 1].tolist()
    forced = specjax.generate(
        pair[0], PROMPTS[0], drafter=None, sampling=specjax.Sampling(logit_bias={0: 1e9})
    )
    assert forced.tokens[0].tolist() == [0] and forced.text == ""  # the end-of-text token


def test_a_seed_decides_what_is_drawn(pair):
    def draw(seed):
        options = {"drafter": pair[1], "num_draft": 1, "temperature": 1.0, "max_new_tokens": 16}
        return specjax.generate(pair[0], PROMPTS[0], **flat(seed=seed, **options)).text

    assert draw(3) == draw(3) != draw(4)


def test_an_interruption_returns_what_was_committed(pair, monkeypatch):
    whole = specjax.generate(pair[0], PROMPTS[0], drafter="ngram", max_new_tokens=40, stop=())
    burst = interrupting(task.GenerationTask.burst, 3)
    monkeypatch.setattr(task.GenerationTask, "burst", burst)
    part = specjax.generate(pair[0], PROMPTS[0], drafter="ngram", max_new_tokens=40, stop=())
    assert whole.finished and not part.finished
    assert 0 < len(part.tokens[0]) < 40
    assert part.tokens[0].tolist() == whole.tokens[0][: len(part.tokens[0])].tolist()


def test_an_interrupted_comparison_states_nothing(pair, monkeypatch):
    burst = interrupting(task.GenerationTask.burst, 2)
    monkeypatch.setattr(task.GenerationTask, "burst", burst)
    with pytest.raises(KeyboardInterrupt):
        specjax.compare(pair[0], PROMPTS[0], drafter="ngram", max_new_tokens=40, stop=())


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(pair, folders):
    lm = specjax.load(folders["target"], tokenizer=False)
    ids = pair[0].tokenizer.encode(PROMPTS[0])
    wanted = specjax.generate(pair[0], ids, max_new_tokens=8)
    stream = specjax.stream_text(lm, ids, max_new_tokens=8)
    assert list(stream) == [] and stream.generation.text == ""
    assert stream.generation.tokens[0].tolist() == wanted.tokens[0].tolist()
    assert (
        specjax.serve_offline(lm, [ids], max_new_tokens=8).rows[0].tokens
        == wanted.tokens[0].tolist()
    )
    for call in (
        lambda: specjax.generate(lm, "a"),
        lambda: specjax.generate(lm, ids, stop_strings="a"),
        lambda: specjax.Chat(lm),
    ):
        with pytest.raises(ValueError, match="has no tokenizer; load it with one"):
            call()


def test_auto_drafts_by_copying_where_a_model_has_nothing_of_its_own(pair):
    plain = specjax.generate(pair[0], PROMPTS[0], drafter="none", max_new_tokens=8)
    out = specjax.generate(pair[0], PROMPTS[0], max_new_tokens=8)
    assert out.stats.drafter == "ngram" and out.text == plain.text
    assert specjax.generate(pair[0], PROMPTS[0], drafter="plain", max_new_tokens=8).text == out.text
    for name in specjax.drafters.registry.head_names():
        with pytest.raises(ValueError, match=f"has no {name} heads of its own"):
            specjax.generate(pair[0], PROMPTS[0], drafter=name)


def test_special_tokens_are_never_shown(tmp_path):
    """Also where the vocabulary holds them as words, and with a tokenizer of one's own."""
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<pad>": 4}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = load_tokenizer(tmp_path)
    assert read.eos_ids == (1,) and read.vocabulary[0] == "<s>"
    assert read.decode(np.asarray([0, 2, 4, 3, 1])) == "a b"
    stream = StreamDecoder(read, [0, 2])
    assert [stream.push([i]) for i in (0, 3, 1)] + [stream.flush()] == ["", " b", "", ""]

    class Words:
        eos_ids = (1,)

        def encode(self, text):
            return [words[word] for word in text.split()]

        def decode(self, ids):
            return " ".join([*words][i] for i in ids)

    own = wrap_tokenizer(Words(), vocab_size=5)
    assert own.decode([2, 1]) == "a" and own.vocabulary[1] == "</s>"


def test_the_text_of_several_rows_is_ambiguous(pair):
    out = specjax.generate(pair[0], PROMPTS, drafter=None, max_new_tokens=2)
    with pytest.raises(ValueError, match="texts"):
        _ = out.text


def test_compare_measures_both_and_says_whether_the_words_are_the_same(pair):
    options = {"drafter": "ngram", "max_new_tokens": 20, "repetitions": 6}
    greedy = specjax.compare(pair[0], PROMPTS[0], **flat(**options))
    assert greedy.identical and greedy.plain.text == greedy.speculative.text
    assert greedy.interval[0] <= greedy.ratio <= greedy.interval[1]
    assert "speculat" in str(greedy) and "yes, all 20 tokens" in str(greedy)
    # the rule is the speculative side's alone: plain decoding has no pairs of siblings
    options |= {"drafter": pair[1], "tree": "2", "rule": "hub"}
    drawn = specjax.compare(pair[0], PROMPTS[0], **flat(temperature=1.0, **options))
    assert drawn.identical is None
    with pytest.raises(ValueError, match="at least 6"):
        specjax.compare(pair[0], PROMPTS[0], repetitions=5)
    with pytest.raises(ValueError, match="repetitions: 6.5 is no whole number"):
        specjax.compare(pair[0], PROMPTS[0], repetitions=6.5)


def test_repeated_ngrams_counts_what_stood_there_before():
    assert comparison.repeated_ngrams([np.arange(10)]) == 0.0
    assert comparison.repeated_ngrams([np.zeros(7, int)]) == 0.75  # one of four is new
    assert comparison.repeated_ngrams([np.arange(3)]) == 0.0  # too short to hold any


def test_a_small_model_reads_its_prompts_a_few_tokens_at_a_time_by_xla(monkeypatch):
    params = {"a": np.zeros(100, np.float32), "b": np.zeros(4, np.float16)}
    few, many = xla_cpu.SMALL_PREFILL_CHUNK, xla_cpu.PREFILL_CHUNK
    for cache, chunk in ((204, few), (203, many)):
        monkeypatch.setattr(xla_cpu, "last_level_cache", lambda size=cache: size)
        assert prefill.chunk_for(params) == chunk
    monkeypatch.setattr(xla_cpu, "last_level_cache", lambda: 1000)
    one = {"a": np.zeros(100, np.float32)}  # with the library, whatever its size
    with_library = isinstance(kernels.current(), CpuBackend)
    most = prefill.PREFILL_CHUNK if with_library and library.has_tiles() else many
    assert prefill.chunk_for(one) == (most if with_library else few)


def test_weights_that_are_multiplied_as_bytes_or_by_tiles_read_long_chunks(monkeypatch):
    monkeypatch.setattr(xla_cpu, "last_level_cache", lambda: 2**30)
    lm = specjax.load("embedded-draft", quantize="int8", tokenizer=False)
    fits = isinstance(kernels.current(), CpuBackend) and library.register("quantized") is None
    as_bytes = fits and library.has_byte_dots()
    long, short = xla_cpu.PREFILL_CHUNK, xla_cpu.SMALL_PREFILL_CHUNK
    assert prefill.chunk_for(lm.params) == (long if as_bytes else short)
    halves = {"a": jnp.zeros(4, jnp.bfloat16)}  # by tiles, too
    tiles = fits and library.has_tiles()
    assert prefill.chunk_for(halves) == (prefill.PREFILL_CHUNK if tiles else short)


def test_settings_of_rows_may_be_lists_and_tuples(pair):
    for given in ([0.0, 0.75], (0.0, 0.75), np.array([0.0, 0.75])):
        request = prepared(pair[0], PROMPTS, temperature=given, top_k=[3, 4]).request
        assert np.asarray(request.sampling.temperature).tolist() == [0.0, 0.75]
        assert np.asarray(request.sampling.top_k).tolist() == [3, 4]


def test_a_request_of_a_known_form_is_not_traced_again_to_be_checked(pair, monkeypatch):
    class Traced:
        program, names = loop.jit_start, []

        def eval_shape(self, target, drafter, rule, *given):
            self.names.append(drafter.name)
            return self.program.eval_shape(target, drafter, rule, *given)

    traced = Traced()
    monkeypatch.setattr(task.loop, "jit_start", traced)
    lm = dataclasses.replace(pair[0])  # of which nothing is known

    def asked(prompt=PROMPTS[0], **options):
        return prepared(lm, prompt, **options)

    asked(), asked(PROMPTS[1]), asked(seed=3, max_new_tokens=9)
    assert traced.names == ["ngram"]
    asked(drafter="none"), asked(drafter="none", least_buffer=512), asked(drafter="none")
    assert traced.names == ["ngram", "plain", "plain"]  # another capacity
    for _ in range(2):  # a refusal is not taken for a check that was passed
        with pytest.raises(ValueError, match="needs weights"):
            asked(drafter=Weighted(num_draft=2))
    assert len(traced.names) == 5
    asked(repetition_penalty=1.1)  # settings of other shapes
    assert len(traced.names) == 6


def test_compare_counts_the_tokens_that_flip_and_states_their_margins():
    lm = specjax.load("embedded")
    made = specjax.generate(lm, ["def f(x):", "import os"], drafter="none", max_new_tokens=8)
    flipped = [row.copy() for row in made.tokens]
    flipped[1][5] += 1
    other = dataclasses.replace(made, tokens=flipped)
    rate, margins = comparison._flips(lm, Options(), made, other)
    assert rate == 1 / (len(made.tokens[0]) + 6) and len(margins) == 1
    prefix = [*made.prompts[1].tolist(), *made.tokens[1][:5].tolist()]
    logits = reference.logits(lm.target, lm.params, np.asarray([prefix]))
    second, first = np.sort(np.asarray(logits)[0, -1])[-2:]
    assert margins[0] == pytest.approx(float(first - second), abs=1e-3)
    assert comparison._flips(lm, Options(), made, made) == (0, ())
