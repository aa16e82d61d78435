"""Reads and checks prompts with options of their own, from a file or a list.

Broken prompts are separated from the others. A line of a prompt file is a JSON object, or a string,
which is the prompt::

    {"prompt": "def f(x):", "max_new_tokens": 40, "temperature": 0.8, "seed": 7, "id": "a"}

In place of the prompt it may hold a conversation, which the model's chat template turns into one::

    {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_new_tokens": 400}

For a model whose encoder reads features, a line names a file of features in place of the prompt; a
line that is a string is the name of such a file::

    {"features": "one.npy", "max_new_tokens": 40}

In a file whose name ends with ``.txt``, each line that is not blank is a prompt as it stands.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._internal.keywords import did_you_mean
from ..decoding.inputs import MOST_TOKENS
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..models.seq2seq.encoder_inputs import FEATURES, Source
from ..sampling.distribution import Sampling
from ..text import stop_strings
from ..text.prepare import end_ids, seed_key
from ..text.prompts import MESSAGES, check_lm, check_tokenizer, prompt_ids

PROMPT = ("prompt", "text")  # fields that may hold the prompt
# sampling settings that a prompt may have, each with the value that changes nothing
NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
OPTIONS = ("max_new_tokens", "seed", "stop", "stop_strings", *NEUTRAL)
ALIASES = {"max_tokens": "max_new_tokens"}  # other names of fields
FIELDS = (*PROMPT, MESSAGES, FEATURES, "id", *OPTIONS)
NO_JSON = "it is not JSON"  # how the reason of such a line begins
SHOWN = 5  # broken prompts that an error names


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt that can be decoded.

    Attributes:
      index: the index of the prompt in the list; in a file, the number of its line, counted from 0.
      id: the name that the user gave the prompt, any JSON value, or None.
      tokens: the token ids of the prompt, at least one; for an encoder-decoder model, the tokens
        with which the decoder begins.
      max_new_tokens: the budget, at least 1 and at most what the context has room for.
      asked_tokens: the budget that was asked for, which may exceed the room.
      settings: the sampling settings, a value or None for each name in ``NEUTRAL``.
      seed: the seed of the prompt; None: the key follows from the seed of the run and ``index``.
      stop: token ids that end the text.
      stop_strings: texts that end the text.
      source: the input of the encoder, or None.
    """

    index: int
    id: Any
    tokens: tuple[int, ...]
    max_new_tokens: int
    settings: Mapping[str, float | None]
    seed: int | None
    stop: tuple[int, ...]
    stop_strings: tuple[str, ...]
    source: Source = None
    asked_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Broken:
    """A prompt that cannot be decoded.

    Attributes:
      line: the number of its line in the file, or its place in the list, counted from 1.
      reason: why it cannot be decoded.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


def read(
    lm: LM, prompts: str | os.PathLike | Sequence, defaults: Mapping[str, Any], max_broken: int
) -> tuple[list[Prompt], list[Broken]]:
    """Reads and checks prompts.

    Args:
      lm: the target.
      prompts: a file, or a list of texts, token ids, or mappings with the fields of a line. Names
        of feature files are relative to the folder of the prompt file.
      defaults: the options of prompts that do not set them, a value for each name in ``OPTIONS``.
      max_broken: the most broken prompts that are left out.

    Returns:
      the prompts, and the broken prompts.

    Raises:
      ValueError: more than ``max_broken`` prompts are broken (the error names the first ones),
        there is no prompt, or a default is out of range.
      OSError: the file cannot be read.
    """
    if not isinstance(max_broken, int) or max_broken < 0:
        raise ValueError(f"max_broken={max_broken!r}: give a whole number of at least 0")
    if isinstance(prompts, Mapping):
        raise TypeError("prompts: one object is given; give a list of them")
    check_lm(lm)
    checked(defaults)
    _stop(lm, defaults["stop"], defaults["stop_strings"])
    file = isinstance(prompts, str | os.PathLike)
    found, broken, written = [], [], 0
    folder = Path(prompts).parent if file else Path()
    read_line = plain if file and Path(prompts).suffix == ".txt" else parsed
    for index, given in _lines(prompts) if file else enumerate(prompts):
        try:
            one = read_line(given) if file else given
            written += read_line is plain and is_mapping(given)
            found.append(_prompt(lm, index, one, defaults, folder))
        except (ValueError, TypeError) as error:
            broken.append(Broken(index + 1, str(error)))
        except RecursionError:
            broken.append(Broken(index + 1, "its brackets are nested too deep"))
    whence = os.fspath(prompts) if file else "prompts"
    if len(broken) > max_broken:
        shown = "".join(f"\n  {one}" for one in broken[:SHOWN])
        rest = f"\n  and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        way_out = f"correct them, or leave them out with max_broken={len(broken)}"
        if file and all(one.reason.startswith(NO_JSON) for one in broken) and not found:
            way_out = (
                "the lines seem to be plain text: write each as a JSON string, or give the file "
                "a name that ends with .txt, in which each line is a prompt"
            )
        raise ValueError(
            f"{whence}: {len(broken)} of {len(found) + len(broken)} prompts are broken:"
            f"{shown}{rest}\n{way_out}"
        )
    if read_line is plain and written == len(found) > 0:
        raise ValueError(
            f"{whence}: each line is a JSON object with a prompt, and in a file whose name ends "
            "with .txt a line is the text of a prompt; give the file a name that ends with .jsonl"
        )
    if not found:
        raise ValueError(f"{whence}: it holds no prompt")
    return found, broken


def checked(options: Mapping[str, Any]) -> None:
    """Checks the options of one prompt.

    Args:
      options: a value for each name in ``OPTIONS``; texts and token ids that end the text are not
        checked here.

    Raises:
      ValueError: an option is not one number, or is out of its range.
      TypeError: a seed is of another type.
    """
    for name in NEUTRAL:
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float | np.number | None):
            raise ValueError(f"{name}={value!r}: give one number")
    Sampling(**{name: options[name] for name in NEUTRAL}).check()
    number = options["max_new_tokens"]
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise ValueError(f"max_new_tokens={number!r}: it must be an integer, at least 1")
    if options["seed"] is not None:
        seed_key(options["seed"])


def _lines(file: str | os.PathLike) -> Iterator[tuple[int, bytes]]:
    """Yields the number, counted from 0, and the content of each line that is not blank."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise type(error)(f"prompts {os.fspath(file)}: {error.strerror}") from None
    yield from divided(content)


