"""Text to token ids and back, with one small interface for all tokenizers.

A tokenizer that ``tokenizer.json`` describes completely is read by the light library
``tokenizers``. Tokenizers with a class of their own, a chat template or tokens that other files add
are read by transformers, whose import is slow.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from .files import holdings, read_json, write_json


@runtime_checkable
class TokenizerLike(Protocol):
    """The members that a tokenizer of your own must have; its class does not matter.

    Example::

        class Bytes:
            eos_ids = (0,)

            def encode(self, text):
                return list(text.encode())

            def decode(self, ids):
                return bytes(ids).decode(errors="replace")

    Attributes:
      eos_ids: the ids that end a text; empty where there are none.
    """

    eos_ids: Sequence[int]

    def encode(self, text: str) -> Sequence[int]:
        """Returns the token ids of ``text``."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ``ids``; incomplete characters become U+FFFD."""
        ...


class Tokenizer(abc.ABC):
    """A tokenizer as the library uses it; ``wrap_tokenizer`` makes one of a ``TokenizerLike``.

    Attributes:
      eos_ids: the ids that end a text.
      has_template: whether ``chat`` can be called.
      roles: ids of special tokens by what they are for (``bos_token``, ``pad_token``, ...), as far
        as the tokenizer says.
    """

    eos_ids: tuple[int, ...]
    has_template = False
    roles: Mapping[str, int] = MappingProxyType({})

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``, with the special tokens that the tokenizer itself adds."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` without special tokens, ``eos_ids`` among them; incomplete characters
        become U+FFFD."""

    @abc.abstractmethod
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a conversation, up to where the assistant's answer begins.

        Args:
          messages: ``[{"role": "user", "content": "..."}, ...]``.

        Raises:
          ValueError: the tokenizer has no chat template, or it refuses the messages.
        """

    @abc.abstractmethod
    def save_pretrained(self, folder: str | os.PathLike) -> None:
        """Writes the files from which ``load_tokenizer`` makes it again."""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """Id -> token as the vocabulary spells it, added tokens included."""

    @property
    @abc.abstractmethod
    def added(self) -> frozenset[int]:
        """Ids of the tokens that were added to a finished vocabulary (special tokens)."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model may have more rows than this, as padding."""
        return max(self.vocabulary) + 1

    @functools.cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """Id -> the bytes that a token stands for; added tokens have none and are left out.

        Raises:
          ValueError: the vocabulary spells bytes neither as GPT-2's does (one letter a byte) nor
            as SentencePiece's (``▁`` for a space, ``<0x0A>`` for a byte).
        """
        words = {i: word for i, word in self.vocabulary.items() if i not in self.added}
        if any("▁" in word or word == "<0x0A>" for word in words.values()):
            return {i: _sentencepiece_bytes(word) for i, word in words.items()}
        letters = _byte_letters()
        spelled = all(letter in letters for word in words.values() for letter in word)
        if not (spelled and self._joins(words)):
            raise ValueError(
                "this tokenizer's vocabulary does not say which bytes its tokens stand for; a "
                "grammar over bytes, and a drafter with another vocabulary, need a byte-level or a "
                "SentencePiece tokenizer"
            )
        return {i: bytes(letters[letter] for letter in word) for i, word in words.items()}

    def _joins(self, words: Mapping[int, str]) -> bool:
        """Whether two words stand in a text as they are spelled, with nothing between them, which
        is not so where tokens are whole words (WordLevel) or continue them (WordPiece)."""
        if any("Ġ" in word for word in words.values()):  # GPT-2's letter for a space
            return True
        plain = [i for i in sorted(words) if words[i].isascii() and words[i].isalpha()]
        plain = [i for i in plain if i not in self.eos_ids and i not in self.roles.values()][:2]
        return not plain or self.decode(plain) == "".join(words[i] for i in plain)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal where every id names the same token."""
        listing = json.dumps(sorted(self.vocabulary.items()))
        return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _sentencepiece_bytes(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The letters by which GPT-2's vocabulary spells bytes.

    Printable bytes are spelled as themselves, the others by letters from U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class OwnTokenizer(Tokenizer):
    """A ``TokenizerLike`` object, for a model of ``vocab_size`` logits."""

    def __init__(self, backend: TokenizerLike, eos_ids: Iterable[int], vocab_size: int | None):
        self.backend, self.eos_ids = backend, tuple(eos_ids) or tuple(backend.eos_ids)
        self._rows = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.backend.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids if i not in self.eos_ids])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError(_NO_TEMPLATE)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        raise ValueError(
            f"{type(self.backend).__name__} is a tokenizer of your own, which cannot be saved: "
            "save the model without it (tokenizer=False)"
        )

    @functools.cached_property
    def vocabulary(self) -> dict[int, str]:
        """Id -> the text that the id alone decodes to, for each id that does."""
        if self._rows is None:
            raise ValueError("the size of the vocabulary is not known: give vocab_size")
        listed = {}
        for i in range(self._rows):
            try:
                listed[i] = self.backend.decode([i])
            except (LookupError, ValueError):  # a row of the model that is no token
                continue
        return listed

    @property
    def added(self) -> frozenset[int]:
        return frozenset(self.eos_ids)


class FileTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer``, as ``tokenizer.json`` describes it completely."""

    def __init__(self, backend, eos_ids: Iterable[int] = (), roles: Mapping[str, int] = {}):
        """``roles``: ids that are no text, by what they are for; ``eos_ids`` and what ``backend``
        itself marks as special are none either."""
        # texts are read whole, as transformers reads them
        if backend.truncation or backend.padding:
            try:
                backend = type(backend).from_str(backend.to_str())
            except Exception as error:  # the library raises bare Exception
                raise ValueError(
                    f"tokenizer: it cuts or pads texts, and cannot be copied ({error}): call its "
                    "no_truncation() and no_padding() first"
                ) from None
            backend.no_truncation()
            backend.no_padding()
        self.backend, self.eos_ids, self.roles = backend, tuple(eos_ids), dict(roles)
        self._hidden = frozenset([*self.eos_ids, *roles.values()])

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        shown = [int(i) for i in ids if int(i) not in self._hidden]
        return self.backend.decode(shown, skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError(_NO_TEMPLATE)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        self.backend.save(str(Path(folder) / "tokenizer.json"))
        config = {"tokenizer_class": _GENERIC[0], "clean_up_tokenization_spaces": False}
        config |= {role: self.backend.id_to_token(i) for role, i in self.roles.items()}
        if self.eos_ids:
            config["eos_token"] = self.backend.id_to_token(self.eos_ids[0])
        write_json(Path(folder) / _CONFIG, config)

    @functools.cached_property
    def vocabulary(self) -> dict[int, str]:
        return {i: token for token, i in self.backend.get_vocab().items()}

    @property
    def added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())


