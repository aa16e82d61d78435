"""Texts for drafters without training, made from the standard library of the running Python.

The embedded target was trained on other files of it. ``edits``: a piece of a file, then the same
piece with one name changed, of which the first lines are given. ``retrieval``: a piece of a file,
then a question whose answer quotes it from a line on. ``completion``: the held-out prompts that
ship with the package. ``open``: the beginning of a docstring, of which the rest is not given.

The embedded target is too small to copy what it has read. ``answered`` gives the answers too, for
figures of a target that does copy: see ``GivenText``.
"""

from __future__ import annotations

import dataclasses
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.cli import main as command
from specjax.sampling.processors import LogitsProcessor
from specjax.text import Retrieval

from . import heldout

SIZES = {"edits": 350, "retrieval": 350, "open": 80}  # characters, within the context of training
ANSWERED = {"edits": 900, "retrieval": 800}  # where the target need not understand them
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
    return [prompt for prompt, _ in _spread(workload, count, _made(workload, SIZES[workload]))]


def answered(lm: specjax.LM, workload: str, count: int, new: int) -> tuple[list[str], np.ndarray]:
    """Returns prompts of ``edits`` or ``retrieval`` and the first tokens of their true answers.

    Args:
      lm: the model whose tokenizer is taken.
      workload: ``edits`` or ``retrieval``.
      count: the number of prompts.
      new: the tokens of each answer.

    Returns:
      the prompts, and int32 ``[count, new]``.

    Raises:
      ValueError: the workload has no answers, or fewer that are as long.
    """
    if workload not in ANSWERED:
        raise ValueError(f"workload={workload!r}: answers are known of {', '.join(ANSWERED)}")
    long = []
    for prompt, answer in _made(workload, ANSWERED[workload]):
        tokens = lm.tokenizer.encode(answer)
        long += [(prompt, tokens[:new])] if len(tokens) >= new else []
    texts, said = zip(*_spread(workload, count, long), strict=True)
    return list(texts), np.asarray(said, np.int32)


@dataclasses.dataclass(frozen=True)
class GivenText(LogitsProcessor):
    """Lets the target say nothing but given texts, so that rounds are those of a target that writes
    them: its passes are computed, its laws are not its own.

    Attributes:
      params: int32 ``[B, N]``, the texts.
    """

    params: Any = dataclasses.field(default=None, compare=False, repr=False)

    def init(self, params, tokens, lengths):
        return params, jnp.zeros_like(lengths)

    def step(self, params, state, token):
        return state[0], state[1] + 1

    def __call__(self, logits, prefix):
        said, count = prefix.state
        at = jnp.minimum(count, said.shape[1] - 1)
        wanted = jnp.take_along_axis(said, at[:, None], axis=1)
        here = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == wanted
        return jnp.where(here, 0.0, -jnp.inf)


def _made(workload: str, size: int) -> list[tuple[str, str]]:
    """All prompts of a workload with their answers, which are empty where none is known."""
    made, random = [], np.random.default_rng(0)
    for text in files("heldout"):
        for piece in _pieces(text, size, workload == "open"):
            found = globals()[f"_{workload}"](piece, random)
            made += [found] if found else []
    return made


def _spread(workload: str, count: int, made: list) -> list:
    """``count`` of all, evenly spread."""
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


def _edits(piece: str, random: np.random.Generator) -> tuple[str, str] | None:
    often = [n for n, c in Counter(_names(piece)).items() if c >= 3 and len(n) > 2 and n != "self"]
    if not often:
        return None
    name = often[random.integers(len(often))]
    edited = re.sub(rf"\b{re.escape(name)}\b", f"new_{name}", piece).splitlines(keepends=True)
    given, rest = "".join(edited[:GIVEN_LINES]), "".join(edited[GIVEN_LINES:])
    return f"{piece}\n# The same with {name} renamed to new_{name}:\n{given}", rest


def _retrieval(piece: str, random: np.random.Generator) -> tuple[str, str] | None:
    lines = [line.strip() for line in piece.splitlines()]
    lines = [line for line in lines if len(line) > 30 and len(set(line.split())) > 3]
    lines = [line for line in lines if re.search(r"\w", line)]
    if not lines:
        return None
    line = lines[random.integers(len(lines))]
    word = max(re.findall(r"\w+", line), key=len)
    begin = line[: len(line) // 3]
    rest = piece[piece.index(line) + len(begin) :]
    return f"{piece}\n# Which line above has the word {word}? The line is:\n# {begin}", rest


def _open(piece: str, random: np.random.Generator) -> tuple[str, str]:
    del random
    return piece, ""
