"""Reads parts of parameters from safetensors files.

A tensor of a file may hold several parameters, stacked whole or head by head, transposed or not,
and a parameter may lie in several tensors (a stack of experts). Only the part of a parameter that
a device needs is read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open

from ..sharding import MODEL
from .placement import spec_of
from .tensors import Tensor

Index = tuple[slice, ...]


class Reader(contextlib.ExitStack):
    """Reads parameters from the tensors of a checkpoint; a context that closes the files.

    Args:
      tensors: the tensors to read, by name.
      places: for each name the file and the name in the file.
      shapes: the shapes of the parameters.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        places: Mapping[str, tuple[Path, str]],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        super().__init__()
        self._places, self._shapes = places, shapes
        self._sources: dict[str, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors.items():
            for part in tensor.parts:
                self._sources.setdefault(part, []).append((name, tensor))
        self._open = functools.cache(lambda path: self.enter_context(safe_open(path, "np")))

    def read(self, part: str, index: Index, dtype) -> np.ndarray:
        """Returns ``parameter[index]``; ``index`` has no strides."""
        spans = [s.indices(n)[:2] for s, n in zip(index, self._shapes[part], strict=True)]
        sources = self._sources[part]
        if sources[0][1].expert is None:
            ((name, tensor),) = sources
            pieces = [self._piece(name, tensor, i) for i in self._runs(part, tensor, spans)]
            array = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        else:
            entries, inner = range(*spans[0]), tuple(slice(*span) for span in spans[1:])
            names = {tensor.expert: (name, tensor) for name, tensor in sources}
            array = np.stack([self._piece(*names[e], inner).astype(dtype) for e in entries])
        return np.ascontiguousarray(array, dtype=dtype)

    def _runs(self, part: str, tensor: Tensor, spans) -> Iterator[Index]:
        """Yields the places of contiguous rows of a parameter in its untransposed tensor."""
        axis, lengths = tensor.axis, [self._shapes[p][tensor.axis] for p in tensor.parts]
        here = tensor.parts.index(part)
        size, begin = lengths[here] // tensor.blocks, sum(lengths[:here]) // tensor.blocks
        period = sum(lengths) // tensor.blocks
        first, end = spans[axis]
        while first < end:
            block, row = divmod(first, size)
            count = min(size - row, end - first)
            start = block * period + begin + row
            where = [slice(*span) for span in spans]
            where[axis] = slice(start, start + count)
            yield tuple(where)
            first += count

    def _piece(self, name: str, tensor: Tensor, index: Index) -> np.ndarray:
        path, stored = self._places[name]
        piece = read_slice(self._open(path), stored, index[::-1] if tensor.transposed else index)
        return piece.T if tensor.transposed else piece


def read_slice(file, name: str, index: Index) -> np.ndarray:
    """Reads a part of a tensor; every read of weights from a file calls this function."""
    return file.get_slice(name)[index]


def placed(
    part: str, read: Callable[[Index], np.ndarray], shape: tuple[int, ...], mesh: Mesh | None
) -> jax.Array:
    """Places a parameter on the default device, or on each device of a mesh its part."""
    if mesh is None:
        return jax.device_put(read((slice(None),) * len(shape)))
    seen = {}  # devices that differ in their rows alone hold the same

    def own(index):
        key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
        if key not in seen:
            seen[key] = read(index)
        return seen[key]

    spec = spec_of(part, shape, mesh.shape.get(MODEL, 1), MODEL if MODEL in mesh.shape else None)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, PartitionSpec(*spec)), own)
