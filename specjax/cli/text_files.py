"""Files of texts, of which commands build what drafters read, and the folder for the result."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..models.lm import LM
from .json_lines import read_json_lines
from .options import set_up
from .outputs import check_folder


def add_texts(p: argparse.ArgumentParser, output: str) -> None:
    """Adds the arguments for files, the model whose tokenizer is used, and the folder, of which
    ``output`` is the help."""
    p.add_argument(
        "files",
        nargs="+",
        help='files of one text each; in a .jsonl file each line is a text, a string or {"text": '
        "...}",
    )
    p.add_argument("-o", "--output", required=True, help=output)
    p.add_argument(
        "--model",
        default="embedded",
        help="the model whose tokenizer is used: embedded, a folder, or a hub name",
    )


def token_ids(arguments: argparse.Namespace) -> tuple[LM, Iterator[list[int]]]:
    """Returns the model of the arguments, and the token ids of each text of the files.

    Raises:
      FileExistsError: there is something at the place of the folder.
      FileNotFoundError: a file does not exist, or is a folder.
      ValueError: no folder can be made there, or the model has no tokenizer.
    """
    output = Path(arguments.output)
    if output.exists():
        raise FileExistsError(f"--output {output} is there already: take another name")
    check_folder("--output", output)
    for name in arguments.files:
        if not Path(name).exists() or Path(name).is_dir():
            found = "it is a folder" if Path(name).exists() else "there is no such file"
            raise FileNotFoundError(f"files: {name}: {found}; name files of texts")
    lm = set_up(arguments)
    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"--model {arguments.model} has no tokenizer: give a model with a tokenizer"
        )
    return lm, (tokenizer.encode(text) for text in _texts(arguments.files))


def _texts(files: list[str]) -> Iterator[str]:
    """Yields the texts of files, one after the other."""
    for name in files:
        if Path(name).suffix != ".jsonl":
            try:
                yield Path(name).read_text(encoding="utf-8-sig")
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
