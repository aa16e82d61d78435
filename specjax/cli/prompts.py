"""Reads prompts from an argument, a file or a pipe."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.tasks import PythonTests, Task, task_of
from ..models import load_config
from ..models.model_folder import config_folder
from ..models.seq2seq import encoder_inputs
from ..models.seq2seq.config import EncoderDecoderConfig
from ..serving import jsonl_input
from ..text.prompts import MESSAGES, check_conversation

# This text was held out from the training of the embedded model.
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
    """Adds the arguments that ``asked`` reads."""
    p.add_argument(
        "prompt",
        nargs="?",
        help="the prompt; default: the text of the pipe, or a built-in example; with --features: "
        "the token ids with which the decoder begins, as one argument (50258 50259 50359 50363), "
        "by default those of the model's generation_config.json",
    )
    p.add_argument(
        "--prompt",
        dest="prompt_option",
        metavar="TEXT",
        help="the prompt as an option, in place of the argument without a name",
    )
    p.add_argument("--file", help="read the prompt from this file")
    p.add_argument(
        "--features",
        metavar="FILE.npy",
        help="the input of Whisper's encoder: one array [bins, frames], the window that the "
        "model's feature extractor returns",
    )


def asked(arguments: argparse.Namespace) -> tuple[str | list[int] | None, np.ndarray | None]:
    """Returns the prompt and the features of the encoder, by the model's config; reads no weights.

    Args:
      arguments: those of ``add_prompt`` and ``--model``.

    Returns:
      the prompt (a text, or token ids for a model that reads features; None: the model's default
      begin), and the features float32 ``[bins, frames]`` or None.

    Raises:
      ValueError: the prompt or the features are missing, or are not of the kind that the model
        reads.
      OSError: a file or the model cannot be read.
    """
    given, model = arguments.features, arguments.model
    text, prompt = arguments.prompt, None
    if arguments.prompt_option is not None:
        if text is not None:
            raise ValueError(f"--prompt and the prompt {text!r:.40}: give one of the two")
        text = arguments.prompt_option
    if given is None or not (text is None and arguments.file is None):
        prompt = read_prompt(text, arguments.file)
    config = load_config(config_folder(model))
    hears = isinstance(config, EncoderDecoderConfig) and config.reads == encoder_inputs.FEATURES
    if not hears:
        if given is not None:
            raise ValueError(
                f"--features {given}: {model} reads a text, the prompt; leave --features out, or "
                "give a Whisper model"
            )
        return prompt, None
    if given is None:
        raise ValueError(
            f"--features is missing: {model} reads features instead of a text; give a .npy file of "
            f"one array [{config.num_features}, {2 * config.max_source}], a window"
        )
    window = encoder_inputs.window_of(config, Path(given))
    if prompt is None:
        return encoder_inputs.usual_begin(config, model), window
    try:
        ids = prompt.strip().strip("[]").replace(",", " ")
        return [int(token) for token in ids.split()], window
    except ValueError:
        raise ValueError(
            f"prompt {prompt!r:.60}: with --features the prompt is the token ids with which the "
            "decoder begins, such as '50258 50259 50359 50363'; without a prompt, the ids of the "
            "model's generation_config.json are used"
        ) from None


def read_prompt(argument: str | None, file: str | None) -> str:
    """Returns the prompt from the argument, the file or the pipe, or the built-in example.

    Raises:
      ValueError: both an argument and a file are given, the file cannot be read, or the prompt is
        empty.
    """
    if argument is not None and file is not None:
        raise ValueError("a prompt and --file: give one of the two")
    if argument is None and file is None:
        return _piped() or PROMPT
    if file is not None:
        try:
            argument = Path(file).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"--file {file} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--file {file}: {error.strerror}") from None
    if not argument:
        raise ValueError(
            "the prompt is empty: give at least one character, or leave the prompt out for "
            "the built-in example"
        )
    return argument


def _piped() -> str:
    """Returns the text of a pipe or a redirected file; "" if stdin is a terminal or absent."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # stdin is closed, or has no file
        return ""
    piped = stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)
    if not piped:
        return ""
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # like --file, in every locale
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("the prompt that was piped in is not UTF-8 text") from None
    if not text:  # launchers without input, and commands that failed, give an empty pipe
        print("the pipe is empty: this is the built-in example", file=sys.stderr)
    return text


