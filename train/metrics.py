"""Writes the measures of a run to JSON lines, CSV, TensorBoard, or Weights & Biases.

``log.jsonl`` is the record from which a run is resumed and its report is drawn; the others are
views of it, named by ``run.metrics``. A measure that was not taken at a step is missing, not zero.
"""

from __future__ import annotations

import csv
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from .config import ConfigError

LOG = "log.jsonl"


def read(path: Path) -> list[dict]:
    """Reads the rows of a log, without a last line that was cut short by a kill."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


class Log:
    """Appends one JSON object a line; lines past ``step`` (of a killed run) are dropped first.

    ``sinks`` are names of ``SINKS`` to which the same measures are written, and ``config`` is the
    flattened configuration of the run.

    Raises:
      ConfigError: a sink's library is not installed.
    """

    def __init__(
        self, folder: Path, step: int, sinks: Sequence[str] = (), config: dict | None = None
    ):
        path = folder / LOG
        kept = [row for row in read(path) if row["step"] <= step]
        others = [SINKS[name](folder, kept, config or {}) for name in sinks]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.replace(path)
        self._file, self._sinks = path.open("a", buffering=1), others

    def write(self, step: int, **values) -> None:
        row = {"step": step, **values}
        self._file.write(json.dumps(row) + "\n")
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


class NoLog:
    """Replaces ``Log`` in processes that do not write."""

    def write(self, step: int, **values) -> None:
        pass

    def close(self) -> None:
        pass


class Csv:
    """Writes ``metrics.csv``, with a column for each measure; a new measure rewrites the file."""

    def __init__(self, folder: Path, rows: list[dict], config: dict):
        del config
        self._path, self._rows = folder / "metrics.csv", list(rows)
        self._open()

    def _open(self) -> None:
        self._names = list(dict.fromkeys(name for row in self._rows for name in row))
        temporary = self._path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="") as file:
            table = csv.DictWriter(file, self._names)
            table.writeheader()
            table.writerows(self._rows)
        temporary.replace(self._path)
        self._file = self._path.open("a", buffering=1, newline="")
        self._table = csv.DictWriter(self._file, self._names)

    def write(self, row: dict) -> None:
        self._rows.append(row)
        if row.keys() <= set(self._names):
            self._table.writerow(row)
        else:
            self._file.close()
            self._open()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes event files to ``tensorboard/``; steps of a killed run after its checkpoint hide."""

    def __init__(self, folder: Path, rows: list[dict], config: dict):
        del config
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError:
            raise ConfigError(
                "run.metrics: 'tensorboard' needs tensorboardX, which is not installed: "
                "pip install tensorboardX, or leave it out"
            ) from None
        last = max((row["step"] for row in rows), default=0)
        where = folder / "tensorboard"
        self._writer = SummaryWriter(str(where), purge_step=last + 1 if where.is_dir() else None)

    def write(self, row: dict) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes to a run of wandb that has the name of the folder.

    A resumed run keeps its id, which is stored in ``wandb_id``. Project, entity and mode come from
    the environment variables of wandb.
    """

    def __init__(self, folder: Path, rows: list[dict], config: dict):
        del rows  # wandb ignores steps that it already has
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                "run.metrics: 'wandb' needs wandb, which is not installed: pip install "
                "'specjax[wandb]', or leave it out"
            ) from None
        file = folder / "wandb_id"
        if not file.is_file():
            file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            dir=str(folder), name=folder.name, id=file.read_text(), resume="allow", config=config
        )

    def write(self, row: dict) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


SINKS = {"csv": Csv, "tensorboard": TensorBoard, "wandb": WeightsAndBiases}
