"""T5: parity with transformers, the memory in the loop, texts that speculation leaves alone."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat
from checkpoints import GOLDEN
from encoder_decoders import (
    FOLDER,
    TOLERANCE,
    check_both_directions,
    copies,
    decode,
    expected,
    golden_maker,
    logits_of,
    model,
    with_tokenizer,
)
from flax import nnx

import specjax
from specjax import drafters
from specjax.models.hf import abstract
from specjax.models.seq2seq import encoder
from specjax.models.seq2seq.relative_positions import buckets

MAKER = golden_maker()
T5S = ["t5", "t5_gated"]
PROMPTS = ["TRANSLATE", "SUMMARIZE:THIS-TEXT,PLEASE"]


# ------------------------------------------------------------------- parity


@pytest.mark.parametrize("case", T5S)
def test_logits_equal_the_golden_ones_for_ragged_texts(case):
    inputs, rest = expected(case)
    assert len(set(inputs["lengths"])) == 3
    found = logits_of(FOLDER / case, inputs, rest["decoder"])
    np.testing.assert_allclose(found, rest["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", T5S)
def test_logits_equal_those_of_pytorch_in_both_directions(case, tmp_path):
    check_both_directions(case, "T5ForConditionalGeneration", tmp_path)


@pytest.mark.parametrize(("num", "farthest"), [(32, 128), (8, 20), (64, 256)])
@pytest.mark.parametrize("both_ways", [False, True])
def test_distances_fall_into_the_buckets_of_transformers(num, farthest, both_ways):
    torch = pytest.importorskip("torch")
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(farthest + 50)
    theirs = T5Attention._relative_position_bucket(
        -torch.tensor(distance), both_ways, num, farthest
    )
    ours = buckets(num, farthest, both_ways)
    np.testing.assert_array_equal(ours[np.minimum(distance, farthest)], theirs.numpy())


def test_a_long_text_is_read_in_parts_that_make_the_whole(monkeypatch):
    inputs, rest = expected("t5_gated")
    target, params = model("t5_gated")
    model_ = nnx.merge(abstract(target.config)[0], params)
    whole = model_.encode(inputs)[0]
    monkeypatch.setattr(encoder, "QUERIES", 16)  # 40 tokens in three parts
    parts = model_.encode(inputs)[0]
    seen = np.arange(40) < inputs["lengths"][:, None]
    np.testing.assert_allclose(np.where(seen[..., None], parts - whole, 0), 0, atol=TOLERANCE)


# ------------------------------------------------------------------- the loop


DRAFTED = [("t5", "plain"), ("t5", "ngram"), ("t5", "draft"), ("t5", "adaptive")]


@pytest.mark.parametrize(("case", "name"), [*DRAFTED, ("t5_gated", "tree")])
def test_every_drafter_writes_the_greedy_text_of_transformers(case, name):
    """Rows of 40, 17 and 1 tokens in one batch."""
    inputs, rest = expected(case)
    wanted = rest["generated"]
    out = decode(case, name, inputs, wanted.shape[1])
    assert len({tuple(row) for row in wanted}) == 3
    np.testing.assert_array_equal(out.tokens[:, 1:], wanted)
    if name != "plain":
        assert 0 < float(out.stats.acceptance) < 1


def test_a_row_depends_on_neither_its_batch_mates_nor_its_padding():
    inputs, rest = expected("t5_gated")
    size = int(inputs["lengths"][1])
    filled = np.where(np.arange(64) < size, np.pad(inputs["tokens"][1], (0, 24)), 63)
    alone = {"tokens": filled[None].astype(np.int32), "lengths": np.asarray([size])}
    out = decode("t5_gated", "draft", alone, rest["generated"].shape[1])
    np.testing.assert_array_equal(out.tokens[0, 1:], rest["generated"][1])


@pytest.mark.parametrize("name", ["plain", "draft"])
def test_the_rounds_copy_neither_memory_nor_cache(name):
    inputs, _ = expected("t5")
    heads, size, slots, new = 4, 12, 40, 300
    shapes = {
        shape
        for length in (slots, new + 1)
        for shape in ((3, heads, length, size), (3 * heads, length, size))
    }
    found, text = copies("t5", name, inputs, new, shapes)
    assert f"f32[3,{heads},{slots},{size}]" in text  # the memory is there, under this shape
    assert f"f32[3,{heads},{new + 1},{size}]" in text
    assert not found


def test_the_memory_is_only_read_and_the_encoder_runs_in_init_alone():
    inputs, _ = expected("t5")
    target, params = model("t5")
    cache = target.init(params, 3, 8, inputs)
    # what the encoder is made of plays no part in a pass
    blind = jax.tree.map(lambda x: x, params)
    blind["encoder"] = jax.tree.map(lambda x: x * jnp.nan, params["encoder"])
    draft = specjax.Draft(
        start=jnp.zeros(3, jnp.int32), tokens=jnp.zeros((3, 1), jnp.int32), topology=(-1,)
    )
    scores = [target.verify(p, cache, draft) for p in (params, blind)]
    np.testing.assert_array_equal(scores[0].logits, scores[1].logits)
    assert not np.isnan(scores[0].logits).any()
    verdict = specjax.Verdict(
        path=jnp.zeros((3, 1), jnp.int32), count=jnp.zeros(3, jnp.int32), token=jnp.ones(3, int)
    )
    after = target.commit(cache, scores[0].entries, draft.start, verdict)
    before, behind = (jax.tree.leaves(x.memory) for x in (cache, after))
    assert all(x is y for x, y in zip(before, behind, strict=True))
    assert np.any(after.slots[0][0][:, :, 0] != 0) and not np.any(after.slots[0][0][:, :, 1:])


def test_drawn_texts_follow_the_law_whatever_drafts():
    """The first two tokens at T = 1, over 1,000 rows, against the probabilities themselves."""
    rows, (target, params) = 1000, model("t5")
    source = {"tokens": np.full((1, 4), 7, np.int32), "lengths": np.asarray([4])}
    options = dict(sampling=specjax.Sampling(temperature=1.0))
    inputs = {k: np.repeat(v, rows, axis=0) for k, v in source.items()}
    out = decode("t5", "draft", inputs, 2, **options)
    full = nnx.merge(abstract(target.config)[0], params)
    first = jax.nn.softmax(full(source, jnp.zeros((1, 1), jnp.int32))[0, 0])
    then = np.stack([np.zeros(64), np.arange(64)], axis=1).astype(np.int32)
    wide = {k: np.repeat(v, 64, axis=0) for k, v in source.items()}
    second = first @ jax.nn.softmax(full(wide, jnp.asarray(then))[:, 1])
    for place, law in ((1, first), (2, second)):
        seen = np.bincount(out.tokens[:, place], minlength=64)
        chi = np.sum((seen - rows * law) ** 2 / (rows * law))
        assert chi < 63 + 5 * (2 * 63) ** 0.5  # five standard deviations: 1 in a million


# ------------------------------------------------------------------- text in, text out


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Version 1.1 with version 1.0 as its draft model, and a decoder-only model."""
    root = tmp_path_factory.mktemp("t5")
    names = {"t5": FOLDER / "t5", "t5_gated": FOLDER / "t5_gated", "llama": GOLDEN / "llama"}
    for name, folder in names.items():
        with_tokenizer(shutil.copytree(folder, root / name))
    return {name: specjax.load(root / name) for name in names}


