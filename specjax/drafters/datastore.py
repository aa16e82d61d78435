"""A corpus on disk that is searched where it lies: places sorted by what leads up to them.

A datastore is a folder of two files, of which a search reads a few kilobytes, and ``meta.json``::

    tokens.bin    int32, the texts one after the other, -1 after each
    order.bin     uint32, all places in the order of their contexts

A context is the tokens up to a place, the nearest first (``context_index.py`` keeps the same order
on the device). The places that share most tokens with the end of a text are neighbours, and one
binary search finds them: ``log2(n)`` steps, each of which reads one place and ``depth`` tokens.
They are read by offset and not mapped into memory, so that what was read takes no memory of the
process, and a file that is cut short later is an error and not the end of the process.

References: REST, arXiv 2311.08252, section 3 (there a suffix array, of which the first matches in
lexicographic order are taken; here those with the longest match).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

VERSION = 2
CHUNK = 2**22  # places that are sorted together, with up to 90 bytes for each
DEPTH = 18  # tokens of a context by which places are sorted
PACKED = 3  # tokens in a key of 64 bits, 21 bits each
SAMPLED = 2**18  # about so many places tell where the order is divided
MOST_PARTS = 1000  # files into which places are divided at once
REMEMBERED = 12  # steps of a search whose contexts are kept, no more than 2 ** 12
MOST_TOKENS = 2**32 - 1
END = -1
END_BYTES = struct.pack("<i", END)


def sorted_places(tokens: np.ndarray, depth: int) -> np.ndarray:
    """int32 ``[n]``: the places of ``tokens`` int32 ``[n]`` in the order of their contexts."""
    backwards = np.zeros(len(tokens) + depth, ">u4")  # strings of bytes are compared fast
    backwards[: len(tokens)] = tokens[::-1] + 1
    windows = np.lib.stride_tricks.sliding_window_view(backwards, depth)
    contexts = windows[: len(tokens)][::-1]
    strings = np.ascontiguousarray(contexts).view(f"S{4 * depth}")[:, 0]
    return np.argsort(strings, kind="stable").astype(np.int32)


class Datastore:
    """A datastore that was built. Opening it reads ``meta.json`` alone.

    Attributes:
      num_tokens: tokens that it holds, one after each text included.
      depth: tokens of a context by which places are sorted.
      tokenizer: the fingerprint of the tokenizer that made the tokens.

    Raises:
      FileNotFoundError: there is no datastore.
      ValueError: it is truncated, of another version, or none at all.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            meta = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
            version = int(meta["version"])  # another one may have other names beside it
            if version == VERSION:
                self.num_tokens, self.depth = int(meta["num_tokens"]), int(meta["depth"])
                self.tokenizer = str(meta["tokenizer"])
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{self.path} is no datastore (a folder with meta.json); make one with "
                "specjax datastore build"
            ) from None
        except KeyError as error:
            raise ValueError(
                f"{self.path}/meta.json is not that of a datastore: it has no {error}; build the "
                "datastore again with specjax datastore build"
            ) from None
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{self.path}/meta.json is not that of a datastore ({error}); build it again with "
                "specjax datastore build"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"{self.path}/meta.json: its version is {version}, this installation reads "
                f"{VERSION}; build the datastore again with specjax datastore build"
            )
        for name in ("tokens.bin", "order.bin"):
            found = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if found != 4 * self.num_tokens:
                raise ValueError(
                    f"{self.path}/{name} has {found} bytes, of {4 * self.num_tokens}: it is "
                    "truncated; build the datastore again"
                )
        self._tokens, self._order = (
            open(self.path / name, "rb", buffering=0) for name in ("tokens.bin", "order.bin")
        )
        self._first_steps: dict[int, tuple[int, ...]] = {}
        for file in (self._tokens, self._order):
            weakref.finalize(self, file.close)

    def search(self, text: Sequence[int] | np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The places whose contexts share most tokens with the end of a text.

        Returns:
          ``(places, matched)`` int64 ``[n]``, n at most ``most``, the longest match first.
        """
        end = [int(token) for token in text[: -self.depth - 1 : -1]]
        wanted = (*end, *[END] * (self.depth - len(end)))
        low, high = 0, self.num_tokens
        while low < high:
            middle = (low + high) // 2
            found = self._first_steps.get(middle)
            if found is None:
                (place,) = self._places(middle, middle + 1)
                found = struct.unpack(f"<{self.depth}i", self._context(place))[::-1]
                if high - low > self.num_tokens >> REMEMBERED:
                    self._first_steps[middle] = found
            if found < wanted:
                low = middle + 1
            else:
                high = middle
        near = self._places(max(low - most, 0), min(low + most, self.num_tokens))
        contexts = b"".join(map(self._context, near))
        same = np.frombuffer(contexts, "<i4").reshape(len(near), -1)[:, ::-1] == wanted
        same[:, len(end) :] = False
        matched, places = np.cumprod(same, axis=1).sum(axis=1), np.asarray(near, np.int64)
        best = np.lexsort([-places, -matched])[:most]
        best = best[matched[best] > 0]
        return places[best], matched[best]

    def texts_around(self, places: np.ndarray, before: int, after: int) -> list[np.ndarray]:
        """Of each place its own text: up to ``before`` tokens that end there, and ``after`` that
        follow."""
        found = []
        for place in places.tolist():
            begin = max(place + 1 - before, 0)
            around = self._read(self._tokens, begin, place + 1 + after)
            middle = 4 * (place + 1 - begin)  # the last byte of a token is 0, its first may be 255
            left, right = around.rfind(END_BYTES, 0, middle), around.find(END_BYTES, middle)
            own = around[left - left % 4 + 4 : right if right >= 0 else None]  # -1 becomes 0
            found.append(np.frombuffer(own, "<i4"))
        return found

    def _read(self, file, begin: int, end: int) -> bytes:
        """The numbers ``begin`` to ``end`` of a file."""
        end = min(end, self.num_tokens)
        found = os.pread(file.fileno(), 4 * (end - begin), 4 * begin)
        if len(found) < 4 * (end - begin):
            raise ValueError(
                f"{file.name} was cut short since the datastore was opened; build it again"
            )
        return found

    def _places(self, begin: int, end: int) -> tuple[int, ...]:
        return struct.unpack(f"<{end - begin}I", self._read(self._order, begin, end))

    def _context(self, place: int) -> bytes:
        """The ``depth`` tokens that end at a place, as int32, -1 before the first one."""
        if place >= self.num_tokens:
            raise ValueError(
                f"{self.path}/order.bin names the place {place}, and there are {self.num_tokens} "
                "tokens: the file is damaged; build the datastore again"
            )
        begin = place + 1 - self.depth
        missing = END_BYTES * max(-begin, 0)
        return missing + self._read(self._tokens, max(begin, 0), place + 1)


def build(
    path: str | os.PathLike,
    texts: Iterable[Sequence[int]],
    tokenizer: str,
    *,
    chunk: int = CHUNK,
    depth: int = DEPTH,
) -> Datastore:
    """Writes a datastore, in a folder beside its place that is then renamed.

    Args:
      path: the folder; it must not exist.
      texts: token ids of each text; they are read one after the other, and never held together.
      tokenizer: the fingerprint of the tokenizer that made them.
      chunk: places that are sorted together; more need more memory, fewer more time and files.
      depth: tokens of a context by which places are sorted.

    Raises:
      FileExistsError: there is something at ``path``.
      OSError: nothing can be written there.
      ValueError: there are no tokens, or one is out of range.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: take another name, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=path.parent))
    except OSError as error:
        raise type(error)(
            f"the datastore {path} cannot be written ({error.strerror}): take another folder"
        ) from None
    try:
        total = _write(staging, texts, chunk, depth)
        meta = {"version": VERSION, "num_tokens": total, "depth": depth}
        (staging / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))
        staging.chmod(0o755)
        os.replace(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return Datastore(path)


def _write(folder: Path, texts, chunk: int, depth: int) -> int:
    """Writes both files; returns the number of tokens."""
    total = 0
    with open(folder / "tokens.bin", "wb") as file:
        for text in texts:
            ids = np.asarray(text, np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < 2**21 - 1:
                raise ValueError(f"a text has the token {ids.max()}; ids are 0 to {2**21 - 2}")
            if ids.size:
                file.write(np.append(ids, END).astype("<i4").tobytes())
                total += len(ids) + 1
            if total > MOST_TOKENS:
                raise ValueError(
                    f"the texts have more than {MOST_TOKENS:,} tokens; build a datastore of fewer"
                )
    if not total:
        raise ValueError("there are no texts to build a datastore of")
    tokens = np.memmap(folder / "tokens.bin", "<i4", mode="r")
    with open(folder / "order.bin", "wb") as file:
        for places in _sorted(tokens, None, folder / "part", 0, chunk, depth):
            file.write(places.astype("<u4").tobytes())
    return total


def _sorted(
    tokens: np.ndarray, held: Path | None, name: Path, level: int, chunk: int, depth: int
) -> Iterator[np.ndarray]:
    """Yields places in the order of their contexts, in pieces of at most ``chunk``.

    More places than that are divided by their keys among files, each of which is sorted by itself.

    Args:
      tokens: int32 ``[n]``, all tokens.
      held: a file of places uint32 whose contexts have their first ``level`` tokens in common; it
        is deleted. None: all places.
      name: where names of further files begin.
      level: see ``held``.
      chunk: how many places are sorted together.
      depth: tokens of a context.
    """
    total = len(tokens) if held is None else held.stat().st_size // 4

    def read(begin: int, end: int) -> np.ndarray:
        if held is None:
            return np.arange(begin, min(end, total), dtype=np.uint32)
        return np.fromfile(held, np.uint32, count=min(end, total) - begin, offset=4 * begin)

    if total <= chunk or level >= depth:
        for begin in range(0, total, chunk):
            places = read(begin, begin + chunk)
            keys = [_key(tokens, places, first, depth) for first in range(level, depth, PACKED)]
            yield places[np.lexsort(keys[::-1])] if keys else places  # the last key counts most
    else:
        divided, files = _divided(tokens, read, total, name, level, chunk, depth)
        for part, file in files:
            # a part that lies between a key and the next number has this key alone
            same = 0 < part < len(divided) and divided[part] == divided[part - 1] + np.uint64(1)
            deeper = level + PACKED if same else level
            yield from _sorted(tokens, file, file, deeper, chunk, depth)
    if held is not None:
        held.unlink()


def _divided(tokens, read, total: int, name: Path, level: int, chunk: int, depth: int):
    """Writes places to files by their keys at ``level``; returns uint64 ``[d]``, the keys that
    divide them, and the files in order, each with the number of divisors that are not greater."""
    step = -(-total // SAMPLED)
    sample = np.concatenate([read(b, b + chunk)[::step] for b in range(0, total, chunk)])
    keys = np.sort(_key(tokens, sample, level, depth))
    count = min(-(-2 * total // chunk), MOST_PARTS)
    cuts = keys[np.arange(1, count) * len(keys) // count]
    divided = np.unique(np.concatenate([cuts, cuts + np.uint64(1)]))
    files: dict[int, Path] = {}
    for begin in range(0, total, chunk):
        places = read(begin, begin + chunk)
        which = np.searchsorted(divided, _key(tokens, places, level, depth), side="right")
        places = places[np.argsort(which, kind="stable")]
        ends = np.cumsum(np.bincount(which))
        for part in np.unique(which).tolist():
            files[part] = name.with_name(f"{name.name}-{part}")
            with open(files[part], "ab") as file:
                file.write(places[ends[part - 1] if part else 0 : ends[part]].tobytes())
    return divided, sorted(files.items())


def _key(tokens: np.ndarray, places: np.ndarray, first: int, depth: int) -> np.ndarray:
    """uint64 ``[n]``: the tokens ``first`` to ``first + PACKED`` of the contexts of ``places``."""
    key, places = np.zeros(len(places), np.uint64), places.astype(np.int64)
    for back in range(first, first + PACKED):
        key <<= np.uint64(21)
        if back < depth:
            here = tokens[np.maximum(places - back, 0)].astype(np.int64) + 1
            key |= np.where(places >= back, here, 0).astype(np.uint64)
    return key