def divided(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number, counted from 0, and the content of each line that is not blank; a
    byte-order mark is left out."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n")):
        if line.strip():
            yield number, line


def parsed(line: bytes):
    """Returns the JSON value of a line.

    Raises:
      ValueError: the line is not UTF-8 or not JSON.
    """
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"{NO_JSON}: {error}") from None


def plain(line: bytes) -> str:
    """Returns the text of a line, without the end of the line.

    Raises:
      ValueError: the line is not UTF-8.
    """
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def is_mapping(line: bytes) -> bool:
    """Whether a line is a JSON object with a prompt, as in a ``.jsonl`` file."""
    try:
        held = json.loads(line) if line.lstrip().startswith(b"{") else {}
        return any(name in held for name in (*PROMPT, MESSAGES))
    except ValueError:
        return False


def _prompt(lm: LM, index: int, given, defaults: Mapping[str, Any], folder: Path) -> Prompt:
    """Returns one checked prompt. Raises ``ValueError`` or ``TypeError`` for a broken one."""
    hears = encoder_inputs.encodes(lm) and lm.target.reads == FEATURES
    given = given if isinstance(given, Mapping) else {FEATURES if hears else "prompt": given}
    fields = _named(given)
    asked = _asked(fields, hears)
    options = {**defaults, **{name: fields[name] for name in OPTIONS if name in fields}}
    if _holds_texts(fields.get("stop")):  # in place of the run's texts, whichever field has them
        options["stop_strings"] = fields.get("stop_strings")
    checked(options)
    try:
        json.dumps(fields.get("id"))
    except (TypeError, ValueError):
        raise ValueError(
            f"id={fields['id']!r:.60} cannot be written as JSON: give a text or a number"
        ) from None
    tokens, source = encoder_inputs.of_prompt(lm, asked, folder, prompt_ids)
    if not 0 <= min(tokens) <= max(tokens) < lm.target.vocab_size:
        raise ValueError(f"token ids must be in [0, {lm.target.vocab_size})")
    room = options["max_new_tokens"]
    context = lm.max_positions
    if context is not None:
        room = min(room, context - len(tokens))
        if room < 1:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and the context of {lm.name} has {context}: "
                "the prompt leaves no room for a new token"
            )
    elif room >= MOST_TOKENS:
        raise ValueError(f"max_new_tokens={room}: it must be below 2**31")
    stop, strings = _stop(lm, options["stop"], options["stop_strings"])
    return Prompt(
        index=index,
        id=fields.get("id"),
        tokens=tuple(tokens),
        max_new_tokens=room,
        asked_tokens=options["max_new_tokens"],
        settings={name: options[name] for name in NEUTRAL},
        seed=fields.get("seed"),
        stop=stop,
        stop_strings=strings,
        source=source,
    )


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a prompt, with aliases replaced. Raises ``ValueError`` for an unknown
    field."""
    fields = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own not in FIELDS:
            meant = did_you_mean(str(name), (*FIELDS, *ALIASES), repr)
            raise ValueError(
                f"field {name!r:.60} is unknown: {meant}Known fields: {', '.join(FIELDS)}"
            )
        if own in fields:
            raise ValueError(f"{name!r} and {own!r} are names of one field: give one of the two")
        fields[own] = value
    return fields


def _asked(fields: Mapping[str, Any], hears: bool) -> dict[str, Any]:
    """Returns the prompt as ``"prompt"``, whichever of the names in ``PROMPT`` its field has, or a
    conversation, and the features if the model's encoder reads features (``hears``)."""
    held = [name for name in (*PROMPT, MESSAGES) if name in fields]
    if len(held) > 1 or not (held or hears):
        raise ValueError(
            f"give the prompt in one field, {', '.join(PROMPT)} or {MESSAGES}; given are {held}"
        )
    if FEATURES in fields and not hears:
        raise ValueError(f"{FEATURES!r}: the model reads text, and no features")
    asked = {name: fields[name] for name in (FEATURES,) if name in fields}
    for name in held:
        if name == MESSAGES:
            return asked | {"prompt": {MESSAGES: fields[MESSAGES]}}
        asked["prompt"] = fields[name]
        if not isinstance(fields[name], str | Sequence | np.ndarray | jax.Array):
            shown = f"{fields[name]!r:.60}"
            raise ValueError(f"{shown} is not a prompt: give a text or a list of token ids")
    return asked


