"""Runs the rows of a suite, writes each result at once, and continues where a run stopped."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
import traceback
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax import kernels

from . import report, rows, suites
from .peers import MissingPeerError

HERE = Path(__file__).parent
REHEARSED = {  # suites that run in miniature too, and how
    "gpu": {"pair": "tiny"},
    "cpu-peers": {"pair": "tiny", "prompts": 1, "contexts": [64, 512], "quiet": False},
}
KEPT, ASIDE = "rows.jsonl", "rows.before-{}.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def run_suite(
    name: str,
    options: dict,
    *,
    folder: Path,
    cache: Path,
    rehearse: bool = False,
    fresh: bool = False,
    only: str | None = None,
) -> int:
    """Measures the rows that are not measured yet; writes table and plots, also when interrupted.

    Args:
      name: name of the suite.
      options: options of the suite, see ``suites.py``.
      folder: folder of the results.
      cache: folder for the checkpoints of the model pairs that are made.
      rehearse: runs a suite of ``REHEARSED`` in miniature; the gpu suite in float32, since CPUs are
        slow in bfloat16.
      fresh: measures all rows anew; the earlier rows are set aside.
      only: measures the rows of this kind anew and keeps all others, with their header.

    Returns:
      0, or 1 if a row failed. A row whose peer is not installed is skipped, which is no failure.

    Raises:
      ValueError: see ``suites.rows_of``; the gpu suite without a GPU; a rehearsal of another
        suite.
    """
    if rehearse and name not in REHEARSED:
        raise ValueError(
            f"--rehearse is for the suites {' and '.join(REHEARSED)}, in miniature; {name} runs as "
            "it is"
        )
    if rehearse:
        options = REHEARSED[name] | options
    wanted = suites.rows_of(name, **options)
    if name == "gpu" and not rehearse and kernels.platform() != "gpu":
        raise ValueError(
            f"the suite gpu needs a GPU; the device in use is a {_device_kind()}: install "
            '".[cuda]" or ".[rocm]" where there is one, or rehearse it in miniature: --rehearse'
        )
    bench = rows.Bench(
        cache=cache,
        dtype="bfloat16" if name == "gpu" and not rehearse else "float32",
        on_device=name == "gpu",
    )
    header = {"suite": name, "options": options, "rehearsal": rehearse, **where()}
    if only and only not in {row["kind"] for row in wanted}:
        raise ValueError(
            f"--only {only}: the suite {name} has {', '.join({row['kind']: 0 for row in wanted})}"
        )
    kept = Kept(folder, header, fresh, only)
    if only:
        others = [line["row"] for line in kept.lines]
        wanted = [*others, *(row for row in wanted if row["kind"] == only and row not in others)]
    todo = [row for row in wanted if row not in kept.finished]
    console = Console(stderr=True)
    if len(todo) < len(wanted):
        console.print(
            f"{len(wanted) - len(todo)} of {len(wanted)} rows were measured before: continuing"
        )
    clean = True
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task(name, total=len(todo))
            for row in todo:
                progress.update(task, description=f"{name}: {report.label(row)}")
                outcome = _measure(row, bench)
                kept.add({"row": row, **outcome})
                clean &= "failed" not in outcome
                progress.advance(task)
                console.print(_line(row, outcome), markup=False, highlight=False)
    finally:
        report.write(folder, kept.header, kept.outcomes(wanted))
    console.print(f"{folder / 'README.md'}", highlight=False)
    return 0 if clean else 1


class Kept:
    """The measured rows of a folder: one JSON line each, after a first line with their origin."""

    def __init__(self, folder: Path, header: dict, fresh: bool, only: str | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.header, self.lines = folder / KEPT, header, []
        if self.file.exists():
            found = _read(self.file)
            same = found and _identity(found[0]) == _identity(header)
            if found and only:
                self.header = found[0]
                self.lines = [
                    line
                    for line in found[1:]
                    if line["row"]["kind"] != only
                    or line.get("figures", {}).get("commit") == header["commit"]  # it goes on
                ]
            elif same and not fresh:
                self.header, self.lines = found[0], found[1:]
            else:
                os.replace(self.file, _unused(folder))
        # written anew, without the rest of an interrupted write
        self._rewrite()

    def _rewrite(self) -> None:
        beside = self.file.with_suffix(".new")
        beside.write_text("".join(json.dumps(x) + "\n" for x in (self.header, *self.lines)))
        os.replace(beside, self.file)

    @property
    def finished(self) -> list[dict]:
        """Rows that have figures; skipped and failed rows are tried again."""
        return [line["row"] for line in self.lines if "figures" in line]

    def add(self, line: dict) -> None:
        """Writes a row at once."""
        line = plain_numbers(line)
        self.lines.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def outcomes(self, wanted: list[dict]) -> list[dict]:
        """The last line of each row of ``wanted`` that has one, in the order of ``wanted``."""
        last = {json.dumps(line["row"], sort_keys=True): line for line in self.lines}
        keys = [json.dumps(row, sort_keys=True) for row in wanted]
        return [last[key] for key in keys if key in last]


def plain_numbers(value):
    """``value`` with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(k): plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(file: Path) -> list[dict]:
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # cut off while it was written
            break
    return lines