@pytest.mark.parametrize("drafter", ["t5", "ngram"])
def test_generate_reads_prompts_and_writes_with_any_drafter_what_plain_decoding_writes(
    pair, drafter
):
    options = dict(max_new_tokens=20, stop=())
    plain = [
        specjax.generate(pair["t5_gated"], p, **flat(drafter=None, **options)) for p in PROMPTS
    ]
    drafter = pair.get(drafter, drafter)
    both = specjax.generate(pair["t5_gated"], PROMPTS, **flat(drafter=drafter, **options))
    assert both.texts == [out.text for out in plain] and len(set(both.texts)) == 2
    assert [len(row) for row in both.tokens] == [20, 20]
    assert [row.tolist() for row in both.prompts] == [[0], [0]]  # the decoder's start
    ids = pair["t5_gated"].tokenizer.encode(PROMPTS[0])
    source = {"tokens": np.asarray([ids]), "lengths": np.asarray([len(ids)])}
    direct = decode("t5_gated", "plain", source, 20)
    np.testing.assert_array_equal(direct.tokens[0, 1:], both.tokens[0])


def test_inputs_may_be_given_in_place_of_the_prompt_with_a_begun_text(pair):
    lm, options = pair["t5_gated"], dict(drafter="ngram", stop=())
    whole = specjax.generate(lm, PROMPTS[0], **flat(max_new_tokens=20, **options))
    ids = np.asarray([lm.tokenizer.encode(PROMPTS[0])])
    source = {"tokens": ids, "lengths": np.asarray([ids.shape[1]])}
    begun = [0, *whole.tokens[0][:5].tolist()]
    rest = specjax.generate(lm, [begun], **flat(inputs=source, max_new_tokens=15, **options))
    np.testing.assert_array_equal(rest.tokens[0], whole.tokens[0][5:])


