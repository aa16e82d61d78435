"""Checkpoints by Orbax: atomic, asynchronous, and enough to go on bit for bit.

A checkpoint holds the state (parameters, optimiser, key, step) and the position in the data. The
resolved configuration lies beside them; a run goes on only under the configuration it began with.
"""

from __future__ import annotations

import contextlib
import json
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
