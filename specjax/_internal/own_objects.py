"""Objects of one's own by a name: ``module:Object``, with settings ``module:Object:window=7``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from typing import Any

from .keywords import did_you_mean

FORM = re.compile(
    r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<object>[^\W\d]\w*)(:(?P<settings>.*))?"
)


def is_own(name: str) -> bool:
    """Returns whether ``name`` has the form ``module:Object`` or ``module:Object:settings``."""
    return FORM.fullmatch(name) is not None


def find_own(argument: str, name: str, base: type, known: tuple[str, ...] = ()) -> tuple[Any, str]:
    """Imports the object that a name stands for. The module may lie in the current folder.

    Args:
      argument: what the user gave, as ``name=value``, for the error.
      name: a text for which ``is_own`` is true.
      base: the class of which the object is an instance or a subclass.
      known: names that may have been meant in place of the module's, for the error.

    Returns:
      the object, a subclass of ``base`` or an instance of it, and its settings or ``""``.

    Raises:
      ValueError: the module does not exist or cannot be imported, or its object is another one.
    """
    parts = FORM.fullmatch(name)
    if parts is None:
        raise ValueError(f"{argument}: it is no name of the form module:Object")
    found = imported(argument, parts["module"], parts["object"], known)
    if not isinstance(found, base) and not (isinstance(found, type) and issubclass(found, base)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{argument}: {parts['object']!r} is a {kind}, and neither a subclass nor an instance "
            f"of specjax.{base.__name__}"
        )
    return found, parts["settings"] or ""


def imported(argument: str, module: str, attribute: str, known: tuple[str, ...] = ()) -> Any:
    """Returns ``attribute`` of ``module``, which may lie in the current folder.

    Raises:
      ValueError: there is no such module or attribute, or the module fails when it is imported.
    """
    if "" not in sys.path:  # an installed command lacks it, python -m does not
        sys.path.insert(0, "")
        importlib.invalidate_caches()
    try:
        found = importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        if missing and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{argument}: there is no module {error.name!r}, neither in the current folder nor "
                f"among those that are installed; {did_you_mean(module, known, repr)}For an "
                "object of your own give module:Object, where module is its file without .py"
            ) from None
        raise ValueError(
            f"{argument}: the module {module!r} cannot be imported ({type(error).__name__}: "
            f"{error})"
        ) from error
    try:
        return getattr(found, attribute)
    except AttributeError:
        own = [name for name, value in vars(found).items() if isinstance(value, type)]
        meant = did_you_mean(attribute, own, repr)
        raise ValueError(
            f"{argument}: the module {module!r} ({getattr(found, '__file__', None)}) has no "
            f"{attribute!r}; {meant or 'give the name of a class or of an object in it'}".rstrip()
        ) from None


@functools.cache
def instance(kind: type) -> Any:
    """Returns the instance that a class makes without arguments, always the same one, so that
    programs which were compiled for it are found again."""
    return kind()


def lacking_defaults(kind: type, given: tuple[str, ...] = ()) -> list[str]:
    """Returns the fields of a dataclass that have no default and are not ``given``."""
    if not dataclasses.is_dataclass(kind):
        return []
    none = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.init and field.default is field.default_factory is none and field.name not in given
    ]
