"""Large pages of memory for weights: a pass reads all of them, and each page must be looked up.

A large page is looked up once where the same memory in pages of 4 KB is looked up hundreds of
times. Linux gives large pages to programs that ask for them (``transparent_hugepage`` is
``madvise`` or ``always``), and since version 6.1 it moves what is in memory already into them.
``SPECJAX_PAGES=small`` leaves weights in the pages in which they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

SIZE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
GAP = 64 << 10  # bytes between arrays that one stretch may have: what an allocator keeps there
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE


def large_page() -> int:
    """The bytes of a large page of this system; 0: it has none, or none are wanted.

    Raises:
      ValueError: ``SPECJAX_PAGES`` has an unknown value.
    """
    wish = os.environ.get("SPECJAX_PAGES", "")
    if wish not in ("", "small"):
        raise ValueError(f"SPECJAX_PAGES={wish!r}: it must be small, or not be set")
    try:
        return 0 if wish else int(SIZE.read_text())
    except (OSError, ValueError):
        return 0


def enlarge(params: Any) -> int:
    """Asks the system to hold all arrays of a pytree in large pages; numbers and addresses stay.

    A refusal is no error: the arrays stay in the pages in which they are.

    Returns:
      the bytes of the stretches of memory that were moved to large pages, or were there already.
    """
    size = large_page()
    if not size:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    moved = 0
    for begin, end in stretches(_places(params), size):
        advise(begin, end - begin, _HUGEPAGE)
        moved += (end - begin) * (advise(begin, end - begin, _COLLAPSE) == 0)
    return moved


def _places(params: Any) -> Iterable[tuple[int, int]]:
    """Address and bytes of each array, and of its parts on several devices, in a CPU's memory."""
    for array in jax.tree.leaves(params):
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            continue
        for shard in array.addressable_shards:
            if shard.device.platform == "cpu":
                yield shard.data.unsafe_buffer_pointer(), shard.data.nbytes


def stretches(places: Iterable[tuple[int, int]], large: int) -> list[tuple[int, int]]:
    """Begin and end, in whole small pages, of the stretches of memory that hold the ``places``
    ``(address, bytes)``, as far as a stretch has room for a page of ``large`` bytes."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(places):
        if found and address - found[-1][1] <= GAP:
            found[-1] = found[-1][0], max(found[-1][1], address + size)
        else:
            found.append((address, address + size))
    small = mmap.PAGESIZE
    whole = [(begin // small * small, -(-end // small) * small) for begin, end in found]
    return [(begin, end) for begin, end in whole if end // large > -(-begin // large)]
