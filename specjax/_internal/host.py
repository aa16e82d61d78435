"""Properties of the machine, as the system reports them."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax


@functools.cache
def last_level_cache() -> int:
    """Bytes of the processor's largest cache; 0 where the system does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=0)


def device_memory() -> int | None:
    """Bytes of all devices together, over which a batch may be divided; for CPUs the memory of the
    machine. None where neither the devices nor the system say."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return None if limit is None else limit * len(jax.devices())
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on this system
        return None
    return size if size > 0 else None


def check_table_fits(size: int, what: str, way_out: str) -> None:
    """Refuses a table that no memory can hold, before anything is allocated.

    Args:
      size: bytes of the table.
      what: the settings that make it as large, as ``Class(name=value)``.
      way_out: what to give instead.

    Raises:
      ValueError: the table is larger than the memory of the devices.
    """
    most = device_memory()
    if most is not None and size > most:
        raise ValueError(
            f"{what}: its table takes {size:,} bytes, and the devices have {most:,}; {way_out}"
        )
