"""``specjax datastore build``: a folder of texts that a drafter copies from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..drafters import datastore
from ..text.session import fingerprint
from .json_lines import read_json_lines
from .options import set_up


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "datastore",
        help="build a datastore of texts to draft from",
        description="A datastore holds the tokens of any texts, sorted so that what followed the "
        "end of a text is found without reading it whole. Draft from it with specjax generate "
        "--datastore FOLDER; the text that is generated stays the model's own.",
    )
    actions = p.add_subparsers(dest="action", required=True, help="what is done")
    p = actions.add_parser("build", help="make a datastore of files")
    p.add_argument(
        "files",
        nargs="+",
        help='texts, one a file; of a .jsonl file each line, a string or {"text": ...}',
    )
    p.add_argument("-o", "--output", required=True, help="the folder, which must not exist")
    p.add_argument(
        "--model", default="embedded", help="whose tokenizer: embedded, a folder, a hub name"
    )
    p.add_argument(
        "--chunk",
        type=int,
        default=datastore.CHUNK,
        help="tokens that are sorted together, 4194304 by default; fewer need less memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Builds, and says what it holds."""
    if arguments.chunk < 1:
        raise ValueError(f"--chunk {arguments.chunk}: it must be at least 1")
    if Path(arguments.output).exists():
        raise FileExistsError(f"--output {arguments.output} is there already: take another name")
    lm = set_up(arguments)
    if lm.tokenizer is None:
        raise ValueError(f"--model {arguments.model} has no tokenizer to read texts with")
    ids = (lm.tokenizer.encode(text) for text in _texts(arguments.files))
    made = datastore.build(arguments.output, ids, fingerprint(lm), chunk=arguments.chunk)
    print(f"{arguments.output}: {made.num_tokens:,} tokens")
    return 0


def _texts(files: list[str]) -> Iterator[str]:
    """The texts of files, one after the other."""
    for name in files:
        if Path(name).suffix != ".jsonl":
            yield Path(name).read_text(encoding="utf-8")
            continue
        expected = 'it is neither a string nor {"text": ...}'
        yield from read_json_lines(name, _text_of, expected)


def _text_of(value) -> str:
    """The text of a line: the line's string, or its field ``text``."""
    return value if isinstance(value, str) else value["text"]