def _holds_texts(stop) -> bool:
    """Whether a field ``stop`` is a text, or has texts among its token ids."""
    several = isinstance(stop, Sequence) and any(isinstance(one, str) for one in stop)
    return isinstance(stop, str) or several


def _stop(lm: LM, stop, strings) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the token ids and the texts that end a text; ``stop`` may hold either, or both."""
    given = [stop] if isinstance(stop, str) else stop
    if given is not None and not isinstance(given, Sequence | np.ndarray):
        raise ValueError(f"stop={stop!r}: give a list of token ids, or of texts")
    given = [] if given is None else list(given)
    ids = [one for one in given if not isinstance(one, str)]
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in ids):
        raise ValueError(f"stop={stop!r}: give a list of token ids, or of texts")
    if "" in given:
        raise ValueError(f"stop={stop!r}: an empty string is at the end of every text")
    (texts,) = stop_strings.per_row([one for one in given if isinstance(one, str)], 1)
    (more,) = stop_strings.per_row(strings, 1)
    own = tuple(int(one) for one in ids)
    beyond = [one for one in own if not -(2**31) <= one < 2**31]
    if beyond:
        raise ValueError(f"stop={stop!r}: {beyond[0]} is not a token id")
    # if only texts are given, the model's own end-of-text ids still end the text
    ends = end_ids(lm) if stop is None or (texts and not ids) else own
    if texts or more:
        check_tokenizer(lm, "stop_strings")
    return ends, (*texts, *more)
