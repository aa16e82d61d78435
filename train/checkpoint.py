"""Atomic, asynchronous checkpoints by Orbax, from which a run is resumed bit for bit.

A checkpoint holds the state (parameters, optimizer, key, step) and the position in the data. The
resolved configuration is stored in the same folder; a run is resumed only with the configuration
with which it began. If a run keeps the best parameters by a measure, these are stored there too.
The last act of a run, after its export and its report, is to write ``finished.json``.

With several processes, each process writes its part of every array, and all see one disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import jax
from safetensors import SafetensorError

from .config import ConfigError, defaults, differences, settled
from .scale import by_first, is_first

CONFIG = "config.json"  # the file of a run's configuration
FINISHED = "finished.json"  # the file with the configuration of a run that has finished
# how the names end of all measures whose best value is the least
LESS_IS_BETTER = ("loss", "heldout_bits_per_byte", "heldout_repeated", "squared_error", "tv")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class NotWritten(OSError):
    """The disk is full; earlier checkpoints are whole."""


_HELD: set[Path] = set()  # the folders that this process holds, see ``alone``
WAYS_OUT = "give another run.folder, or remove that one to start afresh"


def recorded(folder: Path, way_out: str = WAYS_OUT) -> dict:
    """The configuration of the run in a folder; empty where there is none.

    Raises:
      ConfigError: the file is damaged; the message ends with ``way_out``.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"run.folder={folder}: {CONFIG} is no JSON ({error}): {way_out}"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"run.folder={folder}: {CONFIG} holds no configuration: {way_out}")
    return found


@contextlib.contextmanager
def alone(folder: Path):
    """A context in which no other process trains in a folder, which is made if it is not there.

    A context within another of the same folder changes nothing, so that a command holds the folder
    from before the first step until what it trained is exported. A folder that was made, and into
    which nothing was written, is removed. The system ends the lock with the process. Where the
    disk has no locks, and where several processes train together, nothing is checked.

    Raises:
      ConfigError: another process trains there.
    """
    place = folder.resolve()
    # asked in this order: counting processes starts the devices, which many recipes do not need
    several = jax.distributed.is_initialized() and jax.process_count() > 1
    if fcntl is None or place in _HELD or several:
        yield
        return
    missing = [path for path in (place, *place.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run.folder={folder}: another run is training there; wait for it, stop it, "
                    "or give another run.folder"
                ) from None
        for path in reversed(missing):
            stack.callback(_remove_empty, path)
        _HELD.add(place)
        stack.callback(_HELD.discard, place)
        yield


def _remove_empty(folder: Path) -> None:
    """Removes a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def check_config(folder: Path, flat: dict) -> None:
    """Raises ConfigError if a folder holds a run of another recipe or another configuration."""
    if (folder / CONFIG).is_file():
        old, ways = recorded(folder), WAYS_OUT
        theirs, ours = old.get("recipe"), flat.get("recipe")
        if theirs and ours and theirs != ours:
            raise ConfigError(
                f"run.folder={folder} holds a run of the recipe {theirs!r}, this one is of "
                f"{ours!r}: {ways}"
            )
        kind = _kind(ours)
        if kind is not None:
            meant = {name: value for name, value in defaults(kind).items() if name in flat}
            old, flat = meant | settled(kind, old), settled(kind, flat)
        changed = differences(old | {"recipe": ours}, flat | {"recipe": ours})
        if changed:
            raise ConfigError(
                f"run.folder={folder} holds a run with another configuration:\n  "
                + "\n  ".join(changed)
                + f"\n{ways}"
            )


def _kind(recipe: str | None) -> type | None:
    """The configuration of a recipe; None: it is from outside. Its defaults are what a run of an
    earlier version, in which a field did not exist yet, meant by its absence."""
    module = sys.modules.get(f"{__package__}.{recipe}")
    return getattr(module, "Config", None)


def is_done(folder: Path, flat: dict) -> bool:
    """Whether a run of exactly this configuration has finished: its last step is saved, and it was
    exported, measured and reported after that, see ``mark_finished``.

    A report says nothing of this: it may be drawn before the last export, and of a run that was
    interrupted. A run that an earlier version finished has a report and no mark, and counts as not
    finished; the same command then exports and measures its last step again, and marks it.
    """
    marked = folder / FINISHED
    if not (folder / CONFIG).is_file() or not marked.is_file():
        return False
    own = json.loads(json.dumps(flat))
    last = folder / "checkpoints" / str(flat.get("run.steps"))
    return recorded(folder) == own and last.is_dir() and marked.read_text() == _text_of(flat)


@by_first
def mark_finished(folder: Path, flat: dict) -> None:
    """Marks a run as finished, which is the last act of a recipe: after all exports and reports.

    Args:
      folder: the folder of the run.
      flat: its configuration, as it was given to ``record_config``.
    """
    _write(folder / FINISHED, flat)


def record_config(folder: Path, flat: dict) -> None:
    """Writes ``config.json``, or refuses to mix two recipes or configurations in one folder.

    Each run calls this before its first step, also when it is resumed, so this removes the mark
    ``finished.json`` of an earlier end.
    """
    check_config(folder, flat)
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FINISHED).unlink(missing_ok=True)
        _write(folder / CONFIG, flat)


def _text_of(flat: dict) -> str:
    """The text of a file that holds a flattened configuration."""
    return json.dumps(flat, indent=2) + "\n"


def _write(path: Path, flat: dict) -> None:
    """Writes a flattened configuration, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_text_of(flat), encoding="utf-8")
    temporary.replace(path)


