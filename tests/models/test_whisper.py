"""Whisper: parity with transformers, a distilled drafter, what is heard once serves both."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from asking import prepared
from checkpoints import byte_tokenizer
from encoder_decoders import (
    FOLDER,
    TOLERANCE,
    check_both_directions,
    copies,
    decode,
    expected,
    golden_maker,
    logits_of,
    shorter,
    with_tokenizer,
)

import specjax
from specjax import drafters
from specjax.decoding import loop
from specjax.models import save_pretrained, start_ids
from specjax.models.seq2seq.families import config_from_hf
from specjax.models.seq2seq.target import encode, same_encoder
from specjax.models.tokenizer import wrap_tokenizer

MAKER = golden_maker()
TOKENS = ["<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]


# ------------------------------------------------------------------- parity


def test_logits_equal_the_golden_ones():
    inputs, rest = expected("whisper")
    found = logits_of(FOLDER / "whisper", inputs, rest["decoder"])
    np.testing.assert_allclose(found, rest["logits"], rtol=0, atol=TOLERANCE)


def test_logits_equal_those_of_pytorch_in_both_directions(tmp_path):
    check_both_directions("whisper", "WhisperForConditionalGeneration", tmp_path)


# ------------------------------------------------------------------- a distilled drafter


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """The golden Whisper; one with its encoder and its first decoder layer; a stranger's."""
    root = tmp_path_factory.mktemp("whisper")
    with_tokenizer(shutil.copytree(FOLDER / "whisper", root / "whisper"))
    distilled = shorter("whisper", num_layers=1)
    save_pretrained(distilled, with_tokenizer_in(root / "distilled"))
    for block in distilled.encoder.blocks:
        block.mlp.up.bias[...] += 0.01
    save_pretrained(distilled, with_tokenizer_in(root / "stranger"))
    return {name: specjax.load(root / name) for name in ("whisper", "distilled", "stranger")}


def with_tokenizer_in(folder):
    folder.mkdir()
    return with_tokenizer(folder)


def said(lm, drafter, **options):
    inputs, rest = expected("whisper")
    options = dict(stop=(), max_new_tokens=rest["generated"].shape[1]) | options
    return specjax.generate(lm, None, inputs=inputs["features"], drafter=drafter, **options)


@pytest.mark.parametrize("drafter", [None, "ngram", "distilled", "stranger"])
def test_every_drafter_writes_what_transformers_generates_with_its_suppressed_tokens(lms, drafter):
    wanted = expected("whisper")[1]["generated"]
    out = said(lms["whisper"], lms.get(drafter, drafter))
    np.testing.assert_array_equal(np.stack(out.tokens), wanted)
    never = lms["whisper"].config.suppress_ids
    assert len(never) == 2 and not np.isin(wanted, never).any()
    assert not np.isin(wanted[:, 0], lms["whisper"].config.begin_suppress_ids).any()
    assert [row.tolist() for row in out.prompts] == [[3]] * 3
    if drafter in ("distilled", "stranger"):
        assert 0 < out.stats.acceptance < 1


def test_what_is_suppressed_at_first_would_be_said_and_may_be_said_later(lms):
    config = lms["whisper"].config
    free = decode("whisper", "plain", expected("whisper")[0], 12)  # nothing said of a beginning
    assert free.tokens[0, 1] in config.begin_suppress_ids
    wanted = expected("whisper")[1]["generated"]
    assert set(config.begin_suppress_ids) & {*free.tokens[0, 2:].tolist(), *wanted.ravel().tolist()}


def convolutions(work):
    """How many convolutions the prefill does: two an encoder that runs."""
    objects = work.lm.target, work.drafter, work.rule
    traced = loop.jit_start.trace(
        *objects, work.capacity, work.params, work.asked(work.request), work.chunk
    )
    return str(traced.jaxpr).count("conv_general_dilated")


def test_one_hearing_serves_a_drafter_with_the_encoder_of_its_target(lms):
    inputs = expected("whisper")[0]["features"]
    options = dict(inputs=inputs, max_new_tokens=8)
    shared = prepared(lms["whisper"], None, drafter=lms["distilled"], **options)
    apart = prepared(lms["whisper"], None, drafter=lms["stranger"], **options)
    assert shared.one_memory and convolutions(shared) == 0  # it was heard before, once
    assert not apart.one_memory and convolutions(apart) == 4
    ours, theirs = lms["whisper"], lms["distilled"]
    weights = jax.tree.map(lambda x: x + 1e-6, theirs.params)
    assert same_encoder(ours.target, ours.params, theirs.target, theirs.params)
    assert not same_encoder(ours.target, ours.params, theirs.target, weights)


def test_a_quantized_whisper_hears_what_it_heard(lms):
    pytest.importorskip("qwix")
    lm = specjax.load(lms["whisper"].name, quantize="int8")
    inputs = {"features": expected("whisper")[0]["features"]}
    heard = [encode(x.target, x.params, inputs)["memory"] for x in (lms["whisper"], lm)]
    assert 0.999 < np.corrcoef(*(np.ravel(memory) for memory in heard))[0, 1] < 1


