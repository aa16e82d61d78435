"""The command ``specjax``; each of its commands is a file of this package.

Such a file has ``add``, which declares its arguments, and ``run``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import specjax

from . import chat, generate, plan, plan_memory, serve_offline, trace, tree
from .options import INTERRUPTED, USAGE_ERROR

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "plan": plan,
    "plan-memory": plan_memory,
    "serve-offline": serve_offline,
    "trace": trace,
    "tree": tree,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["train"]:
            return train(argv[1:])
        if sys.stdout is None:  # closed before the start, as by >&-
            raise OSError("stdout is closed: there is nowhere to write to")
        arguments = parser().parse_args(argv)
        return COMMANDS[arguments.command].run(arguments)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = argparse.ArgumentParser(
        prog="specjax", description="Speculative decoding in JAX: the same text, faster."
    )
    top.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train targets and drafters; see specjax train --help")
    for command in COMMANDS.values():
        command.add(commands)
    return top


def train(argv: Sequence[str]) -> int:
    """``specjax train``: hands over to the training package."""
    try:
        from specjax.train.cli import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed: pip install 'specjax[train]'"
        ) from None
