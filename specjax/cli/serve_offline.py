"""``specjax serve-offline``: continues a file of prompts by continuous batching."""

from __future__ import annotations

import argparse
import json
import sys

import specjax

from .options import INTERRUPTED, add_decoding, options_of, set_up
from .sessions import save_session


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "serve-offline",
        help="continue every prompt of a file",
        description="Continues every prompt of a file, several at a time: when a row has finished, "
        "the next prompt takes its place. Each finished text is written at once; after Ctrl-C or a "
        "crash the same command resumes.",
    )
    p.add_argument(
        "prompts",
        help='a file of JSON lines: each is a string or {"prompt": ...}, which may also have "id", '
        '"max_new_tokens", "temperature", "top_k", "top_p", "min_p", penalties, "seed" and "stop"; '
        "a text ends where the context is full, even before its max_new_tokens; "
        'for Whisper each is {"features": a .npy file} or the name of a .npy file, relative to '
        "this file; in a .txt file each line is a prompt as it stands",
    )
    p.add_argument(
        "-o",
        "--output",
        required=True,
        help="the file of JSON lines to which finished texts are appended; created if absent",
    )
    p.add_argument(
        "--batch",
        type=int,
        default=8,
        help="the number of prompts that are decoded together, 8 by default",
    )
    p.add_argument(
        "--gather",
        type=int,
        help="the number of rows that must be free before the next prompts are read; default: an "
        "eighth of the batch",
    )
    p.add_argument(
        "--max-broken",
        type=int,
        default=0,
        help="the most broken prompts that are left out, 0 by default; with more, nothing is "
        "decoded",
    )
    add_decoding(p)
    p.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Decodes the prompts, shows the progress and prints a summary; returns the exit code."""
    lm = set_up(arguments)
    options = options_of(arguments, lm)
    bar = Bar()
    with bar:
        served = specjax.serve_offline(
            lm,
            arguments.prompts,
            output=arguments.output,
            batch=arguments.batch,
            gather=arguments.gather,
            max_broken=arguments.max_broken,
            progress=bar.show,
            **options,
        )
    save_session(arguments, options)
    for one in served.broken:
        print(f"{arguments.prompts}, {one}: left out", file=sys.stderr)
    if arguments.json:
        print(json.dumps(_summary(served, bar.last)))
    elif bar.last or served.finished:
        print(bar.last or f"all {len(served.rows)} prompts are in {arguments.output} already")
    if full := sum(row.finish == "context" for row in served.rows):
        print(
            f"{full} of {len(served.rows)} texts end before max_new_tokens, where the context of "
            f"{lm.name} ({lm.max_positions} tokens) is full",
            file=sys.stderr,
        )
    if not served.finished:
        print("interrupted: the same command continues from here", file=sys.stderr)
    return 0 if served.finished else INTERRUPTED


def _summary(served, last) -> dict:
    return {
        "prompts": len(served.rows),
        "earlier": served.earlier,
        "broken": [{"line": one.line, "reason": one.reason} for one in served.broken],
        "finished": served.finished,
        "seconds": served.seconds,
        "tokens": last.tokens if last else 0,
        "tau": last.tau if last else None,
    }


class Bar:
    """Shows the progress on stderr if it is a terminal.

    Attributes:
      last: the last ``Progress`` that was shown, or None.
    """

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        self._bar = RichProgress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task, self.last = None, None

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def show(self, progress) -> None:
        """Shows a ``Progress``."""
        if self._task is None:
            self._task = self._bar.add_task("", total=progress.total)
        said = f"{progress.rate:,.0f} tokens/s · τ {progress.tau:.2f}"
        self._bar.update(self._task, completed=progress.done, description=said)
        self.last = progress
