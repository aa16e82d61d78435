"""Values that may be None in general, where it is known that they are not."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def required(value: T | None, what: str) -> T:
    """Returns ``value``, of which the caller knows that it is there.

    Raises:
      ValueError: it is None; ``what`` names it.
    """
    if value is None:
        raise ValueError(f"{what} is None, and its value is needed here: give it")
    return value


def unset(*, repr: bool = True) -> Any:
    """Returns a dataclass's field with the default None, whose type leaves None out.

    ``__post_init__`` refuses None, or puts a value in its place: nobody reads it.
    """
    return dataclasses.field(default=None, repr=repr)