# ------------------------------------------------------------------- what is refused


def direct(inputs, case="t5", drafter=None):
    drafter = drafter or drafters.Plain()
    target, params = model(case)
    start, one = np.zeros((2, 1), np.int32), np.ones(2, np.int32)
    params = {"target": params, "drafter": params}
    options = dict(key=jax.random.key(0), max_new_tokens=3, inputs=inputs)
    return specjax.decode(target, drafter, params, start, one, **options)


def text_inputs(**changed):
    return {"tokens": np.full((2, 5), 9), "lengths": np.asarray([5, 3])} | changed


REFUSED = {
    "nothing to read": (None, "'t5' is an encoder-decoder model.*nothing for its encoder"),
    "features": ({"features": np.zeros((2, 8, 40))}, r"\['features'\] is nothing that 't5' reads"),
    "an array": (np.zeros((2, 5)), "inputs: ndarray is nothing"),
    "no lengths": ({"tokens": np.full((2, 5), 9)}, r"\['tokens'\] is nothing"),
    "rows of another batch": (text_inputs(tokens=np.full((3, 5), 9)), r"\[3, 5\], expected \[2, 5"),
    "a length of no row": (text_inputs(lengths=np.asarray([5])), r"lengths has shape \[1\]"),
    "an empty text": (text_inputs(lengths=np.asarray([5, 0])), "at least one position"),
    "a text beyond its row": (text_inputs(lengths=np.asarray([6, 1])), "6 positions in a row of 5"),
    "an id beyond the vocabulary": (text_inputs(tokens=np.full((2, 5), 64)), "64.*below 64"),
    "a memory of another size": (
        {"memory": np.zeros((2, 5, 8)), "lengths": np.asarray([5, 3])},
        r"memory has shape \[2, 5, 8\], expected \[2, 5, 32\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_inputs_that_the_encoder_cannot_read_are_refused(what):
    inputs, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        direct(inputs)


def test_models_of_other_kinds_cannot_draft_for_each_other(pair):
    with pytest.raises(ValueError, match="decoder-only model, the target .* reads tokens"):
        specjax.generate(pair["t5"], "A", drafter=pair["llama"])
    with pytest.raises(ValueError, match="reads tokens, the target .* decoder-only model"):
        specjax.generate(pair["llama"], "A", drafter=pair["t5"])
    with pytest.raises(ValueError, match="decoder-only model, which reads nothing but its prompt"):
        specjax.generate(pair["llama"], "A", max_new_tokens=3, drafter=None, inputs=text_inputs())
    causal = drafters.DraftModel(num_draft=2, model=pair["llama"].target)
    with pytest.raises(ValueError, match="decoder-only model, which reads nothing"):
        direct(text_inputs(), drafter=causal)


def test_prompts_that_leave_nothing_to_read_are_refused(pair):
    with pytest.raises(ValueError, match="reads a text"):
        specjax.generate(pair["t5"], None, drafter=None)
    with pytest.raises(ValueError, match="the prompt is empty"):
        specjax.generate(pair["t5"], "", drafter=None)
    with pytest.raises(ValueError, match="token ids that the decoder begins with"):
        specjax.generate(pair["t5"], "A", drafter=None, inputs=text_inputs())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(feed_forward_proj="tanh"), "feed_forward_proj='tanh'.*gated-gelu"),
        (dict(d_model=0), "d_model=0"),
        (dict(d_kv=None), "d_kv"),
        (dict(relative_attention_num_buckets=6), "relative_attention_num_buckets=6"),
        (dict(layer_norm_epsilon="1e-06"), "layer_norm_epsilon='1e-06': it must be a number"),
        (dict(eos_token_id="1"), "eos_token_id=.*'1'"),
        (dict(quantization_config={"quant_method": "gptq"}), "quantized checkpoints"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(change, message):
    from specjax.models.files import read_json
    from specjax.models.seq2seq.families import config_from_hf

    with pytest.raises(ValueError, match=message):
        config_from_hf(read_json(FOLDER / "t5", "config.json") | change)
