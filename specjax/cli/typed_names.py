"""Errors of the library in the words of the command line: ``num=99`` becomes ``--num-draft 99``.

The library's errors name arguments of Python functions. They begin with ``name=value`` or
``name:``, and name other arguments in the way out. The options of a command have the same names,
but for those in ``OTHER_NAMES``, so that one place can translate all errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .parsing import Add, options_of, parser_of

# arguments of the library -> the ``dest`` of the option, where the two differ
OTHER_NAMES = {
    "num": "num_draft",
    "num_drafts": "num_draft",
    "drafters": "drafter",
    "stop_strings": "stop",
    "longest": "prompt_lookup_max",
    "shortest": "prompt_lookup_min",
    "name_or_folder": "model",
    "lm_head": "quantize_head",
    "batches": "batch",
}
# a line of a prompt file holds fields, whose names are those of the library
FIELDS = re.compile(r"\s*line \d+: ")
# not within a word, a path or a quoted value
APART = r"(?<![\w.,:/='\"-])"
CALL = r"\w\([^()]*\)"  # such as NGram(num_draft=3), in which the names are those of the library
# objects that the library takes, of which the command takes the name
LOADED = re.compile(r"specjax\.load(?:_drafter)?\((<[^>]*>)[^)]*\)")


def in_options(error: object, add: Add) -> str:
    """Returns an error's text with the options of a command in place of the library's arguments.

    Args:
      error: the error, or its text.
      add: the function that declares the arguments of the command.
    """
    options: dict[str, str] = {}
    for option, action in options_of(parser_of(add)).items():
        if option.startswith("--"):  # the first of several names is the one that help shows
            options.setdefault(action.dest, option)
    options |= {name: options[own] for name, own in OTHER_NAMES.items() if own in options}
    lines = str(error).split("\n")
    return "\n".join(one if FIELDS.match(one) else _line(one, options) for one in lines)


def _line(line: str, options: Mapping[str, str]) -> str:
    """Returns one line of an error with ``options`` in place of their arguments."""
    line = LOADED.sub(r"\1", line)
    any_name = "|".join(sorted(options, key=len, reverse=True))
    # names that no sentence has as words
    odd = "|".join(name for name in options if "_" in name or name == "num") or "(?!)"
    for pattern, after in (
        # where no value is typed, and where none is named
        (rf"{APART}({any_name})=(?:True\b|(?=[,;.)]|\s|$))", ""),
        # but for the sizes of a mesh, as in "model=7 devices"
        (rf"{APART}({any_name})=(?!\d+ devices)", " "),
        (rf"^({any_name})(?=: )", ""),
        # but for the settings of a drafter or a rule, as in "top_k (int)"
        (rf"{APART}({odd})(?![\w=(.]| \((?:int|float|str|bool)\))", ""),
        (rf"(?<=\bleave )({any_name})(?= out\b)", ""),
        (rf"(?<=\bgive )({any_name})(?=,| or\b| instead\b)", ""),
        (rf"(?<=\binstead of )({any_name})\b", ""),
    ):
        line = re.sub(f"{CALL}|{pattern}", lambda m, after=after: _typed(m, options, after), line)
    return line


def _typed(match: re.Match, options: Mapping[str, str], after: str) -> str:
    """Returns the option for the argument that was found, or the call that was found."""
    return options[match[1]] + after if match[1] else match[0]
