"""The parser of the command line, and the options that a command has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .options import USAGE_ERROR

Add = Callable[[Any], None]  # declares the arguments of a command, see ``commands.py``


class Parser(argparse.ArgumentParser):
    """A parser that prints each error in one line."""

    def error(self, message: str):
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


def parser_of(add: Add) -> argparse.ArgumentParser:
    """Returns the parser of one command; ``add`` is the function that declares its arguments."""
    commands = Parser(prog="specjax").add_subparsers(dest="command", parser_class=Parser)
    add(commands)
    (own,) = commands.choices.values()
    return own


def options_of(own: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the options of a command and of its own commands (``datastore build``), as typed."""
    found = dict(own._option_string_actions)  # noqa: SLF001
    for action in own._actions:  # noqa: SLF001
        for inner in action.choices.values() if isinstance(action.choices, dict) else ():
            found |= options_of(inner)
    return found


def with_left_out_values(argv: Sequence[str], add: Add) -> list[str]:
    """Returns ``argv`` with the values of options whose value may be left out.

    Such an option takes the next word only if that word is one of its choices. Otherwise
    ``--logprobs "a prompt"`` would take the prompt as a value.
    """
    options, words, given = options_of(parser_of(add)), list(argv), []
    for place, word in enumerate(words):
        if word == "--":
            return given + words[place:]
        action = options.get(word)
        if action is not None and action.nargs == "?" and action.choices:
            following = words[place + 1] if place + 1 < len(words) else ""
            word = word if following in action.choices else f"{word}={action.const}"
        given.append(word)
    return given
