"""Reads documents from plain text, JSON lines, chats, and data sets of the Hugging Face hub.

    data.corpus = "folder"                        # all files of the following kinds in it
    data.corpus = "notes.txt"                     # plain text (.py as well)
    data.corpus = "texts.jsonl"                   # {"text": "..."} a line
    data.corpus = "chats.jsonl"                   # {"messages": [{"role", "content"}, ...]} or
                                                  # {"conversations": [{"from", "value"}, ...]}
    data.corpus = "chats.json"                    # a list of such objects
    data.corpus = "hf:owner/name:train:messages"  # split and column may be left out

A document is a text or a conversation, see ``conversations``. Documents that cannot be read are
left out and reported; if they are more than ``data.broken_share`` of a file, the run is refused.
"""

from __future__ import annotations

import codecs
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

Document = tuple[str, str | list[dict]]  # the name; a text, or the messages of a conversation


def split_of(name: str) -> str:
    """``"heldout"`` for about 4 % of the names, ``"train"`` for the others."""
    number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    return "heldout" if number % 1000 < HELDOUT_PER_MILLE else "train"


def read(corpus: str, split: str, broken_share: float) -> list[Document]:
    """Returns the documents of a split.

    A document is a file of text, a line of JSON lines, or an entry of a data set. Held out are the
    files in the subfolder ``heldout`` of a folder. Without such a subfolder, and in a data set,
    about 4 % of the documents are held out, by their names; of a single file of text, its last
    lines.

    Raises:
      ConfigError: there are no such documents, or too many of them cannot be read.
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
    kinds = (*TEXTS, *RECORDS)  # folders may be named so, too
    files = sorted(file for file in root.rglob("*") if file.suffix in kinds and file.is_file())
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
    """Reads the text of a file; bytes that are not UTF-8 are replaced.

    Raises:
      ValueError: the file is binary: it has a zero byte, or more than a tenth is not UTF-8.
    """
    data = file.read_bytes()
    text = data.decode("utf-8-sig", errors="replace")
    if b"\0" in data or 10 * text.count("\ufffd") > len(text):
        raise ValueError(
            "it is a binary file or not in UTF-8: give plain text in UTF-8, or a file that ends in "
            + " or ".join(RECORDS)
        )
    return text


def _part(text: str, split: str) -> str:
    """Returns the part of a single text that belongs to a split, in whole lines."""
    cut = text.rfind("\n", 0, len(text) * (1000 - HELDOUT_PER_MILLE) // 1000) + 1
    return text[:cut] if split == "train" else text[cut:]


def _records(file: Path, name: str, broken_share: float) -> list[Document]:
    """Reads the documents of a file of JSON lines, or of a file that holds a JSON list."""
    if file.suffix == ".jsonl":
        lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n")
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
    """Returns the documents that can be read, and reports the others.

    ``unit`` names the parts of the source, for the report.
    """
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
    """Prints how many of ``total`` documents are broken, and the first of them.

    Raises:
      ConfigError: their share is above ``broken_share``.
    """
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
    """Prints a line once, although several splits of a file may report it."""
    print(text)


def record(value) -> str | list[dict]:
    """Returns the document of a record: a text, a conversation, or an object with one in a field.

    Raises:
      ValueError: the record is empty, has none of the fields, or is not a conversation.
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
    """Returns a document as bare text without roles; the messages of a conversation are joined."""
    if isinstance(document, str):
        return document
    return "\n".join(message["content"] for message in document)
