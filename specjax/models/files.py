"""The JSON files of a model's folder."""

from __future__ import annotations

import json
import os
from pathlib import Path


def read_json(folder: str | os.PathLike, name: str) -> dict:
    """Reads one JSON object.

    Raises:
      FileNotFoundError: the folder or the file is missing.
      ValueError: the file is not valid JSON, or holds something else than an object.
    """
    path = Path(folder) / name
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder")
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {name} ({holdings(path.parent)})")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def holdings(folder: Path) -> str:
    """Lists what is in a folder, for an error about a file that is missing."""
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    # the folder of a training run, which has its model or heads in a folder of their own
    inside = folder / "model"
    meant = f"did you mean {inside}? " if (inside / "config.json").is_file() else ""
    return f"{meant}it holds: {', '.join(names[:12]) or 'nothing'}{more}"
