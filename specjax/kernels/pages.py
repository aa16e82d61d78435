"""Large pages of memory for weights: a pass reads all of them, and each page must be looked up.

With pages of 4 KB two cores read half as many bytes a second as with pages of 2 MB, at least on
virtual machines, where a look-up walks the tables of two systems. Linux gives large pages to
programs that ask for them (``transparent_hugepage`` is ``madvise`` or ``always``), and since
version 6.1 it moves what is in memory already into them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from typing import Any

import jax

LARGE = 2 << 20  # bytes of a large page (x86, and ARM with pages of 4 KB)
GAP = 64 << 10  # bytes between arrays that one stretch may have: what an allocator keeps there
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE


def enlarge(params: Any) -> int:
    """Asks the system to hold all arrays of a pytree in large pages; numbers and addresses stay.

    A refusal is no error: the arrays stay in the pages in which they are.

    Returns:
      the bytes of the stretches of memory that were moved to large pages, or were there already.
    """
    if not sys.platform.startswith("linux"):
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    moved = 0
    for begin, end in stretches(_places(params)):
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


def stretches(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Begin and end, in whole small pages, of the stretches of memory that hold the ``places``
    ``(address, bytes)``, as far as a stretch has room for a large page."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(places):
        if found and address - found[-1][1] <= GAP:
            found[-1] = found[-1][0], max(found[-1][1], address + size)
        else:
            found.append((address, address + size))
    small = mmap.PAGESIZE
    whole = [(begin // small * small, -(-end // small) * small) for begin, end in found]
    return [(begin, end) for begin, end in whole if end // LARGE > -(-begin // LARGE)]
