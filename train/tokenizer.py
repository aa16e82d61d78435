"""Recipe ``tokenizer``: a byte-level BPE for code, trained on the training files only.

Pre-tokenization: words and punctuation have one leading space, as in GPT-2, so that ``self`` is one
entry wherever it stands. Each digit is a piece, and so are newlines and indentation, so that a
prompt may end after a colon or after a newline without cutting a token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from . import corpora, outlook
from .config import ConfigError, DataConfig, RunConfig

GENERATION = "generation_config.json"  # names all tokens that end a text or a turn
# the files beside a tokenizer.json that say how it is used
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
FILES = ("tokenizer.json", *SETTINGS, GENERATION)  # that are downloaded of a model on the hub
END_OF_TEXT = "<|endoftext|>"  # begins a document and ends it; id 0
BYTES = 256  # entries before any merge, besides the special token
TOGETHER = 256  # texts that are tokenized at once
SAMPLE = 16  # a dry run trains on every sixteenth text
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer to train."""

    vocab_size: int = 2048  # a multiple of 64, the special token included
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig(folder="runs/tokenizer")


Config = TokenizerConfig


def train(texts, vocab_size: int):
    """Trains a byte-level BPE on an iterable of strings; returns a ``tokenizers.Tokenizer``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size % 64 or vocab_size < 320:
        raise ConfigError(f"vocab_size={vocab_size}; accepted: a multiple of 64, at least 320")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer, folder: Path, end: str = END_OF_TEXT, source: str = "") -> None:
    """Writes ``tokenizer.json`` and the ``tokenizer_config.json`` that transformers looks for.

    Args:
      tokenizer: the tokenizer.
      folder: the folder to write to.
      end: the token that begins a text and ends it, unless ``source`` says it.
      source: where the tokenizer was loaded from, see ``load``; its settings and its chat template
        are written too. Empty: it has none.
    """
    own = _file(source).parent if source else None
    kept = {n: (own / n).read_bytes() for n in SETTINGS if own and (own / n).is_file()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {SETTINGS[0]: (json.dumps(settings, indent=2) + "\n").encode()} | kept
    for name, content in kept.items():
        (folder / name).write_bytes(content)


def load(name: str):
    """Loads a ``tokenizers.Tokenizer``, which neither cuts nor pads texts, whatever its file says.

    ``name`` is a model as ``specjax.load`` takes it (``"embedded"``, a folder, a hub name), or the
    path of a ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(_file(name)))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _file(name: str) -> Path:
    """Returns the ``tokenizer.json`` of ``data.tokenizer``; it may be downloaded from the hub."""
    from specjax.models.model_folder import folder_of

    path = Path(name)
    if path.suffix != ".json":
        try:
            path = folder_of(name, None, FILES) / "tokenizer.json"
        except OSError as error:
            raise ConfigError(f"data.tokenizer={name!r}: {error}") from error
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer={name!r}: there is no {path}; accepted: a tokenizer.json, or a model "
            "that has one (AutoTokenizer of transformers writes it: save_pretrained)"
        )
    return path


def load_chat(name: str, argument: str = "data.tokenizer"):
    """Loads a ``specjax.models.tokenizer.Tokenizer`` with a chat template.

    All tokens that end a turn are its ``eos_ids``: its ``eos_token`` may be another one, and then
    those of ``generation_config.json`` say it.
    """
    from specjax.models.files import read_json
    from specjax.models.tokenizer import load_tokenizer

    folder = _file(name).parent
    found = load_tokenizer(folder)
    if (folder / GENERATION).is_file():
        ends = read_json(folder, GENERATION).get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        found.eos_ids = (*found.eos_ids, *ends)
    if not found.has_template:
        raise ConfigError(
            f"{argument}={name!r} has no chat template, and data.corpus holds conversations: "
            "give an instruction-tuned model, or put a chat_template.jinja beside its tokenizer"
        )
    return found


def end_of_text(name: str, tokenizer, wanted: str = "") -> int:
    """Returns the id of the token between documents.

    It is the token ``wanted``, else ``<|endoftext|>``, else the ``eos_token`` of the file
    ``tokenizer_config.json`` beside the tokenizer.
    """
    found = tokenizer.token_to_id(wanted or END_OF_TEXT)
    if wanted and found is None:
        raise ConfigError(
            f"data.end_of_text={wanted!r} is no token of data.tokenizer={name!r}: give one of "
            f"{', '.join(t.content for t in tokenizer.get_added_tokens_decoder().values())}"
        )
    settings = _file(name).parent / "tokenizer_config.json"
    if found is None and settings.is_file():
        token = json.loads(settings.read_text("utf-8")).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        found = None if token is None else tokenizer.token_to_id(token)
    if found is None:
        raise ConfigError(
            f"data.tokenizer={name!r} has nothing to part documents with: neither {END_OF_TEXT} "
            f"nor an eos_token in {settings}, where you can name one of its tokens"
        )
    return found


def fingerprint(tokenizer) -> str:
    """Returns the SHA-256 of a tokenizer's behaviour, whatever the layout of its file."""
    return hashlib.sha256(tokenizer.to_str(pretty=False).encode()).hexdigest()


def encoded(tokenizer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yields the tokens of each text, int32; few at a time, since encodings take much memory."""
    for start in range(0, len(texts), TOGETHER):
        for encoding in tokenizer.encode_batch(texts[start : start + TOGETHER]):
            yield np.asarray(encoding.ids, np.int32)


def byte_sizes(tokenizer) -> np.ndarray | None:
    """Returns the number of bytes of each token, int32 ``[V]``, with 0 for special tokens.

    The result is None unless the tokenizer is a byte-level one, whose tokens spell each byte as one
    character.
    """
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    special = tokenizer.get_added_tokens_decoder()
    for token, number in tokenizer.get_vocab().items():
        sizes[number] = 0 if number in special else len(token)
    return sizes


def run(config: TokenizerConfig, *, dry_run: bool = False) -> None:
    """Trains the tokenizer and prints the bytes per token in each split."""
    splits = {}
    for split in ("train", "heldout"):
        splits[split] = [text for _, text in corpora.texts(config.data, split)]
    for split, texts in splits.items():
        print(f"{split}: {len(texts)} documents, {sum(len(t.encode()) for t in texts):,} bytes")
    if dry_run:
        texts = splits["train"]
        some = texts[::SAMPLE]
        sizes = [sum(len(text.encode()) for text in part) for part in (texts, some)]
        seconds = outlook.seconds_of(lambda: bool(train(some, config.vocab_size)), times=1)
        return outlook.show(
            model=f"byte-level BPE, {config.vocab_size:,} tokens",
            shapes=f"{len(texts):,} texts",
            parameters=f"{config.vocab_size - BYTES - 1:,} merges",
            memory={"texts": sizes[0]},
            steps="1 pass over the texts",
            seconds=seconds * sizes[0] / sizes[1],
        )
    tokenizer = train(splits["train"], config.vocab_size)
    save(tokenizer, Path(config.run.folder))
    for split, texts in splits.items():
        tokens = sum(len(ids) for ids in encoded(tokenizer, texts))
        size = sum(len(text.encode()) for text in texts)
        print(f"{split}: {tokens:,} tokens, {size / tokens:.3f} bytes a token")
    print(f"wrote {config.run.folder}/tokenizer.json ({fingerprint(tokenizer)[:12]})")
