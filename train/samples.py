"""Files of rows that a target wrote (recipe ``regenerate``, ``.npz``).

A file records the fingerprints of its target and tokenizer, and how its rows were drawn. A drafter
that learns from the text of another target learns the wrong law, so such text is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from . import sharded, sources, tokenizer
from .config import ConfigError, DataConfig
from .request import REQUEST

RECORD = "record"  # the array of a file that holds its record as JSON


@dataclasses.dataclass(frozen=True)
class Samples:
    """Rows that a target wrote.

    Attributes:
      tokens: int32 ``[n, length + 1]``, padded with end-of-text.
      start, stop: int32 ``[n]``; the target wrote ``tokens[start:stop]``.
    """

    tokens: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @functools.cached_property
    def weight(self) -> np.ndarray:
        """The weights of predictions to learn from, float32 ``[n, length]``; padding has 0."""
        predicted = np.arange(1, self.tokens.shape[1])
        return (predicted < self.stop[:, None]).astype(np.float32)

    def batches(self, size: int) -> list[tuple]:
        """Returns batches ``(tokens [size, length + 1], weight [size, length])``.

        Only generated tokens have a weight. The last batch is padded with rows of weight 0.
        """
        predicted = np.arange(1, self.tokens.shape[1])
        weight = (predicted >= self.start[:, None]) & (predicted < self.stop[:, None])
        rows = np.arange(-(-len(weight) // size) * size)
        tokens = self.tokens[rows % len(weight)]
        weight = (weight[rows % len(weight)] & (rows < len(weight))[:, None]).astype(np.float32)
        return [(tokens[i : i + size], weight[i : i + size]) for i in rows[::size]]


def fingerprints(teacher, vocabulary) -> dict[str, str]:
    """Returns the fingerprints of a target's weights and of its tokenizer."""
    return {
        "target_fingerprint": teacher.checkpoint,
        "tokenizer_fingerprint": tokenizer.fingerprint(vocabulary),
    }


def check_of(what: str, record: Mapping, of: Mapping, way_out: str) -> None:
    """Raises ConfigError for a stored file that was made with another target or tokenizer.

    Args:
      what: the beginning of the message.
      record: the record of the file.
      of: the fields of the record that must be equal.
      way_out: the end of the message.
    """
    for name, own in of.items():
        if record.get(name) != own:
            raise ConfigError(
                f"{what} of another {name.replace('_', ' ')}: {record.get(name)} (target "
                f"{record.get('teacher')!r}), and this run has {own}: {way_out}"
            )


def record_of(path: Path) -> dict:
    """The record of a file of rows; empty where an earlier version wrote none."""
    with np.load(path) as arrays:
        return json.loads(str(arrays[RECORD])) if RECORD in arrays else {}


def write(path: Path, samples: Samples, record: Mapping) -> None:
    """Writes a file, whole or not at all; ``record`` includes the ``fingerprints``."""
    temporary = path.with_suffix(".tmp")
    arrays = {field.name: getattr(samples, field.name) for field in dataclasses.fields(samples)}
    with temporary.open("wb") as file:
        np.savez(file, **arrays, **{RECORD: json.dumps(record)})
    temporary.replace(path)


def read(path: str, of: Mapping | None = None, vocab_size: int | None = None) -> Samples:
    """Reads a file of ``regenerate``, or its shards.

    An old file without a record is accepted with a warning if its tokens are in the vocabulary: its
    text may be right, and took hours to write.

    Args:
      path: the file; or the name without the numbers of its shards.
      of: the ``fingerprints`` that the file must have; None: any.
      vocab_size: the size of the target's vocabulary; None: tokens are not checked.

    Raises:
      ConfigError: a file is missing, was written by another target or tokenizer or with other
        settings than the other shards, or holds tokens outside of the vocabulary.
    """
    parts, records = [], []
    anew = "run the recipe `regenerate` with this one, to another `output`"
    for file in sharded.shards_of(Path(path), "regenerate"):
        with np.load(file) as arrays:
            found = {field.name: arrays[field.name] for field in dataclasses.fields(Samples)}
        record = record_of(file)
        if record:
            check_of(f"the rows in {str(file)!r} are", record, of or {}, anew)
        elif of:
            sources.say_once(
                f"warning: {file} does not say which target wrote it; text of another one teaches "
                f"the wrong law. To be sure, {anew}"
            )
        records.append(record)
        largest = found["tokens"].max(initial=0)
        if vocab_size is not None and largest >= vocab_size:
            raise ConfigError(
                f"{file} holds the token {largest}, the target knows those below {vocab_size}: it "
                f"was written by another target; {anew}"
            )
        parts.append(found)
    # paths may differ
    settings = [{**record, "teacher": None, REQUEST: None} for record in records]
    if any(own != settings[0] for own in settings):
        raise ConfigError(
            f"the shards of {path} were written with different settings: {records}; write them "
            "anew, all with the same"
        )
    return Samples(**{name: interleaved([part[name] for part in parts]) for name in parts[0]})


def heldout_batches(
    paths: Sequence[str], of: Mapping, vocab_size: int, config: DataConfig
) -> dict[str, list[tuple]]:
    """Reads the files of ``eval_samples``.

    Args:
      paths: the files, or their names without the numbers of shards.
      of, vocab_size: see ``read``.
      config: the section ``data`` of the configuration.

    Returns:
      the batches of each file, see ``Samples.batches``, by the prefix of its measures.

    Raises:
      ConfigError: a file cannot be read, see ``read``, or has rows of another length.
    """
    sets = {}
    for path in paths:
        rows = read(path, of, vocab_size)
        length = rows.tokens.shape[1] - 1
        if length != config.length:
            raise ConfigError(
                f"eval_samples: {path!r} holds rows of {length} tokens, data.length="
                f"{config.length}: give that length, or have the recipe `regenerate` write rows of "
                "this one"
            )
        sets[f"{Path(path).stem}/"] = rows.batches(config.batch)
    return sets


def interleaved(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all shards in their order: shard i has the rows ``i::len(parts)``."""
    if len(parts) == 1:
        return parts[0]
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    joined = np.empty(shape, parts[0].dtype)
    for i, part in enumerate(parts):
        joined[i :: len(parts)] = part
    return joined