def read_prompts(file: str | None, model: str, limit: int) -> list[str | dict[str, Any]]:
    """Returns at most ``limit`` prompts, evenly spread over a file.

    Args:
      file: a file with one prompt in each line, or a .jsonl file; None: the prompts that ship with
        the package for ``embedded``, the built-in example for other models. Names of feature files
        are relative to the file's folder.
      model: the model, as for ``specjax.load``.
      limit: at least 1.

    Returns:
      a text for each prompt, or ``{"features": path}``, or a conversation ``{"messages": list}``.

    Raises:
      ValueError: the file cannot be read, holds no prompt or a broken line, or there is no file
        for an encoder-decoder model.
    """
    if limit < 1:
        raise ValueError(f"--limit {limit}: give at least 1")
    if file is None:
        if model != "embedded":
            config = load_config(config_folder(model))
            if isinstance(config, EncoderDecoderConfig):
                raise ValueError(
                    f"--prompts is missing: name a file of prompts of the kind that {model} reads"
                )
            print(
                "--prompts is missing: the figures are for the built-in example alone",
                file=sys.stderr,
            )
            return [PROMPT]
        file = Path(__file__).parent.parent / "data" / "heldout_prompts.jsonl"
    lines = _lines(file)
    if Path(file).suffix != ".jsonl":
        return _spread([line for _, line in lines], limit)
    folder = Path(file).parent
    return _spread([_prompt_of(line, where, folder) for where, line in lines], limit)


def read_tasks(file: str | None, limit: int, run_code: bool) -> list[Task | None]:
    """Returns the tasks of the prompts that ``read_prompts`` returns, None for those without one.

    Args:
      file, limit: see ``read_prompts``.
      run_code: whether code that a model wrote may be run.

    Raises:
      ValueError: a line has a broken task, or tests although code may not be run.
    """
    if file is None or Path(file).suffix != ".jsonl":
        return []
    tasks = []
    for where, line in _lines(file):
        fields = json.loads(line)
        try:
            tasks.append(task_of(fields) if isinstance(fields, dict) else None)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if isinstance(tasks[-1], PythonTests) and not run_code:
            raise ValueError(
                f"{where}: its tests run code that the model wrote, with limits but in no sandbox; "
                'allow it by --run-code, or leave "tests" out'
            )
    return _spread(tasks, limit) if any(tasks) else []


def _lines(file: str | Path) -> list[tuple[str, str]]:
    """Returns where each line of a file stands, and the line; empty lines are left out.

    Raises:
      ValueError: the file cannot be read, or holds no prompt.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"--prompts {file}: {error.strerror}") from None
    lines = jsonl_input.divided(content)
    try:
        found = [(f"--prompts {file}, line {n + 1}", jsonl_input.plain(line)) for n, line in lines]
    except ValueError:
        raise ValueError(f"--prompts {file} is not UTF-8 text") from None
    if not found:
        raise ValueError(f"--prompts {file}: it holds no prompt")
    return found


def _spread(values: list, limit: int) -> list:
    """Returns at most ``limit`` of the values, evenly spread."""
    count = min(limit, len(values))
    return [values[i * len(values) // count] for i in range(count)]


def _prompt_of(line: str, where: str, folder: Path) -> str | dict[str, Any]:
    """Returns the prompt in a line of a .jsonl file; ``where`` names the line in errors."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: it is not JSON: {error}") from None
    if isinstance(value, dict) and isinstance(value.get("features"), str):
        return {"features": folder / value["features"]}
    held = [value] if isinstance(value, str) else []
    if isinstance(value, dict):
        held = [value[name] for name in jsonl_input.PROMPT if value.get(name) is not None]
        if MESSAGES in value and not held:
            try:
                check_conversation(value[MESSAGES], "messages")
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            return {MESSAGES: value[MESSAGES]}
        held += [value[name] for name in (MESSAGES,) if name in value]  # one of both is meant
    text = held[0] if len(held) == 1 else None
    if not isinstance(text, str) or not text:
        raise ValueError(
            f'{where}: give a string that is not empty, {{"text": "..."}}, {{"prompt": "..."}}, a '
            'conversation {"messages": [...]}, or for Whisper {"features": "a .npy file"}'
        )
    return text
