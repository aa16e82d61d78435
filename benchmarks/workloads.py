"""Texts for drafters without training, made from the standard library of the running Python.

The embedded target was trained on other files of it. ``edits``: a piece of a file, then the same
piece with one name changed, of which the first lines are given. ``retrieval``: a piece of a file
with its words, then a question whose answer quotes a line. ``completion``: the held-out prompts
that ship with the package. ``open``: the beginning of a docstring, of which the rest is not given.
"""

from __future__ import annotations

import functools
import io
import json
import keyword
import re
import sysconfig
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

import numpy as np

import specjax
from specjax.cli import main as command
from specjax.text import Retrieval

from . import heldout

SIZES = {"edits": 900, "retrieval": 800, "open": 80}  # characters of the given text
GIVEN_LINES = 3  # of the edited piece
CORPUS = Path(specjax.__file__).parent / "models" / "embedded" / "corpus.json"
WORKLOADS = ("edits", "retrieval", "completion", "open")


def prompts(workload: str, count: int) -> list[str]:
    """Returns ``count`` prompts of a workload, the same in every run with the same Python.

    Raises:
      ValueError: the workload is unknown, or has fewer prompts.
    """
    if workload == "completion":
        return heldout.prompts(count)
    if workload not in WORKLOADS:
        raise ValueError(f"workload={workload!r}: known are {', '.join(WORKLOADS)}")
    made, random = [], np.random.default_rng(0)
    for text in files("heldout"):
        for piece in _pieces(text, SIZES[workload], workload == "open"):
            prompt = globals()[f"_{workload}"](piece, random)
            made += [prompt] if prompt else []
    if len(made) < count:
        raise ValueError(f"prompts={count}: the workload {workload} has {len(made)} prompts")
    return [made[i] for i in np.linspace(0, len(made) - 1, count).astype(int)]


@functools.cache
def files(split: str) -> tuple[str, ...]:
    """The texts of the standard library's files in a split of the embedded target's corpus.

    Raises:
      ValueError: this Python has none of them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    listed = json.loads(CORPUS.read_text())["files"]
    paths = [root / one["path"] for one in listed if one["split"] == split]
    found = tuple(path.read_text(errors="replace") for path in paths if path.is_file())
    if not found:
        raise ValueError(f"the standard library at {root} has no file of the split {split!r}")
    return found


@functools.cache
def datastore_folder(limit: int = 2_000_000) -> tempfile.TemporaryDirectory:
    """A folder with the datastore ``store`` of the first files of the training split, of about
    ``limit`` characters in all; it is removed when Python ends."""
    made, written = tempfile.TemporaryDirectory(), 0
    with tempfile.TemporaryDirectory() as corpus:
        named = []
        for i, text in enumerate(files("train")):
            if written < limit:
                named.append(str(Path(corpus) / f"{i:04}.py"))
                Path(named[-1]).write_text(text)
                written += len(text)
        if command(["datastore", "build", *named, "-o", str(Path(made.name) / "store")]):
            raise ValueError("the datastore was not built")
    return made


def rest(lm: specjax.LM, rows: int) -> Retrieval:
    """The drafter ``rest``: ``suffix`` and a datastore of files on which the target was trained."""
    return Retrieval(lm, Path(datastore_folder().name) / "store", rows=rows)


def _pieces(text: str, size: int, docstrings: bool) -> list[str]:
    """Whole lines of a text in pieces of about ``size`` characters; or its docstrings, cut."""
    if docstrings:
        found = re.findall(r'^ *"""(?:.|\n)*?"""', text, flags=re.MULTILINE)
        return [one[:size] for one in found if len(one) > 2 * size]
    pieces, held = [], ""
    for line in text.splitlines(keepends=True):
        if len(held) + len(line) > size:
            pieces.append(held)
            held = ""
        held += line
    return [piece for piece in pieces if len(piece) > size // 2]


def _names(piece: str) -> list[str]:
    """The identifiers of a piece of code, each as often as it stands there."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(piece).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                found.append(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass  # a piece may end within a bracket or a string
    return found


def _edits(piece: str, random: np.random.Generator) -> str | None:
    often = [n for n, c in Counter(_names(piece)).items() if c >= 3 and len(n) > 2 and n != "self"]
    if not often:
        return None
    name = often[random.integers(len(often))]
    edited = re.sub(rf"\b{re.escape(name)}\b", f"new_{name}", piece)
    given = "".join(edited.splitlines(keepends=True)[:GIVEN_LINES])
    return f"{piece}\n# The same with {name} renamed to new_{name}:\n{given}"


def _retrieval(piece: str, random: np.random.Generator) -> str | None:
    lines = [line.strip() for line in piece.splitlines()]
    lines = [line for line in lines if len(line) > 30 and len(set(line.split())) > 3]
    if not lines:
        return None
    line = lines[random.integers(len(lines))]
    word = max(re.findall(r"\w+", line), key=len)
    begin = line[: len(line) // 3]
    return f"{piece}\n# Which line above has the word {word}? The line is:\n# {begin}"


def _open(piece: str, random: np.random.Generator) -> str:
    del random
    return piece
