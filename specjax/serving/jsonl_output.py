"""The output of a long run: one JSON line for each finished prompt, written at once and only once.

Each line holds hashes of the model, the drafter and the options with which it was made, so that a
resumed run never mixes texts of different models or options.
"""

from __future__ import annotations

import json
import operator
import os
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .identity import SETTINGS, differing

try:
    import fcntl
except ImportError:  # Windows has no locks: the user must not run two processes on one file
    fcntl = None

MADE_WITH = "made_with"  # field of a line: {what: hash}
BEGINNING = b'{"index": '  # of each line, with which an incomplete one must agree
SYNC_EVERY = 1.0  # seconds; waiting for the disk after each line would slow the run down


def as_written(value: Any) -> Any:
    """Returns what is read of ``value`` where it is a part of a line."""
    return json.loads(_encoded(value))


def _encoded(value: Any) -> bytes:
    # lone surrogates, which a tokenizer may produce, cannot be written as UTF-8
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


class OutputFile:
    """An output file, open for appending; a context manager that only one process may hold.

    Args:
      file: the name of the file; it is created if it does not exist.
      made_with: for each index of a prompt, ``{what: hash}``: the model, the drafter and the
        options with which its line must have been made.

    Attributes:
      there: the lines that the file held when it was opened, by the index of their prompt.

    Raises:
      ValueError: it is a device or a pipe; it holds other content, lines that were made with
        another model or other options, or lines of indices that are not in ``made_with``; or
        another process has it open.
      OSError: the file cannot be written.
    """

    def __init__(self, file: str | os.PathLike, made_with: Mapping[int, Mapping[str, Any]]):
        self.name, self._made_with = os.fspath(file), made_with
        self._synced = time.monotonic()
        try:
            self._file = os.open(Path(file), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise type(error)(f"output {self.name}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(
                    f"output {self.name} is no ordinary file, from whose lines a run could go on: "
                    "name a file"
                )
            self._lock()
            self.there = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def add(self, lines: Iterable[Mapping]) -> None:
        """Appends finished prompts in one write.

        After the call, the end of the process loses no line; the end of the machine loses the lines
        that were written after the last sync (at most ``SYNC_EVERY`` seconds before).

        Args:
          lines: for each prompt its ``index`` and the further fields of its line.

        Raises:
          OSError: the file cannot be written.
        """
        whole = [{**line, MADE_WITH: self._made_with[line["index"]]} for line in lines]
        left = memoryview(b"".join(_encoded(line) + b"\n" for line in whole))
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if time.monotonic() - self._synced > SYNC_EVERY:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise OSError(
                f"output {self.name}: {error.strerror}. The finished prompts in the file are kept: "
                "make room, then repeat the call, which goes on from there"
            ) from None

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"output {self.name}: another process is writing to it") from None

    def _read(self) -> dict[int, dict]:
        """Returns the lines of the file; an incomplete line at its end is cut off."""
        content = Path(self.name).read_bytes()
        whole = content.rfind(b"\n") + 1
        there = {}
        for number, text in enumerate(content[:whole].splitlines(), start=1):
            where = f"output {self.name}, line {number}"
            try:
                line = json.loads(text)
                index, made_with = operator.index(line["index"]), {**line[MADE_WITH]}
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{where} was not written by serve_offline: name a file that it wrote, "
                    "or one that does not exist"
                ) from None
            self._check(where, index, made_with)
            there[index] = line
        if whole < len(content):
            rest = content[whole:].rstrip(b"\0")  # which a disk may leave that lost its power
            if not BEGINNING.startswith(rest[: len(BEGINNING)]):
                raise ValueError(
                    f"output {self.name} was not written by serve_offline: name another file"
                )
            os.ftruncate(self._file, whole)
        return there

    def _check(self, where: str, index: int, made_with) -> None:
        if index not in self._made_with:
            raise ValueError(
                f"{where} is the text of prompt {index}, which is not among the prompts (or is "
                "broken): give the same prompts as before, or name another output"
            )
        expected = self._made_with[index]
        hashes = [what for what in expected if what != SETTINGS]
        other = [what for what in hashes if made_with.get(what) != expected[what]]
        if other:
            what = " and ".join(other).replace("_", " ")
            pairs = differing(made_with.get(SETTINGS, {}), expected[SETTINGS])
            old, new = (", ".join(side) for side in zip(*pairs, strict=True)) if pairs else ("", "")
            values = f" ({old} then, {new} now)" if pairs and SETTINGS in made_with else ""
            raise ValueError(
                f"{where} (prompt {index}) was made with another {what}{values}: give the same as "
                "before, or name another output"
            )
