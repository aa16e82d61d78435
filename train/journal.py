"""A file of measurements that a run goes on from: JSON lines, each stored when it is known.

The first line says what the measurements depend on, so that a run with another target or other text
is refused. A last line that was cut short by a kill is dropped. With several processes, the first
one writes.
"""

from __future__ import annotations

import json
from pathlib import Path

from .config import ConfigError
from .scale import is_first, wait


class Journal:
    """The measurements in a file, which is read first and then extended.

    Args:
      path: the file.
      about: JSON values on which the measurements depend.

    Attributes:
      rows: the measurements.

    Raises:
      ConfigError: the file holds measurements that depend on something else.
    """

    def __init__(self, path: Path, about: dict):
        self.path, self.rows = path, list[dict]()
        about = json.loads(json.dumps(about))
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith("\n")]
        if whole and json.loads(whole[0]) != about:
            raise ConfigError(
                f"{path} holds measurements of {json.loads(whole[0])}, and this run is of {about}: "
                "give another folder, or remove that file to start afresh"
            )
        self.rows = [json.loads(line) for line in whole[1:]]
        if is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(whole) or json.dumps(about) + "\n", encoding="utf-8")
            temporary.replace(path)
        wait(path.name)

    def add(self, row: dict) -> None:
        """Stores a measurement; ``rows`` has it as it is read again."""
        line = json.dumps(row)
        self.rows.append(json.loads(line))
        if is_first():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
