"""A dataclass of options as the keyword arguments of a function: options are written once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def nearest(name: str, known: Sequence[str]) -> str:
    """What to give in place of an option that does not exist."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}It takes {', '.join(known)}"


def takes_fields(
    options: Callable[..., Any], instead: Callable[[str, Sequence[str]], str] = nearest
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for ``f(..., *, options)``: the fields of ``options``, a dataclass, become the
    function's keyword arguments. ``help()`` shows them with their defaults.

    Args:
      options: the dataclass; the function gets an instance of it.
      instead: ``(name, known names) -> sentence``: what to give in place of an unknown option.

    Raises:
      TypeError: by the decorated function, for an option that does not exist or one that lacks.
    """
    if not dataclasses.is_dataclass(options):
        raise TypeError(f"options={options!r}: give a dataclass")
    fields = dataclasses.fields(options)
    known = [field.name for field in fields]
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function)
        positional = [p for p in own.parameters.values() if p.name != "options"]
        names = [p.name for p in positional]
        # of a class, users know the name of the class
        called = function.__qualname__.removesuffix(".__init__").split(".")[-1]

        @functools.wraps(function)
        def call(*args, **given):
            mine = {name: given.pop(name) for name in names if name in given}
            for name in given:
                if name not in known:
                    raise TypeError(f"{called}() has no {name}: {instead(name, known)}")
            lacking = [name for name in needed if name not in given]
            if lacking:
                raise TypeError(f"{called}() needs {', '.join(lacking)}: give them by name")
            return function(*args, **mine, options=options(**given))

        keywords = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default if field.name not in needed else inspect.Parameter.empty,
                annotation=field.type,
            )
            for field in fields
        ]
        vars(call)["__signature__"] = own.replace(parameters=[*positional, *keywords])
        return call

    return wrap
