"""Checkpoints by Orbax: atomic, asynchronous, and enough to go on bit for bit.

A checkpoint holds the state (parameters, optimiser, key, step) and the position in the data. The
resolved configuration lies beside them; a run goes on only under the configuration it began with.
Where a run keeps the best by a measure, those parameters lie beside them too.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from .config import ConfigError, differences


def record_config(folder: Path, flat: dict) -> None:
    """Writes ``config.json``, or refuses to mix two configurations in one folder."""
    path = folder / "config.json"
    if path.is_file():
        changed = differences(json.loads(path.read_text()), flat)
        if changed:
            raise ConfigError(
                f"run.folder={folder} holds a run with another configuration:\n  "
                + "\n  ".join(changed)
                + "\ngive another run.folder, or remove that one to start afresh"
            )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(flat, indent=2) + "\n")


@contextlib.contextmanager
def checkpoints(folder: Path, keep: int):
    """A ``Checkpointer`` of the last ``keep`` steps; leaving it waits for pending saves."""
    from orbax.checkpoint import v1 as ocp

    manager = ocp.training.Checkpointer(
        (folder / "checkpoints").absolute(),
        preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        cleanup_tmp_directories=True,  # what a killed run left half written
    )
    try:
        yield manager
    finally:
        manager.close()


def save(manager, step: int, state, batches) -> None:
    """Begins to save; returns once the values are copied, before they are on disk."""
    manager.save_checkpointables_async(step, {"state": state, "data": batches}, force=True)


def restore(manager, state, batches):
    """The latest state (shaped like ``state``), ``batches`` put to its position; else ``state``.

    Returns:
      ``(state, step)``, step 0 where nothing was saved.
    """
    if manager.latest is None:
        return state, 0
    step = manager.latest.step
    loaded = manager.load_checkpointables(step, {"state": state, "data": batches})
    return loaded["state"], step


class Best:
    """The parameters at the greatest value of a measure, in ``folder/best``.

    ``measure``: its name; empty: nothing is kept. ``rows``: of the log, up to the step the run goes
    on from; what a killed run measured beyond, it will measure again.
    """

    def __init__(self, folder: Path, measure: str, rows: list[dict]):
        self._path, self._measure = (folder / "best").absolute(), measure
        found = [(row[measure], -row["step"]) for row in rows if measure in row]
        value, step = max(found, default=(-math.inf, 0))
        self.value, self.step = value, -step

    def offer(self, step: int, measured: dict, params) -> None:
        """Keeps ``params`` where ``measured`` is greater than all before."""
        from orbax.checkpoint import v1 as ocp

        if self._measure and measured[self._measure] > self.value:
            ocp.save(self._path, params, overwrite=True)
            self.value, self.step = measured[self._measure], step

    def load(self, params):
        """The parameters kept, shaped like ``params``; ``params`` where none are."""
        from orbax.checkpoint import v1 as ocp

        if not self.step:
            return params
        print(f"the best {self._measure}, {self.value:.4f}, was at step {self.step}")
        return ocp.load(self._path, params)
