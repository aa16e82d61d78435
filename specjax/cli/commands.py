"""The commands and their arguments; each command is a file of this package.

Such a file has ``add``, which declares its arguments, and ``run``.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

import specjax

from . import (
    audit,
    chat,
    datastore,
    generate,
    layers,
    plan,
    plan_memory,
    quality,
    quantize,
    serve_offline,
    trace,
    tree,
)
from .options import USAGE_ERROR

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "layers": layers,
    "plan": plan,
    "plan-memory": plan_memory,
    "quantize": quantize,
    "serve-offline": serve_offline,
    "trace": trace,
    "tree": tree,
    "audit": audit,
    "quality": quality,
    "datastore": datastore,
}


def run(argv: Sequence[str]) -> int:
    """Runs the command that ``argv`` names; without one it prints the help."""
    if argv[:1] == ["train"]:
        return train(argv[1:])
    if sys.stdout is None:  # closed before the start, as by >&-
        raise OSError("stdout is closed: there is nowhere to write to")
    if not argv:
        parser().print_help()
        return 0
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        refuse(unknown, arguments.command)
    return COMMANDS[arguments.command].run(arguments)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = Parser(prog="specjax", description="Speculative decoding in JAX: the same text, faster.")
    top.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = top.add_subparsers(
        dest="command", required=True, parser_class=Parser, help="what is done; see its --help"
    )
    commands.add_parser("train", help="train targets and drafters; see specjax train --help")
    for command in COMMANDS.values():
        command.add(commands)
    return top


def refuse(unknown: Sequence[str], command: str) -> None:
    """Ends the program over arguments that a command does not have."""
    commands = Parser(prog=f"specjax {command}")
    COMMANDS[command].add(commands.add_subparsers(dest="command"))
    own = commands._subparsers._group_actions[0].choices[command]  # noqa: SLF001
    known = [name for name in own._option_string_actions if name.startswith("--")]  # noqa: SLF001
    option = next((word for word in unknown if word.startswith("-")), unknown[0])
    near = difflib.get_close_matches(option.partition("=")[0], known, n=1)
    meant = f": did you mean {near[0]}?" if near else ""
    commands.error(f"unknown argument {option}{meant}")


def train(argv: Sequence[str]) -> int:
    """``specjax train``: hands over to the training package; without arguments to its help."""
    try:
        from specjax.train.cli import main

        return main(list(argv) or ["--help"])
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed: pip install 'specjax[train]'"
        ) from None
