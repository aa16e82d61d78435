"""The output of a long run: one JSON line a finished prompt, kept at once, never twice.

Each line says what it was made with, so that a run that goes on never joins what does not belong
together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two runs into one file are then the user's to avoid
    fcntl = None

MADE_WITH = "made_with"  # field of a line: {what: hash}
SYNC_EVERY = 1.0  # seconds: to wait for the disk at each line would be felt


class OutputFile:
    """An output file, open for appending; a context manager, which one process may enter.

    Args:
      file: need not exist.
      made_with: of each index, ``{what: hash}``: what its line must have been made with.

    Attributes:
      there: by index, the lines that are there.

    Raises:
      ValueError: the file holds something else, or lines made with something else, or of indices
        that are not in ``made_with``; another process writes to it.
      OSError: it cannot be written.
    """

    def __init__(self, file: str | os.PathLike, made_with: Mapping[int, Mapping[str, str]]):
        self.name, self._made_with = os.fspath(file), made_with
        self._synced = time.monotonic()
        self._file = os.open(Path(file), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
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
        """Appends finished prompts (``index`` and whatever else), in one write. Behind it the end
        of the process loses nothing, that of the machine what came after the last sync."""
        whole = [{**line, MADE_WITH: self._made_with[line["index"]]} for line in lines]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in whole)
        # lone surrogates, if a tokenizer makes any, are no UTF-8
        left = memoryview(text.encode(errors="replace"))
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if time.monotonic() - self._synced > SYNC_EVERY:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise OSError(
                f"output {self.name}: {error.strerror}. The prompts that are in the file are kept: "
                "make room, and the same call goes on from there"
            ) from None

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"output {self.name}: another process is writing to it") from None

    def _read(self) -> dict[int, dict]:
        """The lines that are there; what an interrupted write left at the end is cut off."""
        content = Path(self.name).read_bytes()
        whole = content.rfind(b"\n") + 1
        there = {}
        for number, text in enumerate(content[:whole].splitlines(), start=1):
            where = f"output {self.name}, line {number}"
            try:
                line = json.loads(text)
                index, made_with = line["index"], line[MADE_WITH]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{where} is none of serve_offline's: name a file that does not exist, or one "
                    "that it began"
                ) from None
            self._check(where, index, made_with)
            there[index] = line
        if whole < len(content):
            if not there and content[:1] != b"{":
                raise ValueError(f"output {self.name} holds something else: name another file")
            os.ftruncate(self._file, whole)
        return there

    def _check(self, where: str, index: int, made_with) -> None:
        if index not in self._made_with:
            raise ValueError(
                f"{where} is of prompt {index}, which is not among the prompts (or is broken): go "
                "on with the prompts of before, or name another output"
            )
        expected = self._made_with[index]
        other = [what for what in expected if made_with.get(what) != expected[what]]
        if other:
            what = " and ".join(other).replace("_", " ")
            raise ValueError(
                f"{where} (prompt {index}) was made with other {what}: go on with those of before, "
                "or name another output"
            )
