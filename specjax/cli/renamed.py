"""Errors of the library about an argument for which one command has an option of another name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator


@contextlib.contextmanager
def renamed(**options: str) -> Iterator[None]:
    """Raises a ``ValueError`` from within again, with the names of options in place of arguments.

    Args:
      options: the ``dest`` of the option for each argument; ``typed_names`` makes ``--dest`` of it.
    """
    try:
        yield
    except ValueError as error:
        names = "|".join(options)
        said = re.sub(rf"\b({names})(?==)", lambda match: options[match[1]], str(error))
        raise ValueError(said) from error
