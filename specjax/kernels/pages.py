"""Large pages of memory for weights: a pass reads all of them, and each page must be looked up.

A large page is looked up once where the same memory in pages of 4 KB is looked up hundreds of
times. Linux gives large pages to programs that ask for them (``transparent_hugepage`` is
``madvise`` or ``always``), and since version 6.1 it moves what is in memory already into them.
Arrays of less than four large pages (8 MB on most systems), of which a good part would stay in
small pages at both ends, are copied side by side into memory that asked for large ones.
``SPECJAX_PAGES=small`` leaves weights in the pages in which they are.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
GAP = 64 << 10  # bytes between arrays that one stretch may have: what an allocator keeps there
LINE = 64  # bytes of a cache line, to which kernels like arrays to be aligned
MANY = 4  # large pages: of an array of so many, the greater part can be moved where it lies
KINDS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16", "int8", "uint8")))  # of weights
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


def enlarge(params: Any) -> Any:
    """Returns a pytree with its arrays in large pages of memory, as far as the system gives them.

    Arrays of many large pages are moved where they lie. Smaller ones, of which a good part would
    stay in small pages at both ends, are copied side by side, which takes their memory twice until
    the former ones are dropped. Numbers and types stay, and what the system refuses is no error.
    """
    size = large_page()
    if not size:
        return params
    leaves, structure = jax.tree.flatten(params)
    small = {id(leaf): leaf for leaf in leaves if _is_small(leaf, MANY * size)}
    copies = dict(zip(small, _side_by_side(list(small.values()), size), strict=True))
    leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
    collapse(leaves)
    return jax.tree.unflatten(structure, leaves)


def _is_small(leaf: Any, most: int) -> bool:
    """Whether a leaf is an array of weights on one CPU, of less than ``most`` bytes."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    if leaf.dtype not in KINDS or leaf.weak_type:
        return False
    devices = leaf.sharding.device_set
    return len(devices) == 1 and next(iter(devices)).platform == "cpu" and leaf.nbytes < most


def _side_by_side(arrays: list[jax.Array], large: int) -> list[jax.Array]:
    """Copies of arrays, one after the other in new memory that asks for pages of ``large`` bytes;
    the arrays themselves where they fill no such page, or there is no such memory.

    The memory lives as long as one of the copies.
    """
    places = list(itertools.accumulate((-(-x.nbytes // LINE) * LINE for x in arrays), initial=0))
    if places[-1] < large:
        return arrays
    try:
        memory = mmap.mmap(-1, places[-1] + large, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(_HUGEPAGE)
    except OSError:
        return arrays
    room = np.frombuffer(memory, np.uint8)
    room = room[-room.ctypes.data % large :]

    def copied(x, at):
        view = room[at : at + x.nbytes].view(x.dtype).reshape(x.shape)
        view[...] = np.asarray(x)
        if x.committed:
            return jax.device_put(view, x.sharding)  # without another copy: it is aligned
        with jax.default_device(next(iter(x.sharding.device_set))):
            return jax.device_put(view)

    return [copied(*pair) for pair in zip(arrays, places[:-1], strict=True)]


def collapse(arrays: Any) -> int:
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
    for begin, end in stretches(_places(arrays), size):
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
