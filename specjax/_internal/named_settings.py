"""Settings that follow a name, as in ``lookahead:window=7,ngram=4``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .keywords import did_you_mean

WORDS = {"true": True, "false": False}
# the types that a setting may have
ACCEPTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def parse_settings(argument: str, text: str, called: str, kinds: Mapping[str, type]) -> dict:
    """Reads a text such as ``window=7,ngram=4``.

    Args:
      argument: what the user gave, as ``name=value``, for the error.
      text: what stands after the colon.
      called: whose settings they are, for the error.
      kinds: the type of each setting: int, float, str or bool (``true``, ``false``).

    Returns:
      the values by name.

    Raises:
      ValueError: an unknown setting, one that is given twice, or a value of another type.
    """
    found: dict[str, Any] = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name not in kinds or not value:
            known = ", ".join(f"{n} ({kind.__name__})" for n, kind in kinds.items()) or "none"
            meant = "" if name in kinds else did_you_mean(name, kinds, repr)
            raise ValueError(
                f"{argument}: {setting!r} is no setting of {called!r}; {meant}its settings, as "
                f"name=value, separated by commas and each once: {known}"
            )
        if name in found:
            raise ValueError(f"{argument}: {name!r} is given twice")
        kind = kinds[name]
        try:
            found[name] = WORDS[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError):
            raise ValueError(f"{argument}: {name}={value!r} is not {ACCEPTED[kind]}") from None
    return found