class TransformersTokenizer(Tokenizer):
    """A tokenizer of transformers, fast or slow, with its chat template."""

    def __init__(self, backend, eos_ids: Iterable[int] = ()):
        eos = () if backend.eos_token_id is None else (backend.eos_token_id,)
        self.backend, self.eos_ids = backend, tuple(eos_ids) or eos
        ids = {role: getattr(backend, f"{role}_id", None) for role in _ROLES}
        self.roles = {role: i for role, i in ids.items() if i is not None}

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        shown = [int(i) for i in ids if int(i) not in self.eos_ids]
        return self.backend.decode(
            shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self.has_template:
            raise ValueError(_NO_TEMPLATE)
        from jinja2 import TemplateError

        try:
            ids = self.backend.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:  # such as a system's message where there is no place for it
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return list(ids)

    @property
    def has_template(self) -> bool:
        return bool(self.backend.chat_template)

    def save_pretrained(self, folder: str | os.PathLike) -> None:
        self.backend.save_pretrained(folder)

    @functools.cached_property
    def vocabulary(self) -> dict[int, str]:
        return {i: token for token, i in self.backend.get_vocab().items()}

    @property
    def added(self) -> frozenset[int]:
        return frozenset(self.backend.added_tokens_decoder)


_NO_TEMPLATE = (
    "this tokenizer has no chat template: use an instruction-tuned checkpoint, or write the "
    "prompt as plain text"
)
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that add nothing
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_ADDED = "added_tokens.json"  # of older programs: token -> id
_FILES = ("tokenizer.json", _CONFIG, "tokenizer.model", "vocab.json")  # one of them is enough
_ACCEPTED = (
    "a tokenizers.Tokenizer, a tokenizer of transformers, or an object with encode, decode and "
    "eos_ids (see specjax.models.TokenizerLike)"
)


def load_tokenizer(folder: str | os.PathLike, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """Reads the tokenizer of a model's folder.

    Args:
      eos_ids: the ids that end a text; default: the one that the tokenizer names.

    Raises:
      FileNotFoundError: the folder has no tokenizer.
      ValueError: its files cannot be read.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    config = read_json(folder, _CONFIG) if (folder / _CONFIG).is_file() else {}
    if file.is_file() and _says_everything(folder, config):
        light = _read_light(file, config, eos_ids)
        known = {token.content for token in light.backend.get_added_tokens_decoder().values()}
        if known.issuperset(_further_tokens(folder, config)):
            return light
    if not holds_tokenizer(folder):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: neither {' nor '.join(_FILES)} "
            f"({holdings(folder)}); pass tokenizer=<folder or "
            "tokenizer>, or tokenizer=False to work with token ids alone"
        )
    from transformers import AutoTokenizer

    try:
        return TransformersTokenizer(AutoTokenizer.from_pretrained(str(folder)), eos_ids)
    except Exception as error:  # the readers of transformers raise many types for a broken file
        raise ValueError(f"transformers cannot read the tokenizer in {folder}: {error}") from error


def holds_tokenizer(folder: str | os.PathLike) -> bool:
    """Whether a folder has a tokenizer, of whatever kind."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def _says_everything(folder: Path, config: Mapping[str, object]) -> bool:
    """Whether ``tokenizer.json`` alone defines the tokenizer of a folder."""
    templates = "chat_template" in config or (folder / _TEMPLATE).is_file()
    return config.get("tokenizer_class", _GENERIC[0]) in _GENERIC and not templates


def _further_tokens(folder: Path, config: Mapping[str, object]) -> list[str]:
    """The tokens that other files add, or say to be special; ``tokenizer.json`` mostly has them."""
    added = read_json(folder, _ADDED) if (folder / _ADDED).is_file() else {}
    listed = config.get("added_tokens_decoder")
    tokens = [*added, *(listed.values() if isinstance(listed, Mapping) else ())]
    special = config.get("additional_special_tokens")
    tokens += special if isinstance(special, list) else []
    tokens = [token.get("content") if isinstance(token, Mapping) else token for token in tokens]
    return [token for token in tokens if isinstance(token, str)]


def _read_light(file: Path, config: Mapping[str, object], eos_ids: Iterable[int]) -> FileTokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    named = {}  # ids of special tokens, by what the config calls them
    for name, token in config.items():
        if isinstance(token, Mapping):  # as transformers writes an added token
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str):
            named[name] = backend.token_to_id(token)
    named = {name: i for name, i in named.items() if i is not None}
    eos = [named["eos_token"]] if "eos_token" in named else []
    return FileTokenizer(backend, tuple(eos_ids) or tuple(eos), named)


def wrap_tokenizer(
    backend: object, eos_ids: Iterable[int] = (), vocab_size: int | None = None
) -> Tokenizer:
    """Makes a ``Tokenizer`` from any tokenizer that a user may pass.

    Args:
      backend: a ``Tokenizer``, a tokenizer of the library tokenizers or transformers, or an
        object as ``TokenizerLike`` describes it.
      eos_ids: the ids that end a text; default: those that ``backend`` names.
      vocab_size: the model's, for a ``TokenizerLike``.

    Raises:
      TypeError: ``backend`` is something else.
    """
    if isinstance(backend, Tokenizer):
        return backend
    if hasattr(backend, "apply_chat_template"):
        return TransformersTokenizer(backend, eos_ids)
    if hasattr(backend, "get_added_tokens_decoder"):
        return FileTokenizer(backend, eos_ids)
    if isinstance(backend, TokenizerLike):
        return OwnTokenizer(backend, eos_ids, vocab_size)
    raise TypeError(f"tokenizer={backend!r}: expected {_ACCEPTED}")
