"""The commands and their arguments. Each command is a file of this package.

The file of a command has two functions: ``add`` declares the command's arguments, and ``run`` runs
the command and returns its exit code.
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
    """Runs the command that ``argv`` names, or prints the help for an empty ``argv``.

    Returns:
      the exit code.
    """
    if argv[:1] == ["train"]:
        return train(argv[1:])
    if sys.stdout is None:  # closed before the start, as by >&-
        raise OSError("stdout is closed: the command has no place to write to")
    if not argv:
        parser().print_help()
        return 0
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        refuse(unknown, arguments.command)
    return COMMANDS[arguments.command].run(arguments)


class Parser(argparse.ArgumentParser):
    """A parser that prints each error in one line."""

    def error(self, message: str):
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, with all commands."""
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
    """Ends the program with an error about arguments that ``command`` does not have."""
    commands = Parser(prog=f"specjax {command}")
    COMMANDS[command].add(commands.add_subparsers(dest="command"))
    own = commands._subparsers._group_actions[0].choices[command]  # noqa: SLF001
    known = [name for name in own._option_string_actions if name.startswith("--")]  # noqa: SLF001
    option = next((word for word in unknown if word.startswith("-")), unknown[0])
    near = difflib.get_close_matches(option.partition("=")[0], known, n=1)
    meant = f": did you mean {near[0]}?" if near else ""
    commands.error(f"unknown argument {option}{meant}")


def train(argv: Sequence[str]) -> int:
    """Runs ``specjax train`` by the package of recipes, or prints its help for an empty ``argv``.

    Raises:
      ValueError: a package that training needs is not installed.
    """
    try:
        from specjax.train.cli import main

        return main(list(argv) or ["--help"])
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed: pip install 'specjax[train]'"
        ) from None
