"""``load``: names, folders, dtypes, tokenizers; and which models may work together."""

import dataclasses
import json
import re
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
from checkpoints import GOLDEN, SMALL, byte_tokenizer, random_model, random_params
from flax import nnx
from huggingface_hub import errors
from stranger import Bag

import specjax
from specjax import Draft, Sampling, decode
from specjax.drafters import DraftModel, Plain
from specjax.models import save_pretrained
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM, as_drafter, check_same_tokenizer, load
from specjax.models.model_folder import EMBEDDED
from specjax.models.tokenizer import FileTokenizer
from specjax.text.drafter_names import named


def language_model(size=320, tokenizer=None, name="a model"):
    """An ``LM`` whose weights do not matter."""
    config = dataclasses.replace(SMALL, vocab_size=size, num_layers=1)
    wrapped = None if tokenizer is None else FileTokenizer(tokenizer)
    return LM(CausalLM(config), None, wrapped, name, "")


class Bytes:
    """A tokenizer of one's own: three members."""

    eos_ids = (0,)

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def own_model(**settings):
    embed, out = jax.random.normal(jax.random.key(0), (2, 256, 16))
    params = {"embed": embed, "out": 3 * out.T}
    return LM.of(Bag(256), params, **settings)


def test_a_target_of_ones_own_reaches_text_trace_and_files(tmp_path):
    lm = own_model(tokenizer=Bytes())
    options = dict(drafter="ngram", max_new_tokens=8)
    out = specjax.generate(lm, "def f", **options)
    plain = specjax.generate(lm, "def f", drafter="plain", max_new_tokens=8)
    assert out.text == plain.text == Bytes().decode(out.tokens[0].tolist())
    assert specjax.trace(lm, "def f", **options).rounds
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "def f"}\n')
    specjax.serve_offline(lm, prompts, output=answers, **options)
    assert json.loads(answers.read_text())["text"] == out.text
    bare = own_model(name="mine")
    assert bare.name == "mine" and bare.tokenizer is None and bare.dtype == np.float32
    assert bare.fingerprint == lm.fingerprint == own_model().fingerprint


def test_what_is_no_target_or_tokenizer_is_refused_by_name():
    with pytest.raises(TypeError, match=r"expected an instance of a subclass of specjax.Target"):
        LM.of(own_model(), None)
    with pytest.raises(TypeError, match="an object with encode, decode and eos_ids"):
        own_model(tokenizer=object())
    with pytest.raises(TypeError, match="Bag is a target of your own, which has no config"):
        _ = own_model().config


