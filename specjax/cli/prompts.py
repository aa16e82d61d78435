"""Reads prompts from an argument, a file, or a pipe."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np

from ..models import load_config
from ..models.model_folder import config_folder
from ..models.seq2seq import encoder_inputs
from ..models.seq2seq.config import EncoderDecoderConfig

# Held out from the training of the embedded model. Half of the 4-grams of its greedy continuation
# (128 tokens) repeat, which is fewer than after most held-out prompts.
PROMPT = """\
    if _curses.tigetstr( capability_name ):
        return True
    else:
        return False

if __name__ == '__main__':
    # Compare the output of this implementation and the ncurses has_key,
    # on platforms where has_key is already available
    try:
        L = []
        _curses.initscr()"""


def add_prompt(p: argparse.ArgumentParser) -> None:
    """The arguments that ``asked`` reads."""
    p.add_argument(
        "prompt",
        nargs="?",
        help="default: what is piped in, else a built-in example; with --features token ids that "
        "the decoder begins with (50258 50259 50359 50363, as one argument), by default what the "
        "model's generation_config.json says",
    )
    p.add_argument("--file", help="read the prompt from this file")
    p.add_argument(
        "--features",
        metavar="FILE.npy",
        help="what a Whisper hears: one array [bins, frames], a window as its feature extractor "
        "returns it",
    )


def asked(arguments: argparse.Namespace) -> tuple[str | list[int] | None, np.ndarray | None]:
    """The prompt, None for what the model begins with, and what its encoder hears, float32
    ``[bins, frames]``. Reads the model's config, no weights.

    Raises:
      ValueError, OSError: no prompt, no features, not those that the model reads; no such model.
    """
    given, model = arguments.features, arguments.model
    prompt = None
    if given is None or not (arguments.prompt is None and arguments.file is None):
        prompt = read_prompt(arguments.prompt, arguments.file)
    config = load_config(config_folder(model))
    hears = isinstance(config, EncoderDecoderConfig) and config.reads == encoder_inputs.FEATURES
    if not hears:
        if given is not None:
            raise ValueError(
                f"--features {given}: {model} reads a text, which is the prompt; leave --features "
                "out, or take a Whisper"
            )
        return prompt, None
    if given is None:
        raise ValueError(
            f"--features is missing: {model} reads no text but features; give a .npy file of one "
            f"array [{config.num_features}, {2 * config.max_source}], a window"
        )
    window = encoder_inputs.window_of(config, Path(given))
    if prompt is None:
        return encoder_inputs.usual_begin(config, model), window
    try:
        ids = prompt.strip().strip("[]").replace(",", " ")
        return [int(token) for token in ids.split()], window
    except ValueError:
        raise ValueError(
            f"prompt {prompt!r:.60}: with --features it is the token ids that the decoder begins "
            "with, such as '50258 50259 50359 50363'; without it the model's own are taken"
        ) from None


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt from the argument, the file, the pipe, or the built-in one."""
    if argument is not None and file is not None:
        raise ValueError("a prompt and --file: give one of them")
    if argument is None and file is None:
        return _piped() or PROMPT
    if file is not None:
        try:
            argument = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"--file {file} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--file {file}: {error.strerror}") from None
    if not argument:
        raise ValueError(
            "the prompt is empty: give at least one character, or none at all for "
            "the built-in example"
        )
    return argument


def _piped() -> str:
    """Reads a pipe or a redirected file; returns nothing if stdin is a terminal or absent."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file behind it
        return ""
    piped = stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)
    if not piped:
        return ""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # as --file, whatever the locale
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("the prompt that was piped in is not UTF-8 text") from None
    if not text:  # how many launchers spell "no input", and what a command that failed leaves
        print("nothing came through the pipe: this is the built-in example", file=sys.stderr)
    return text


def read_prompts(file: str | None, model: str, limit: int) -> list[str | dict[str, Path]]:
    """At most ``limit`` prompts of a file, evenly spread; the shipped ones for ``embedded``. Names
    of files of features are relative to the file."""
    if limit < 1:
        raise ValueError(f"--limit {limit}: give at least 1")
    if file is None:
        if model != "embedded":
            config = load_config(config_folder(model))
            if isinstance(config, EncoderDecoderConfig):
                raise ValueError(
                    f"--prompts is missing: name a file of prompts of the kind that {model} reads"
                )
            print("no --prompts: this is about the built-in example alone", file=sys.stderr)
            return [PROMPT]
        file = Path(__file__).parent.parent / "data" / "heldout_prompts.jsonl"
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {file} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"--prompts {file}: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if Path(file).suffix == ".jsonl":
            line = _prompt_of(line, f"--prompts {file}, line {number}", Path(file).parent)
        prompts.append(line)
    if not prompts:
        raise ValueError(f"--prompts {file}: it holds no prompt")
    count = min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _prompt_of(line: str, where: str, folder: Path) -> str | dict[str, Path]:
    """The prompt in a line of a .jsonl file."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: it is not JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("features"), str):
        return {"features": folder / value["features"]}
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise ValueError(
            f'{where}: give a string that is not empty, {{"text": "..."}}, or for a Whisper '
            '{"features": "a .npy file"}'
        )
    return text
