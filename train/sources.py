"""Where documents come from: plain text, JSON lines, chats, data sets of the Hugging Face hub.

    data.corpus = "folder"                        # all that it holds of the following
    data.corpus = "notes.txt"                     # plain text (.py as well)
    data.corpus = "texts.jsonl"                   # {"text": "..."} a line
    data.corpus = "chats.jsonl"                   # {"messages": [{"role", "content"}, ...]} or
                                                  # {"conversations": [{"from", "value"}, ...]}
    data.corpus = "chats.json"                    # a list of such objects
    data.corpus = "hf:owner/name:train:messages"  # split and column may be left out

A document is a text or a conversation, see ``conversations``. What cannot be read is left out and
reported; where that is more than ``data.broken_share`` of a file, nothing is trained.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from specjax.serving import jsonl_input

from . import conversations
from .config import ConfigError

TEXTS, RECORDS, HUB = (".txt", ".py"), (".jsonl", ".json"), "hf:"
HELDOUT_PER_MILLE = 40
FIELDS = ("messages", "conversations", "text")  # of a record, the first that it has

Document = tuple[str, str | list[dict]]  # its name; a text, or a conversation's messages


def split_of(name: str) -> str:
    """``"heldout"`` for about 4 % of the names, ``"train"`` for the others."""
    number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    return "heldout" if number % 1000 < HELDOUT_PER_MILLE else "train"


def read(corpus: str, split: str, broken_share: float) -> list[Document]:
    """The documents of a split: a text is one a file, else a line or an entry is one.

    Of a folder, held out is what lies in its subfolder ``heldout``. Without one, and of a data set,
    about 4 % of the documents, by their names; of a text that is alone, its last lines.

    Raises:
      ConfigError: there is nothing of the kind, or too much of it is broken.
    """
    if corpus.startswith(HUB):
        return _of_split(_hub(corpus, broken_share), split)
    root = Path(corpus)
    if root.is_file():
        if root.suffix not in RECORDS:
            try:
                return [(root.name, _part(_text(root), split))]
            except ValueError as error:
                raise ConfigError(f"data.corpus={corpus!r}: {error}") from None
        return _of_split(_records(root, root.name, broken_share), split)
    files = sorted(file for file in root.rglob("*") if file.suffix in (*TEXTS, *RECORDS))
    if not files:
        raise ConfigError(
            f"data.corpus={corpus!r} is neither 'stdlib' nor 'packages', nor a file, nor a folder "
            f"with {', '.join((*TEXTS, *RECORDS))} files, nor of the form {HUB}owner/name"
        )
    found, broken = [], []
    apart = (root / "heldout").is_dir()
    for file in files:
        name = file.relative_to(root).as_posix()
        if apart and name.startswith("heldout/") != (split == "heldout"):
            continue
        if file.suffix in RECORDS:
            found += _records(file, name, broken_share)
            continue
        try:
            found.append((name, _text(file)))
        except ValueError as error:
            broken.append(f"{name}: {error}")
    judge(corpus, broken, len(found) + len(broken), broken_share)
    return found if apart else _of_split(found, split)


def _of_split(documents: list[Document], split: str) -> list[Document]:
    return [document for document in documents if split_of(document[0]) == split]


def _text(file: Path) -> str:
    """The text of a file; bytes that are not UTF-8 are replaced. Raises ValueError for a binary
    file: one with a zero byte, or of which more than a tenth is not UTF-8."""
    data = file.read_bytes()
    text = data.decode("utf-8", errors="replace")
    if b"\0" in data or 10 * text.count("\ufffd") > len(text):
        raise ValueError(
            "it is a binary file or not in UTF-8: give plain text in UTF-8, or a file that ends in "
            + " or ".join(RECORDS)
        )
    return text


def _part(text: str, split: str) -> str:
    """The part of a lone text that belongs to a split, in whole lines."""
    cut = text.rfind("\n", 0, len(text) * (1000 - HELDOUT_PER_MILLE) // 1000) + 1
    return text[:cut] if split == "train" else text[cut:]


def _records(file: Path, name: str, broken_share: float) -> list[Document]:
    """The documents of a file of JSON lines, or of one that is a JSON list."""
    if file.suffix == ".jsonl":
        lines = file.read_bytes().removesuffix(b"\n").split(b"\n")
        return _checked(name, "line", lines, _parsed, broken_share)
    try:
        entries = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"data.corpus: {file} is no JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"data.corpus: {file} holds no list of objects; or name it .jsonl")
    return _checked(name, "entry", entries, lambda entry: entry, broken_share)


def _parsed(line: bytes):
    if not line.strip():
        raise ValueError("it is empty")
    return jsonl_input.parsed(line)


def _hub(corpus: str, broken_share: float) -> list[Document]:
    """The documents of ``hf:owner/name[:split[:column]]``."""
    name, split, column = (*corpus[len(HUB) :].split(":", 2), "", "")[:3]
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data.corpus={corpus!r} needs the library datasets: pip install 'specjax[datasets]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # whatever the library raises: no network, no such name or split
        raise ConfigError(f"data.corpus={corpus!r}: {error}") from error
    if column and column not in rows.column_names:
        raise ConfigError(
            f"data.corpus={corpus!r}: no column {column!r}; it has {', '.join(rows.column_names)}"
        )
    entries = (row[column] if column else row for row in rows)
    return _checked(name, "row", entries, lambda entry: entry, broken_share)


def _checked(
    name: str, unit: str, given: Iterable, parse: Callable, broken_share: float
) -> list[Document]:
    """The documents that can be read; says what cannot. ``unit``: what the source is made of."""
    found, broken = [], []
    for number, one in enumerate(given, start=1):
        try:
            found.append((f"{name}:{number}", record(parse(one))))
        except ValueError as error:
            broken.append(f"{unit} {number}: {error}")
        except RecursionError:
            broken.append(f"{unit} {number}: brackets are nested too deep")
    judge(name, broken, len(found) + len(broken), broken_share)
    return found


def judge(name: str, broken: list[str], total: int, broken_share: float) -> None:
    """Says how many of ``total`` documents are broken, and the first. Raises ConfigError where
    their share is above ``broken_share``."""
    if not broken:
        return
    told = f"{name}: {len(broken):,} of {total:,} cannot be used, the first is {broken[0]}"
    if len(broken) > broken_share * total:
        share = min(1.0, len(broken) / total + 0.00005)
        raise ConfigError(
            f"data.corpus: {told}. More than data.broken_share={broken_share:g} is too many: mend "
            f"them, or leave them out with data.broken_share={share:.4f}"
        )
    say_once(f"{told}; they are left out")


@functools.cache
def say_once(text: str) -> None:
    """Prints a line, however many splits of a file it comes up in."""
    print(text)


def record(value) -> str | list[dict]:
    """The document of a record: a text, a conversation, or an object that holds one in a field.

    Raises:
      ValueError: it is empty, has none of these fields, or is no conversation.
    """
    if isinstance(value, Mapping):
        held = [name for name in FIELDS if value.get(name) is not None]
        if not held:
            raise ValueError(f"it has none of the fields {', '.join(FIELDS)}")
        value = value[held[0]]
    if not isinstance(value, str):
        return conversations.checked(value)
    if not value.strip():
        raise ValueError("the text is empty")
    return value


def text_of(document: str | list[dict]) -> str:
    """A document as bare text, for who learns no roles: of a conversation, what was said."""
    if isinstance(document, str):
        return document
    return "\n".join(message["content"] for message in document)
