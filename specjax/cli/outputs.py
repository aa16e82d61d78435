"""Checks the places to which commands write before they begin, since what they do takes minutes."""

from __future__ import annotations

import os
from pathlib import Path


def check_file(option: str, file: str | os.PathLike) -> None:
    """Raises ``ValueError`` where no file can be written, beside its place or over what is there.

    Args:
      option: the option that names the file, for the error.
      file: the file, which may exist.
    """
    path = Path(file)
    folder = path.absolute().parent
    places = [folder, path] if path.exists() else [folder]
    if path.is_dir() or not folder.is_dir() or not all(os.access(x, os.W_OK) for x in places):
        raise ValueError(
            f"{option} {path}: no file can be written there; name a file in a folder that exists "
            "and that you may write to"
        )


def check_folder(option: str, folder: str | os.PathLike) -> None:
    """Raises ``ValueError`` where no folder can be made or filled.

    Args:
      option: the option that names the folder, for the error.
      folder: the folder, which may exist.
    """
    above = Path(folder).absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{option} {folder}: no folder can be made there; take another place")
