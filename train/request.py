"""What an output was asked for: another request is not answered with what is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .config import ConfigError, defaults, differences, flatten

REQUEST = "request"  # the entry of an output's record with what was asked for


def request_of(config, unasked: Sequence[str]) -> dict:
    """What a configuration asks for, flattened: all fields but those ``unasked``, on which the
    output does not depend."""
    return {name: value for name, value in flatten(config).items() if name not in unasked}


def check_request(path: Path, record: Mapping, config, asked: Mapping) -> None:
    """Raises ConfigError if a finished output holds something else than what is asked for.

    A field that did not exist when the record was written had its default. A record of an earlier
    version, which does not say what was asked for, is accepted, and that is printed.

    Args:
      path: the output.
      record: its record, as JSON.
      config: the configuration of the recipe.
      asked: what the configuration asks for, see ``request_of``.
    """
    if REQUEST not in record:
        print(f"{path} does not say what was asked for: it is taken for what this command asks for")
        return
    usual = {name: value for name, value in defaults(type(config)).items() if name in asked}
    if changed := differences(usual | record[REQUEST], dict(asked)):
        raise ConfigError(
            f"output={config.output!r}: {path} holds what another command asked for (its fields -> "
            "these):\n  "
            + "\n  ".join(changed)
            + "\ngive another output, or remove that one to write it anew"
        )
