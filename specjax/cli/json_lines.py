"""Reads files with a JSON value on each line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any


def read_json_lines(path: str, convert: Callable[[Any], Any], expected: str) -> Iterator[Any]:
    """Yields the converted value of each line; blank lines are skipped.

    Args:
      path: the name of the file.
      convert: a function of the JSON value of a line, which raises ``ValueError``, ``KeyError`` or
        ``TypeError`` for a value that it cannot convert.
      expected: the text of the error about a line that is not JSON, or that ``convert`` refuses.

    Raises:
      ValueError: a line is not JSON, or ``convert`` refuses it; the error names file and line.
    """
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = convert(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}: {expected}") from None
            yield value
