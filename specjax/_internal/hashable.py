"""Objects that are static arguments of compiled programs."""

from __future__ import annotations


def check_hashable(name: str, value: object) -> None:
    """Raises ``TypeError`` for an object that cannot be a static argument of a compiled program.

    Args:
      name: the argument that the user gave.
      value: its value.
    """
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{name}: its type {type(value).__name__} cannot be hashed ({error}): make it a frozen "
            "dataclass, @dataclasses.dataclass(frozen=True), without arrays and lists among its "
            "fields"
        ) from None
