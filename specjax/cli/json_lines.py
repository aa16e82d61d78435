"""Reads files with a JSON value on each line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TextIO


def read_json_lines(
    argument: str, path: str, convert: Callable[[Any], Any], expected: str
) -> Iterator[Any]:
    """What ``convert`` makes of the value of each line; blank lines are passed over.

    Args:
      argument: the argument that names the file, for the error.
      path: the file.
      convert: raises ValueError, KeyError or TypeError for a value that it cannot use.
      expected: what an error says of a line that is no JSON, or that ``convert`` cannot use.

    Raises:
      ValueError: there is such a line; the message names the file and the line.
      OSError: the file cannot be read.
    """
    try:
        lines = open(path, encoding="utf-8-sig")
    except OSError as error:
        raise type(error)(f"{argument} {path}: {error.strerror}") from None
    with lines:
        number = 0
        while line := _line(lines, path):
            number += 1
            if not line.strip():
                continue
            try:
                value = convert(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}: {expected}") from None
            yield value


def _line(lines: TextIO, path) -> str:
    """The next line of a file, ``""`` at its end.

    Raises:
      ValueError: the file is not in UTF-8.
    """
    try:
        return lines.readline()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it must be in UTF-8 ({error.reason})") from None
