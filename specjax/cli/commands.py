"""The commands and their arguments. Each command is a file of this package.

The file of a command has two functions: ``add`` declares the command's arguments, and ``run`` runs
the command and returns its exit code.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

import specjax

from .._internal.keywords import did_you_mean
from . import (
    audit,
    bigram,
    calculator,
    chat,
    datastore,
    drafters,
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
from .parsing import Parser, options_of, parser_of, with_left_out_values

COMMANDS = {
    "generate": generate,
    "chat": chat,
    "drafters": drafters,
    "layers": layers,
    "plan": plan,
    "calculator": calculator,
    "plan-memory": plan_memory,
    "quantize": quantize,
    "serve-offline": serve_offline,
    "trace": trace,
    "tree": tree,
    "audit": audit,
    "quality": quality,
    "datastore": datastore,
    "bigram": bigram,
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
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        names = (*COMMANDS, "train")
        parser().error(
            f"unknown command {argv[0]}: {did_you_mean(argv[0], names)}Known are {', '.join(names)}"
        )
    if argv[0] in COMMANDS:
        argv = with_left_out_values(argv, COMMANDS[argv[0]].add)
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:
        refuse(unknown, arguments.command)
    gc.freeze()  # or each collection would go through all that was imported, some 50 ms
    return COMMANDS[arguments.command].run(arguments)


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
    own = parser_of(COMMANDS[command].add)
    known = [name for name in options_of(own) if name.startswith("--")]
    option = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not option.startswith("-") and _takes_prompt(own):
        own.error(f"more than one prompt, {option!r} among them: put the prompt in quotes")
    meant = did_you_mean(option.partition("=")[0], known).rstrip()
    own.error(f"unknown argument {option}{meant and ': '}{meant}")


def _takes_prompt(command: argparse.ArgumentParser) -> bool:
    """Whether a prompt is written without the name of an option."""
    named = ((action.dest, action.option_strings) for action in command._actions)  # noqa: SLF001
    return ("prompt", []) in named


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