def _steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, without unfinished ones."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


def _no_room(error: Exception) -> str:
    """Returns the system's message if the disk is full; an empty string for all other errors."""
    number = getattr(error, "errno", None)
    if not isinstance(error, OSError):  # of the libraries that write arrays
        found = re.search(r"(?:os_error_code='|\(os error )(\d+)", str(error))
        number = int(found[1]) if found else None
    return os.strerror(number) if number in NO_ROOM else ""


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record contains something that the message of ``NotWritten`` does not."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not (error and _no_room(error)) and not _no_room(ValueError(record.getMessage()))


@contextlib.contextmanager
def writing(folder: Path):
    """A context that writes to a run's folder.

    Each of Orbax's threads logs a full disk with a traceback of its own. These records are left
    out, since the one error that is raised says the same.

    Raises:
      NotWritten: the disk takes no more.
    """
    log = logging.getLogger("absl")  # the logger of Orbax
    log.addFilter(_is_news)
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = _no_room(error)
        if not reason:
            raise
        steps = _steps(folder / "checkpoints")
        kept = f"that of step {steps[-1]} is whole" if steps else "there is none yet"
        where = getattr(error, "filename", None) or folder
        raise NotWritten(
            f"{where} could not be written to: {reason}. Of the checkpoints, {kept}; make room, "
            "and the same command goes on from there"
        ) from error
    finally:
        log.removeFilter(_is_news)


@contextlib.contextmanager
def checkpoints(folder: Path, keep: int):
    """A context with a ``Checkpointer`` of the last ``keep`` steps; its end waits for saves."""
    from orbax.checkpoint import v1 as ocp

    manager = ocp.training.Checkpointer(
        (folder / "checkpoints").absolute(),
        preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        cleanup_tmp_directories=True,  # unfinished files of a killed run
    )
    try:
        yield manager
    finally:
        manager.close()


def save(manager, step: int, state, batches) -> None:
    """Begins to save, and returns when the values are copied, before they are on disk."""
    manager.save_checkpointables_async(step, {"state": state, "data": batches}, force=True)


def check(manager) -> None:
    """Raises the error of a save that failed in the background, if there is one."""
    if jax.process_count() == 1 and not manager.is_saving_in_progress():
        manager.wait()  # several processes would wait for each other: they check at the next save


