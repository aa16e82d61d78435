"""Codes of four and eight bits in words of 32 bits, as published checkpoints pack them."""

from __future__ import annotations

import numpy as np


def unpack_words(words: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """Unsigned codes of ``bits`` in int32 words ``[a, b]``, lowest bits first, packed along
    ``axis``; ``order[i]`` is the place within a word's codes of that in its bits ``i``."""
    count = 32 // bits
    codes = words.view(np.uint32) if words.dtype == np.int32 else words.astype(np.uint32)
    parts = [(codes >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1) for i in range(count)]
    if order is not None:
        parts = [parts[order.index(place)] for place in range(count)]
    stacked = np.stack(parts, axis=axis + 1)
    shape = list(words.shape)
    shape[axis] *= count
    return stacked.reshape(shape).astype(np.uint8)


def pack_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """``unpack_words`` undone; zeros fill the last word.

    Raises:
      ValueError: a code that does not fit in its bits, and would change the next one's.
    """
    beyond = codes[(codes < 0) | (codes >= 1 << bits)]
    if beyond.size:
        raise ValueError(f"a code is {beyond[0]}; {bits} bits hold 0 to {(1 << bits) - 1}")
    count = 32 // bits
    spare = [(0, 0)] * codes.ndim
    spare[axis] = (0, -codes.shape[axis] % count)
    codes = np.pad(codes.astype(np.uint32), spare)
    shape = list(codes.shape)
    shape[axis : axis + 1] = [shape[axis] // count, count]
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    parts = codes.reshape(shape) << shifts.reshape([-1 if i == axis + 1 else 1 for i in range(3)])
    return np.bitwise_or.reduce(parts, axis=axis + 1).view(np.int32)
