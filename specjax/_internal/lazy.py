"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable, Callable]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
      package: the package's ``__name__``.
      names: of each public name the module that holds it, relative to the package; a module that
        is public itself stands for its own name.
    """

    def get(name: str):
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{names[name]}", package)
        return module if names[name] == name else getattr(module, name)

    return get, lambda: sorted(names)
