"""``specjax datastore build``: a folder of texts that a drafter copies from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from ..drafters import datastore
from ..text.session import fingerprint
from .json_lines import read_json_lines
from .options import set_up


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "datastore",
        help="build a datastore of texts to draft from",
        description="A datastore holds the tokens of texts and an index, by which the tokens that "
        "followed a sequence are found without reading all texts. specjax generate --datastore "
        "FOLDER drafts from it; the generated text still follows the model's law.",
    )
    actions = p.add_subparsers(dest="action", required=True, help="what is done")
    p = actions.add_parser("build", help="make a datastore of files")
    p.add_argument(
        "files",
        nargs="+",
        help='files of one text each; in a .jsonl file each line is a text, a string or {"text": '
        "...}",
    )
    p.add_argument(
        "-o", "--output", required=True, help="the folder of the datastore, which must not exist"
    )
    p.add_argument(
        "--model",
        default="embedded",
        help="the model whose tokenizer is used: embedded, a folder, or a hub name",
    )
    p.add_argument(
        "--chunk",
        type=int,
        default=datastore.CHUNK,
        help="the number of tokens that are sorted together, 4194304 by default; fewer tokens need "
        "less memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Builds the datastore, prints its number of tokens, and returns the exit code."""
    if arguments.chunk < 1:
        raise ValueError(f"--chunk {arguments.chunk}: it must be at least 1")
    output = Path(arguments.output)
    if output.exists():
        raise FileExistsError(f"--output {output} is there already: take another name")
    if not _can_be_made(output):
        raise ValueError(f"--output {output}: no folder can be made there; take another place")
    for name in arguments.files:
        if not Path(name).exists() or Path(name).is_dir():
            found = "it is a folder" if Path(name).exists() else "there is no such file"
            raise FileNotFoundError(f"files: {name}: {found}; name files of texts")
    lm = set_up(arguments)
    if lm.tokenizer is None:
        raise ValueError(
            f"--model {arguments.model} has no tokenizer: give a model with a tokenizer"
        )
    ids = (lm.tokenizer.encode(text) for text in _texts(arguments.files))
    made = datastore.build(arguments.output, ids, fingerprint(lm), chunk=arguments.chunk)
    print(f"{arguments.output}: {made.num_tokens:,} tokens")
    return 0


def _can_be_made(path: Path) -> bool:
    """Whether folders can be made at ``path``, below the nearest folder that exists."""
    above = path.absolute().parent
    while not above.exists():
        above = above.parent
    return above.is_dir() and os.access(above, os.W_OK)


def _texts(files: list[str]) -> Iterator[str]:
    """Yields the texts of files, one after the other."""
    for name in files:
        if Path(name).suffix != ".jsonl":
            try:
                yield Path(name).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"files: {name}: byte {error.start} is not UTF-8; name files of texts in UTF-8"
                ) from None
            continue
        expected = 'it is neither a string nor {"text": ...}'
        yield from read_json_lines("files", name, _text_of, expected)


def _text_of(value) -> str:
    """Returns the text of a line: the line's string, or its field ``text``."""
    text = value if isinstance(value, str) else value["text"]
    if not isinstance(text, str):
        raise TypeError("the text is no string")
    return text