def _unused(folder: Path) -> Path:
    """A file name for the rows that are set aside, which no earlier ones have."""
    count = len(list(folder.glob(ASIDE.format("*"))))
    return folder / ASIDE.format(count + 1)


def _identity(header: dict) -> str:
    """The part of a header that must be equal for rows of two runs to stand in one table."""
    return json.dumps({k: v for k, v in header.items() if k != "date"}, sort_keys=True)


def _measure(row: dict, bench: rows.Bench) -> dict:
    """Measures a row: ``figures``, or why it was ``skipped`` or ``failed``; and its cost."""
    begin, used = time.perf_counter(), time.process_time()
    try:
        outcome = {"figures": rows.run(row, bench)}
    except MissingPeerError as error:
        outcome = {"skipped": str(error)}
    except Exception as error:  # a failing row must not stop the others
        traceback.print_exc()
        outcome = {"failed": f"{type(error).__name__}: {error}"[:500]}
    spent = time.perf_counter() - begin
    outcome["seconds"] = round(spent, 1)
    outcome["cores"] = round((time.process_time() - used) / spent, 2)
    return outcome


def redraw(folder: Path) -> None:
    """Writes table and plots anew from the rows of a folder, wherever they were measured.

    Raises:
      ValueError: the folder holds no rows.
    """
    lines = _read(folder / KEPT) if (folder / KEPT).exists() else []
    if not lines:
        raise ValueError(f"--redraw: {folder} holds no {KEPT}: run the suite first")
    last = {json.dumps(line["row"], sort_keys=True): line for line in lines[1:] if "row" in line}
    report.write(folder, lines[0], list(last.values()))


def _line(row: dict, outcome: dict) -> str:
    reason = outcome.get("skipped") or outcome.get("failed")
    word = "skipped" if "skipped" in outcome else "FAILED"
    what = f"{word}: {reason}" if reason else report.summary(row, outcome["figures"])
    return f"{report.label(row)}: {what} ({outcome['seconds']:.0f} s)"


def _device_kind() -> str:
    """The kind of the device in use, in JAX's words."""
    return next(iter(jnp.zeros(()).devices())).device_kind


def where() -> dict:
    """The header of a run: device, machine, versions, commit, date."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        model = names[0] if names else model
    return {
        "device": _device_kind(),
        "processor": model,
        "cores": os.cpu_count(),
        "threads": os.environ.get("NPROC", "all"),
        "kernels": kernels.current().name,
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit, with a hash of uncommitted changes; ``unknown`` outside of a repository."""

    def git(*arguments):
        command = ["git", *arguments]
        return subprocess.run(command, cwd=HERE, capture_output=True, check=True).stdout

    try:
        name = git("rev-parse", "--short", "HEAD").decode().strip()
        changed = git("diff", "HEAD", "--", "../specjax", ".", ":!results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" + hashlib.sha256(changed).hexdigest()[:6] if changed else "")