def restore(manager, state, batches):
    """Restores the latest checkpoint, and sets ``batches`` to its position in the data.

    Returns:
      ``(state, step)``; the given ``state`` and step 0 if nothing was saved.

    Raises:
      ConfigError: the checkpoint was saved by another number of processes, each of which has its
        own position in the data; or it cannot be read.
    """
    if manager.latest is None:
        return state, 0
    step, count = manager.latest.step, jax.process_count()
    places = (manager.directory / str(step) / "data").glob("process_*-of-*.json")
    saved = {int(path.stem.rpartition("-")[2]) for path in places}
    if saved and count not in saved:
        raise ConfigError(
            f"{manager.directory / str(step)} was saved by {max(saved)} processes, each with its "
            f"own place in the data, and here are {count}: go on with as many as saved it, or give "
            "another run.folder"
        )
    try:
        loaded = manager.load_checkpointables(step, {"state": state, "data": batches})
    except (OSError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # of many kinds, and with whole arrays in its words
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
        earlier = [one for one in _steps(Path(manager.directory)) if one < step]
        then = f"goes on from step {earlier[-1]}" if earlier else "begins with step 1"
        raise ConfigError(
            f"{manager.directory / str(step)} cannot be read ({reason}). If it is damaged, move "
            f"that folder away, and the same command {then}; if another version wrote it, give "
            "another run.folder"
        ) from error
    return loaded["state"], step


def check_measure(measure: str, measured: Iterable[str]) -> None:
    """Raises ConfigError if ``measure`` is not one of those that were ``measured``."""
    known = list(measured)
    if measure not in known:
        raise ConfigError(
            f"run.best={measure!r} is not measured; measured are {', '.join(known)}: the same "
            "command with one of these goes on from here"
        )


class Best:
    """Keeps the parameters with the best value of a measure in ``folder/best/STEP``.

    The best value is the greatest, or the least of what ``LESS_IS_BETTER`` names.

    Args:
      measure: the name of the measure; empty: nothing is kept.
      rows: the rows of the log up to the step at which the run is resumed; what a killed run
        measured after it will be measured again. A row whose weights were not kept, because the run
        had another ``run.best`` then, does not count and is printed.
    """

    def __init__(self, folder: Path, measure: str, rows: list[dict]):
        self._folder, self._measure = (folder / "best").absolute(), measure
        self._sign = -1 if measure.endswith(LESS_IS_BETTER) else 1
        self.value, self.step = -self._sign * math.inf, 0
        kept = _steps(self._folder)
        for row in rows:
            if row["step"] in kept and self._is_better(row.get(measure)):
                self.value, self.step = row[measure], row["step"]
        rest = [row for row in rows if row["step"] not in kept]
        if lost := [row for row in rest if self._is_better(row.get(measure))]:
            row = max(lost, key=lambda row: self._sign * row[measure])
            print(
                f"{measure} was {row[measure]:.4f} at step {row['step']}, but no weights of then "
                "were kept; the best is sought from here on"
            )

    def _is_better(self, value: float | None) -> bool:
        return value is not None and self._sign * (value - self.value) > 0

    def offer(self, step: int, measured: dict, params) -> None:
        """Keeps ``params`` if their measure is better than all before.

        Raises:
          ConfigError: ``measured`` does not hold the measure.
        """
        from orbax.checkpoint import v1 as ocp

        if self._measure:
            check_measure(self._measure, measured)
        if self._is_better(measured.get(self._measure)):
            ocp.save(self._folder / str(step), params, overwrite=True)
            self.value, self.step = measured[self._measure], step
            self._clear()

    def _clear(self) -> None:
        """Removes parameters that are no longer the best.

        Those are kept that would be the best if the run were killed and resumed from its last
        checkpoint.
        """
        known, saved = _steps(self._folder), _steps(self._folder.parent / "checkpoints")
        needed = max((step for step in known if saved and step <= saved[-1]), default=0)
        for step in known:
            if step < needed and is_first():
                shutil.rmtree(self._folder / str(step))

    def load(self, params):
        """Returns the kept parameters, or ``params`` if there are none."""
        from orbax.checkpoint import v1 as ocp

        if not self.step:
            return params
        print(f"the best {self._measure}, {self.value:.4f}, was at step {self.step}")
        return ocp.load(self._folder / str(self.step), params)
