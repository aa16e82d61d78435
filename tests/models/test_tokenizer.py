"""Text to ids and back, and text that is printed while it comes."""

import json
import random

import pytest
from checkpoints import byte_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from specjax.models.stream_decoder import StreamDecoder
from specjax.models.tokenizer import (
    FileTokenizer,
    TransformersTokenizer,
    load_tokenizer,
    wrap_tokenizer,
)

TEXT = 'print("naïve 日本語 🎉", €)\n'
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return FileTokenizer(byte_tokenizer("<|tool|>"), eos_ids=(0,))


@pytest.fixture
def transformers_folder(tmp_path):
    """A tokenizer with a chat template, as transformers writes one."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def sentencepiece_like():
    """Words with a leading ``▁`` that vanishes at the start of a text, as in Llama 2; and bytes."""
    words = ["<unk>", "▁Hello", "▁world", "!"] + [f"<0x{i:02X}>" for i in range(256)]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>"])
    return FileTokenizer(backend)


def test_text_survives_the_way_to_ids_and_back(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.vocab_size == 258


def test_special_tokens_are_not_text(tokenizer):
    ids = [*tokenizer.encode("a"), 257, 0]
    assert tokenizer.vocabulary[257] == "<|tool|>"
    assert tokenizer.added == {0, 257}
    assert tokenizer.decode(ids) == "a"


def test_ids_of_padded_rows_decode_to_nothing(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("a"), 300]) == "a"


def test_the_fingerprint_is_that_of_the_vocabulary(tokenizer):
    same = FileTokenizer(byte_tokenizer("<|tool|>"), eos_ids=(7,))
    assert same.fingerprint == tokenizer.fingerprint
    assert FileTokenizer(byte_tokenizer("<|call|>")).fingerprint != tokenizer.fingerprint
    assert FileTokenizer(byte_tokenizer()).fingerprint != tokenizer.fingerprint


def test_both_libraries_agree_on_one_file(transformers_folder, tmp_path):
    theirs = load_tokenizer(transformers_folder)
    assert isinstance(theirs, TransformersTokenizer)
    light = FileTokenizer(byte_tokenizer(), eos_ids=(0,))
    light.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, FileTokenizer)
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert ours.decode(ours.encode(TEXT)) == theirs.decode(theirs.encode(TEXT)) == TEXT
    assert ours.fingerprint == theirs.fingerprint
    assert ours.eos_ids == theirs.eos_ids == (0,)
    assert ours.added == theirs.added


@pytest.mark.parametrize("where", ["added_tokens_decoder", "additional_special_tokens", "file"])
def test_tokens_that_other_files_add_are_tokens(where, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), FileTokenizer)
    new = tokenizer.vocab_size
    config = tmp_path / "tokenizer_config.json"
    said = json.loads(config.read_text())
    if where == "file":
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": new}))
    elif where == "added_tokens_decoder":
        said[where] = {str(new): {"content": "<new>", "special": True}}
    else:
        said[where] = ["<new>"]
    config.write_text(json.dumps(said))
    found = load_tokenizer(tmp_path)
    assert found.encode("x <new>") == [*tokenizer.encode("x "), new]
    assert new in found.added


def test_a_saved_tokenizer_is_the_same_again(transformers_folder, tokenizer, tmp_path):
    for one in (load_tokenizer(transformers_folder), tokenizer):
        folder = tmp_path / type(one).__name__
        folder.mkdir()
        one.save_pretrained(folder)
        again = load_tokenizer(folder)
        assert type(again) is type(one)
        assert again.fingerprint == one.fingerprint
        assert again.eos_ids == one.eos_ids


def test_what_ids_are_for_is_saved(tmp_path):
    """Tokens that the file itself does not mark as special."""
    one = FileTokenizer(byte_tokenizer(), (0,), {"eos_token": 0, "pad_token": 65, "bos_token": 66})
    one.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.roles == one.roles and again.decode([66, 67, 65]) == one.decode([67])


def test_texts_are_read_whole_whatever_a_file_says_of_cutting_and_padding(tokenizer, tmp_path):
    for name, settings in (("enable_truncation", (4,)), ("enable_padding", ())):
        backend = byte_tokenizer("<|tool|>")
        getattr(backend, name)(*settings, **({} if settings else {"length": 80}))
        backend.save(str(tmp_path / "tokenizer.json"))
        for one in (load_tokenizer(tmp_path), wrap_tokenizer(backend)):
            assert one.encode(TEXT) == tokenizer.encode(TEXT)
        assert len(backend.encode(TEXT).ids) in (4, 80)  # that of the user is as it was


@pytest.mark.parametrize(
    "model",
    [
        models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2, "world": 3}, unk_token="[UNK]"),
        models.WordLevel({"[UNK]": 0, "he": 1, "world": 2}, unk_token="[UNK]"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_tokens_that_are_words_have_no_bytes(model, tokenizer):
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]"])
    with pytest.raises(ValueError, match="does not say which bytes its tokens stand for"):
        wrap_tokenizer(backend).token_bytes  # noqa: B018
    assert b"".join(tokenizer.token_bytes[i] for i in tokenizer.encode(TEXT)) == TEXT.encode()


def test_transformers_reads_what_the_light_tokenizer_writes(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT) == tokenizer.encode(TEXT)
    assert theirs.eos_token_id == 0


def test_a_conversation_becomes_the_ids_of_its_template(transformers_folder):
    tokenizer = load_tokenizer(transformers_folder)
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "user: Hi\nassistant:"


def test_a_tokenizer_without_a_chat_template_says_so(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    for one in (tokenizer, wrap_tokenizer(plain)):
        with pytest.raises(ValueError, match="no chat template"):
            one.chat([{"role": "user", "content": "Hi"}])


def test_eos_ids_of_the_model_take_precedence_over_the_tokenizers(transformers_folder):
    assert load_tokenizer(transformers_folder, eos_ids=(5, 6)).eos_ids == (5, 6)


def test_a_folder_without_a_tokenizer_says_what_it_holds_and_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no tokenizer.*config.json.*tokenizer=False"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_file_is_named(file, transformers_folder):
    (transformers_folder / file).write_text("{ half a fi")
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(transformers_folder)


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(TypeError, match="tokenizer=3: expected a tokenizers.Tokenizer"):
        wrap_tokenizer(3)


# Streaming.


def pieces(stream, ids, sizes):
    shown, at = [], 0
    while at < len(ids):
        size = next(sizes)
        shown.append(stream.push(ids[at : at + size]))
        at += size
    return [*shown, stream.flush()]


@pytest.mark.parametrize("seed", range(5))
def test_streamed_pieces_join_to_the_whole_text_of_any_bytes(tokenizer, seed):
    """Random tokens: invalid UTF-8 everywhere, special tokens between."""
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(300)]
    sizes = iter(lambda: rng.randrange(4), None)
    assert "".join(pieces(StreamDecoder(tokenizer), ids, sizes)) == tokenizer.decode(ids)


def test_no_piece_holds_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    shown = pieces(StreamDecoder(tokenizer), ids, iter(lambda: 1, None))
    assert "".join(shown) == TEXT
    assert all("\ufffd" not in piece for piece in shown)
    assert all(len(piece) <= 1 for piece in shown)  # and each comes with its last byte
    assert shown[-1] == ""


def test_a_character_that_never_ends_is_shown_at_the_end(tokenizer):
    stream = StreamDecoder(tokenizer)
    half = tokenizer.encode("a€")[:-1]
    assert stream.push(half) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("b")) == "b"


def test_spaces_that_a_tokenizer_drops_at_the_start_of_a_text_stay_within_it():
    tokenizer = sentencepiece_like()
    stream = StreamDecoder(tokenizer)
    assert [stream.push([i]) for i in (1, 2, 2, 3)] == ["Hello", " world", " world", "!"]
    assert [stream.push([i]) for i in (0, 2)] == ["", " world"]  # 0: a special token
    assert StreamDecoder(tokenizer, context=[1]).push([2]) == " world"
    assert StreamDecoder(tokenizer).push([2]) == "world"


def test_bytes_of_a_fallback_tokenizer_wait_for_their_character():
    stream = StreamDecoder(sentencepiece_like())
    euro = [4 + byte for byte in "€".encode()]
    assert [stream.push([i]) for i in [1, *euro, 2]] == ["Hello", "", "", "€", " world"]


def test_a_character_that_began_in_the_prompt_hides_no_other():
    one = sentencepiece_like()
    byte = {b: one.backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    begun, rest = [byte[226], byte[130]], [byte[172], byte[120], byte[121]]
    for pieces in ([rest], [[i] for i in rest]):
        stream = StreamDecoder(one, begun)
        assert "".join([*map(stream.push, pieces), stream.flush()]) == "€xy"
    stream = StreamDecoder(one, begun)
    pieces = [byte[172], byte[226]], [byte[130]], [byte[172]]
    assert [stream.push(piece) for piece in pieces] == ["", "", "€€"]
    assert StreamDecoder(one, begun).flush() == ""
    stream = StreamDecoder(one, [byte[b] for b in "😀😀".encode()[:-1]])
    assert stream.push([byte[128], *[byte[120]] * 9]) + stream.flush() == "😀" + "x" * 9


def test_what_a_token_of_the_prompt_holds_before_a_character_is_not_shown_again():
    class Pieces:
        def decode(self, ids):
            pieces = b"x", " “".encode()[:-1], "“".encode()[-1:]
            return b"".join(pieces[i] for i in ids).decode(errors="replace")

    stream = StreamDecoder(Pieces(), [0, 1])
    assert stream.push([2]) + stream.push([0]) + stream.flush() == "“x"


def test_a_push_costs_the_same_at_any_length(tokenizer):
    class Counting(FileTokenizer):
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    counting = Counting(tokenizer.backend)
    stream = StreamDecoder(counting, context=tokenizer.encode(TEXT * 50))
    for i in tokenizer.encode(TEXT * 20):
        stream.push([i])
    assert counting.longest <= 20
