"""Names that users type: dataclasses of options as keyword arguments, and what was meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
LEAST_PART = 3  # letters of a part of a name, beyond which it may be what was meant


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """Returns ``"did you mean NAME? "`` with the known name that is spelt most like ``name``.

    Args:
      name: what was given.
      known: the names that are accepted.
      show: how the known name is written, such as ``repr``.

    Returns:
      the question and a space, or "" if no known name is similar.
    """
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    # a part of a name, such as ``typical`` for ``approximate-typical``
    near = near or [one for one in names if name and f"-{name}-" in f"-{one}-"]
    parts = {part: one for one in names for part in one.split("-") if len(part) > LEAST_PART}
    near = near or [parts[part] for part in difflib.get_close_matches(name, parts, n=1)]
    return f"did you mean {show(near[0])}? " if near else ""


def counted(number: int, thing: str) -> str:
    """Returns a number and a noun, ``1 head`` or ``3 heads``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """What to give in place of an option that does not exist."""
    return f"{did_you_mean(name, known)}It takes {', '.join(known)}"


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


def checks_arguments(cls: type[T]) -> type[T]:
    """A class decorator for a dataclass, which stands above ``dataclasses.dataclass``.

    The constructor that ``dataclasses`` made refuses an argument that it does not take, and names
    the nearest one. It also refuses a value of another type in a field that is annotated as one of
    ``KINDS``. The signature, the fields and the class stay as they are, and so does a class with a
    constructor of its own.

    Raises:
      TypeError: by the constructor, before any code of the class runs.
    """
    made: Any = vars(cls).get("__dataclass_params__")  # not those of a class that it extends
    if made is None or not made.init:
        return cls
    own: Callable[..., None] = vars(cls)["__init__"]
    if hasattr(own, "__wrapped__"):
        return cls
    fields = [field for field in dataclasses.fields(cls) if field.init]
    taken = list(inspect.signature(own).parameters.values())[1:]  # with each ``InitVar``
    known = [one.name for one in taken]
    needed = [one.name for one in taken if one.default is one.empty]
    positional = [one.name for one in taken if one.kind is not one.KEYWORD_ONLY]
    kinds = {f.name: (KINDS[_type_name(f)], f.default) for f in fields if _type_name(f) in KINDS}

    @functools.wraps(own)
    def init(self, *args, **given):
        called = type(self).__name__
        for name in given:
            if name not in known:
                raise TypeError(f"{called}() has no {name}: {nearest(name, known)}")
        for name, value in (*zip(positional, args, strict=False), *given.items()):
            (fits, accepted), default = kinds.get(name, ANYTHING)
            if value is not default and not fits(value):
                raise TypeError(f"{called}({name}={value!r:.60}): give {accepted}")
        lacking = [name for name in needed if name not in (*given, *positional[: len(args)])]
        if lacking:
            raise TypeError(f"{called}() needs {', '.join(lacking)}: it takes {', '.join(known)}")
        own(self, *args, **given)

    type.__setattr__(cls, "__init__", init)
    return cls


def _type_name(field: dataclasses.Field) -> str:
    """Returns the annotation of a field as it is written."""
    return field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


# the types of fields whose values are checked, as annotations are written
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "float": (lambda value: hasattr(value, "__float__"), "a number"),
    "bool": (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    "str": (lambda value: isinstance(value, str), "a text"),
}
ANYTHING = ((lambda value: True, ""), dataclasses.MISSING)
