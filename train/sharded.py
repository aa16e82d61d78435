"""Outputs of a recipe that several processes write, each its own shard of one output."""

from __future__ import annotations

import re
from pathlib import Path

from .config import ConfigError


def shard_of(path: Path, shard: int, shards: int) -> Path:
    """The file of one shard: ``samples.npz`` -> ``samples.0-of-2.npz``."""
    return path if shards == 1 else path.with_name(f"{path.stem}.{shard}-of-{shards}{path.suffix}")


def num_shards(path: Path) -> int:
    """Returns into how many shards an output is divided, even if some of them are missing; 0: it
    has none."""
    named = re.compile(rf"{re.escape(path.stem)}\.\d+-of-(\d+){re.escape(path.suffix)}")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    counts = [int(found[1]) for file in there if (found := named.fullmatch(file.name))]
    return max(counts, default=0)


def shards_of(path: Path, recipe: str, holds: str = "") -> list[Path]:
    """Returns the file that a recipe wrote to ``path``, or all of its shards.

    Args:
      path: the output of the recipe.
      recipe: the name of the recipe, for errors.
      holds: the file that a finished folder holds; empty: ``path`` is a file.

    Raises:
      ConfigError: a file or shard is missing.
    """
    if (path / holds).is_file():
        return [path]
    count = num_shards(path)
    if not count:
        raise ConfigError(
            f"nothing at {str(path)!r}: run the recipe `{recipe}` first, with output={path}"
        )
    wanted = [shard_of(path, i, count) for i in range(count)]
    missing = [file for file in wanted if not (file / holds).is_file()]
    if missing:
        raise ConfigError(
            f"of the {count} shards of {path} {len(missing)} are missing, the first is "
            f"{missing[0].name}: run the recipe `{recipe}` with shard="
            f"{wanted.index(missing[0])} shards={count}"
        )
    return wanted