def test_a_folder_becomes_a_language_model(folder, small):
    lm = load(folder)
    assert lm.config == SMALL and lm.target.vocab_size == 320
    assert lm.tokenizer.decode(lm.tokenizer.encode("x = 1")) == "x = 1"
    assert lm.tokenizer.eos_ids == (0,)
    assert lm.name == str(folder)
    for a, b in zip(jax.tree.leaves(lm.params), jax.tree.leaves(nnx.state(small)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_language_model_can_be_saved_and_loaded_again(folder, tmp_path):
    lm = load(folder)
    save_pretrained(lm, tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.config == lm.config
    assert again.tokenizer.fingerprint == lm.tokenizer.fingerprint
    assert again.fingerprint == lm.fingerprint


def test_the_fingerprint_follows_weights_and_config(folder, tmp_path):
    before = load(folder).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    other_config = load(folder).fingerprint
    save_pretrained(random_model(SMALL, 1), folder)
    assert len({before, other_config, load(folder).fingerprint}) == 3


def test_end_of_text_falls_back_on_the_tokenizers(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert load(folder).config.eos_ids == (0,)


def test_a_tokenizer_may_come_from_elsewhere_or_not_at_all(folder):
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load(GOLDEN / "llama")
    for tokenizer in (folder, str(folder), byte_tokenizer(), load(folder).tokenizer):
        assert load(GOLDEN / "llama", tokenizer=tokenizer).tokenizer.encode("a")
    lm = load(GOLDEN / "llama", tokenizer=False)
    assert lm.tokenizer is None
    with pytest.raises(ValueError, match="without a tokenizer"):
        lm.chat([{"role": "user", "content": "Hi"}])


def test_a_wrong_dtype_is_refused_before_anything_is_looked_up_and_a_config_by_its_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: .*hidden_size='x'.*whole"):
        load(tmp_path)
    with pytest.raises(ValueError, match="dtype='float8'.*accepted: float32"):
        load("no/where", dtype="float8")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "a/b/c", "~/nowhere", "..", ""])
def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("hub"))
    if name == "..":
        with pytest.raises(FileNotFoundError, match="has no config.json"):
            load(name)
    else:
        with pytest.raises(FileNotFoundError, match="neither a folder, nor a name on the hub"):
            load(name)


def test_a_file_is_not_a_folder(folder):
    with pytest.raises(FileNotFoundError, match="is a file; give the folder"):
        load(folder / "config.json")


def test_a_hub_name_is_downloaded_at_its_revision_without_other_formats(folder, monkeypatch):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lm = load("owner/model", revision="v2")
    assert (lm.name, asked["name"], asked["revision"]) == ("owner/model", "owner/model", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.pt", "*.h5"} & set(asked["allow_patterns"])
    assert asked["ignore_patterns"] == ["*/*", "consolidated*"]  # of Mistral: all weights again


@pytest.mark.parametrize(
    "error, message",
    [
        ("RepositoryNotFoundError", "There is no such model.*also known: embedded"),
        ("GatedRepoError", "accept its licence"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "no connection"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(monkeypatch, error, message):
    kind = getattr(errors, error)

    def refuse(*_, **__):
        raise kind.__new__(kind, "refused")  # their constructors want a whole HTTP response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(OSError, match=f"cannot load owner/model .*{message}"):
        load("owner/model", revision="v2")
    if message != "accept its licence" and message != "no such revision":
        with pytest.raises(OSError, match="did you mean embedded"):
            load("embeded")


def test_without_a_network_the_error_says_so():
    with pytest.raises(OSError, match="no-one/no-such-model from the Hugging Face hub: .* no conn"):
        load("no-one/no-such-model")  # the tests run with HF_HUB_OFFLINE=1


LIGHT = """
import sys
from specjax.models.lm import load
lm = load(sys.argv[1])
assert lm.tokenizer.decode(lm.tokenizer.encode("def f(x):")) == "def f(x):"
heavy = {"transformers", "orbax", "torch", "tensorflow", "grain", "qwix"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("name", [*EMBEDDED, "folder"])
def test_a_plain_tokenizer_needs_neither_transformers_nor_orbax(name, folder):
    source = str(folder) if name == "folder" else name
    subprocess.run([sys.executable, "-c", LIGHT, source], check=True, timeout=60)


# Which drafter may serve which target.


@pytest.mark.parametrize("sizes, temperature", [((320, 512), 1.0), ((512, 320), 0.0)])
def test_a_drafter_of_other_padding_drafts_for_its_target(sizes, temperature):
    """Qwen2.5: 151,665 tokens in 151,936 rows (0.5B) and in 152,064 (7B)."""
    target, draft = (language_model(size, byte_tokenizer()) for size in sizes)
    model = as_drafter(target, draft)
    assert model.vocab_size == target.target.vocab_size
    assert as_drafter(target, target).vocab_size == sizes[0]
    weights = {
        name: random_params(lm.config, seed)
        for seed, (name, lm) in enumerate({"target": target, "drafter": draft}.items())
    }
    tokens, key = np.asarray([[5, 300, 7, 8]]), jax.random.key(0)

    def decoded(drafter):
        settings = dict(key=key, max_new_tokens=12, sampling=Sampling(temperature=temperature))
        out = decode(target.target, drafter, weights, tokens, np.asarray([4]), **settings)
        return np.asarray(out.tokens)[:, :16]

    drafted = decoded(DraftModel(num_draft=3, model=model))
    assert drafted.max() < sizes[0]
    if temperature == 0:
        np.testing.assert_array_equal(drafted, decoded(Plain()))


def test_rows_that_a_drafter_lacks_are_never_drawn_and_others_keep_their_law():
    lm = language_model(320)
    params = random_params(lm.config)
    draft = Draft(start=np.zeros(1, np.int32), tokens=np.asarray([[5]]), topology=(-1,))

    def law(rows):
        model = dataclasses.replace(lm.target, rows=rows)
        scores = jax.jit(lambda: model.verify(params, model.init(params, 1, 8), draft))()
        return np.asarray(jax.nn.softmax(scores.logits))[0, 0]

    np.testing.assert_array_equal(law(400)[320:], 0)
    np.testing.assert_allclose(law(400)[:320], law(None), rtol=1e-6)
    np.testing.assert_allclose(law(300), law(None)[:300] / law(None)[:300].sum(), rtol=1e-5)


def test_added_tokens_of_only_one_side_do_no_harm():
    chat, base = byte_tokenizer("<|user|>", "<|tool|>"), byte_tokenizer()
    check_same_tokenizer(language_model(320, chat), language_model(320, base))
    check_same_tokenizer(language_model(320, base), language_model(320, chat))


@pytest.mark.parametrize(
    "other, message",
    [
        (byte_tokenizer(end="<eos>"), "1 token ids differ .*id 0: '<|endoftext|>' / '<eos>'"),
        (byte_tokenizer(size=200), "57 token ids differ .*id 200: .* / None"),
        (byte_tokenizer("<b>"), "1 token ids differ .*id 257: '<a>' / '<b>'"),
    ],
    ids=["an id means another token", "a smaller vocabulary", "other added tokens"],
)
def test_another_vocabulary_is_refused_with_the_tokens_that_differ(other, message):
    target = language_model(320, byte_tokenizer("<a>"), "big")
    with pytest.raises(ValueError, match="small has another tokenizer.*big") as error:
        check_same_tokenizer(target, language_model(300, other, "small"))
    assert re.search(message.replace("|", r"\|"), str(error.value))
    assert "258 tokens in 320 rows" in str(error.value)


def test_without_tokenizers_only_equal_sizes_are_believed():
    check_same_tokenizer(language_model(320), language_model(320))
    with pytest.raises(ValueError, match="vocabulary of 300.* of 320"):
        check_same_tokenizer(language_model(320), language_model(300, byte_tokenizer()))


def test_a_drafter_s_folder_without_a_tokenizer_has_its_target_s_if_it_reads_as_many(
    folder, tmp_path
):
    lm, draft = load(folder), tmp_path / "draft"
    save_pretrained(random_model(SMALL, 1), draft)
    assert not (draft / "tokenizer.json").exists()
    assert named(lm, draft).tokenizer is not None
    as_drafter(lm, named(lm, draft))
    save_pretrained(random_model(dataclasses.replace(SMALL, vocab_size=300), 1), draft)
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        named(lm, draft)
