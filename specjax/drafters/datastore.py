"""A corpus on disk that is searched where it lies: places sorted by what leads up to them.

A datastore is a folder of two files that are mapped into memory, never read whole, and
``meta.json``::

    tokens.bin    int32, the texts one after the other, -1 after each
    order.bin     int32, for each chunk of tokens its places in the order of their contexts

A context is the tokens up to a place, the nearest first (``context_index.py`` keeps the same order
on the device). The places that share most tokens with the end of a text are neighbours, and one
binary search in all chunks at once finds them: ``log2(chunk)`` steps, each of which reads ``depth``
tokens of every chunk.

References: REST, arXiv 2311.08252, section 3 (there a suffix array, of which the first matches in
lexicographic order are taken; here those with the longest match).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

VERSION = 1
CHUNK = 2**22  # tokens that are sorted together: 64 MB while a datastore is built
DEPTH = 18  # tokens of a context by which places are sorted
PACKED = 3  # tokens in a key of 64 bits, 21 bits each
END = -1


def sorted_places(tokens: np.ndarray, depth: int) -> np.ndarray:
    """int32 ``[n]``: the places of ``tokens`` int32 ``[n]`` in the order of their contexts."""
    size = len(tokens)
    padded = np.concatenate([np.zeros(depth + PACKED, np.uint64), (tokens + 1).astype(np.uint64)])
    keys = []
    for first in range(0, depth, PACKED):
        key = np.zeros(size, np.uint64)
        for back in range(first, first + PACKED):
            begin = depth + PACKED - back
            own = padded[begin : begin + size] if back < depth else np.uint64(0)
            key = (key << np.uint64(21)) | own
        keys.append(key)
    return np.lexsort(keys[::-1]).astype(np.int32)  # the last key counts most


class Datastore:
    """A datastore that was built. Opening it reads ``meta.json`` alone.

    Attributes:
      num_tokens: tokens that it holds, one after each text included.
      chunk: tokens that were sorted together.
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
            version, self.num_tokens = int(meta["version"]), int(meta["num_tokens"])
            self.chunk, self.depth = int(meta["chunk"]), int(meta["depth"])
            self.tokenizer = str(meta["tokenizer"])
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{self.path} is no datastore (a folder with meta.json); make one with "
                "specjax datastore build"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path}/meta.json is not that of a datastore ({error}); build it again"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"{self.path}: its version is {version}, this installation reads {VERSION}; build "
                "it again"
            )
        for name in ("tokens.bin", "order.bin"):
            found = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if found != 4 * self.num_tokens:
                raise ValueError(
                    f"{self.path}/{name} has {found} bytes, of {4 * self.num_tokens}: it is "
                    "truncated; build the datastore again"
                )
        self._tokens, self._order = (
            np.memmap(self.path / name, np.int32, mode="r") for name in ("tokens.bin", "order.bin")
        )

    def search(self, text: Sequence[int] | np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The places whose contexts share most tokens with the end of a text.

        Returns:
          ``(places, matched)`` int64 ``[n]``, n at most ``most``, the longest match first.
        """
        end = np.asarray(text[: -self.depth - 1 : -1], np.int32)
        wanted = np.full(self.depth, END, np.int32)
        wanted[: len(end)] = end
        begins = np.arange(0, self.num_tokens, self.chunk)
        sizes = np.minimum(self.num_tokens - begins, self.chunk)
        low, high = np.zeros(len(begins), np.int64), sizes.astype(np.int64)
        while (open_ := low < high).any():
            middle = (low + high) // 2
            places = self._order[begins + np.minimum(middle, sizes - 1)]
            after = _before(wanted, self._contexts(begins, places[:, None])[:, 0])
            low = np.where(open_ & ~after, middle + 1, low)
            high = np.where(open_ & after, middle, high)
        near = low[:, None] + np.arange(-most, most)
        inside = (near >= 0) & (near < sizes[:, None])
        places = self._order[begins[:, None] + np.clip(near, 0, sizes[:, None] - 1)]
        same = self._contexts(begins, places) == wanted
        same &= wanted != END
        matched = np.where(inside, np.cumprod(same, axis=2).sum(axis=2), 0).ravel()
        places = (begins[:, None] + places).ravel()
        best = np.lexsort([-places, -matched])[:most]
        best = best[matched[best] > 0]
        return places[best], matched[best]

    def texts_around(self, places: np.ndarray, before: int, after: int) -> list[np.ndarray]:
        """Of each place its own text: up to ``before`` tokens that end there, and ``after`` that
        follow."""
        found = []
        for place in places.tolist():
            left = self._tokens[max(place + 1 - before, 0) : place + 1]
            right = self._tokens[place + 1 : place + 1 + after]
            ends = np.flatnonzero(left == END)
            left = left[ends[-1] + 1 :] if len(ends) else left
            ends = np.flatnonzero(right == END)
            right = right[: ends[0]] if len(ends) else right
            found.append(np.concatenate([left, right]))
        return found

    def _contexts(self, begins, places):
        """int32 ``[C, P, depth]`` of ``places`` int ``[C, P]`` within chunks, -1 before them."""
        where = places[:, :, None] - np.arange(self.depth)
        found = self._tokens[begins[:, None, None] + np.maximum(where, 0)]
        return np.where(where >= 0, found, END)


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
      chunk: tokens that are sorted together; more need more memory, fewer make a search longer.
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
        meta = {"version": VERSION, "num_tokens": total, "chunk": chunk, "depth": depth}
        (staging / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))
        staging.chmod(0o755)
        os.replace(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return Datastore(path)


def _write(folder: Path, texts, chunk: int, depth: int) -> int:
    """Writes both files; returns the number of tokens."""
    held, count, total = [], 0, 0
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "order.bin", "wb") as order:

        def flush(whole: bool):
            nonlocal held, count, total
            joined = np.concatenate(held) if held else np.zeros(0, np.int32)
            stop = len(joined) if whole else len(joined) // chunk * chunk
            for begin in range(0, stop, chunk):
                part = joined[begin : min(begin + chunk, stop)]
                tokens.write(part.tobytes())
                order.write(sorted_places(part, depth).tobytes())
                total += len(part)
            held, count = [joined[stop:]], len(joined) - stop

        for text in texts:
            ids = np.asarray(text, np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < 2**21 - 1:
                raise ValueError(f"a text has the token {ids.max()}; ids are 0 to {2**21 - 2}")
            if not ids.size:
                continue
            held.append(np.append(ids, END).astype(np.int32))
            count += len(held[-1])
            if count >= chunk:
                flush(whole=False)
        flush(whole=True)
    if not total:
        raise ValueError("there are no texts to build a datastore of")
    return total


def _before(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether ``a`` ``[depth]`` comes before each row of ``b`` ``[C, depth]``."""
    first = np.argmax(a != b, axis=1)
    return a[first] < b[np.arange(len(b)), first]