def test_the_rounds_copy_neither_memory_nor_cache():
    heads, size, new = 4, 8, 40
    shapes = {
        shape
        for length in (20, new + 1)
        for shape in ((3, heads, length, size), (3 * heads, length, size))
    }
    found, text = copies("whisper", "draft", expected("whisper")[0], new, shapes)
    assert f"f32[3,{heads},20,{size}]" in text and f"f32[3,{heads},{new + 1},{size}]" in text
    assert not found


# ------------------------------------------------------------------- how the decoder begins


def test_the_prompt_of_the_decoder_is_spelled_by_the_tokenizer(lms):
    lm = dataclasses.replace(
        lms["whisper"], tokenizer=wrap_tokenizer(byte_tokenizer(*TOKENS, size=60))
    )
    assert start_ids(lm) == [3, 63]
    tongues = dataclasses.replace(lm, target=with_start_of(lm.target))
    with pytest.raises(ValueError, match="several languages: give one"):
        start_ids(tongues)
    assert start_ids(lm, "de") == [3, 61, 62, 63]
    assert start_ids(lm, "en", timestamps=True) == [3, 60, 62]
    for wrong in (dict(language="english"), dict(language="en", task="sing")):
        with pytest.raises(ValueError, match="does not know"):
            start_ids(lm, **wrong)


LANGUAGES = dict(lang_to_id={"<|en|>": 10, "<|de|>": 11}, task_to_id={"transcribe": 20})


@pytest.mark.parametrize(
    ("generation", "prompt"),
    [
        ({}, (3,)),
        (dict(no_timestamps_token_id=30), (3, 30)),
        (dict(forced_decoder_ids=[[1, 10], [2, 20], [3, 30]]), (3, 10, 20, 30)),
        (dict(forced_decoder_ids=[[1, None], [2, 20]]), ()),  # to be detected
        (LANGUAGES, ()),
        (LANGUAGES | dict(language="<|de|>", no_timestamps_token_id=30), (3, 11, 20, 30)),
        (LANGUAGES | dict(language="de", task="transcribe"), (3, 11, 20)),
        (LANGUAGES | dict(language="xx"), ()),
    ],
)
def test_the_default_prompt_is_that_of_the_generation_config(generation, prompt):
    from specjax.models.files import read_json

    raw = read_json(FOLDER / "whisper", "config.json")
    assert config_from_hf(raw, generation).start_ids == prompt


# ------------------------------------------------------------------- what is refused


def test_what_cannot_be_heard_or_begun_is_refused(lms):
    lm, features = lms["whisper"], expected("whisper")[0]["features"]
    tongues = dataclasses.replace(
        lm, target=dataclasses.replace(lm.target, config=with_start(lm.config, ()))
    )
    many_bins = dataclasses.replace(lm.config, num_features=16)
    other = dataclasses.replace(lm, target=dataclasses.replace(lm.target, config=many_bins))
    cases = [
        (lm, dict(prompts=None), "nothing for its encoder to read"),
        (lm, dict(prompts="A"), "nothing for its encoder to read"),
        (lm, dict(inputs=features[:, :, :30]), r"\[3, 8, 30\], expected \[3, 8, 40\]"),
        (lm, dict(inputs=features, prompts="A"), "token ids that the decoder begins with"),
        (lm, dict(inputs=features, prompts=[[3], [3]]), "2 of them for 3 rows"),
        (lm, dict(inputs=features, max_new_tokens=48), "context of .*, which has 48 tokens"),
        (tongues, dict(inputs=features), "knows several languages.*start_ids"),
        (lm, dict(inputs=features, drafter=other), r"\(16 by 40\).*\(8 by 40\)"),
    ]
    for who, options, message in cases:
        options = dict(prompts=None, drafter=None, max_new_tokens=3) | options
        with pytest.raises(ValueError, match=message):
            specjax.generate(who, **options)
    with pytest.raises(ValueError, match="nothing for its encoder"):
        specjax.decode(
            *(lm.target, drafters.Plain(), {"target": lm.params, "drafter": None}),
            *(np.full((1, 1), 3), np.ones(1, np.int32)),
            **dict(key=jax.random.key(0), max_new_tokens=3),
        )


def with_start_of(target):
    """The target of a model that names no language."""
    return dataclasses.replace(target, config=with_start(target.config, ()))


def with_start(config, ids):
    return dataclasses.replace(config, start_ids=ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(encoder_ffn_dim=44), "encoder_ffn_dim=44 differs from decoder_ffn_dim=40"),
        (dict(scale_embedding=True), "scale_embedding=True"),
        (dict(decoder_attention_heads=5, encoder_attention_heads=5), "5 heads do not divide"),
        (dict(activation_function="mish"), "activation_function='mish'"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(change, message):
    from specjax.models.files import read_json

    with pytest.raises(ValueError, match=message):
        config_from_hf(read_json(FOLDER / "whisper", "config.json") | change)


def test_what_has_an_encoder_is_refused_where_there_is_no_place_for_it(lms):
    lm = dataclasses.replace(lms["whisper"], tokenizer=wrap_tokenizer(byte_tokenizer(size=60)))
    for call in (
        lambda: specjax.Chat(lm),
        lambda: specjax.contrastive(lm, lm),
    ):
        with pytest.raises(ValueError, match="is an encoder-decoder model"):
            call()
