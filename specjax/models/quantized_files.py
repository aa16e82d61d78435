"""Quantized parameters to and from the tensors of a checkpoint; see ``quantized_layouts``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import safe_open

from ..kernels import quantized
from ..kernels.quantized import Quantized
from ..sharding import MODEL
from .placement import place_quantized, spec_of
from .quantized_layouts import WAY_OUT, QuantizedLayout, Values, config_of, encode
from .reading import Index, Reader, read_slice
from .tensors import Tensor, gathered

FLOAT8 = "F8_E4M3"  # the name of the type in the headers of safetensors files


def merged(
    stored: Mapping, layout: QuantizedLayout, wanted: Container[str], prefix: str
) -> tuple[dict, dict]:
    """The tensors of a checkpoint with one entry for each quantized weight, as for one of floats.

    Args:
      stored: name, file, shape and type of each tensor that the files hold, by full name.
      layout: how the quantized ones are held.
      wanted: the full names of the tensors that a checkpoint of floats would have.
      prefix: of these names; checkpoints of the bare trunk leave it out.

    Returns:
      The tensors by full name, quantized ones with their shape as floats and the type of their
      scales; and of each quantized one the tensors by kind.
    """
    held: dict[str, dict[str, Any]] = {}
    for name, entry in stored.items():
        module, _, kind = name.rpartition(".")
        main = f"{module}.{layout.main}"
        if kind in layout.kinds and main in stored and f"{module}.{layout.scale}" in stored:
            weight = f"{module}.weight"
            full = prefix + weight if prefix + weight in wanted else weight
            held.setdefault(full, {})[kind] = entry
    parts = {id(entry) for kinds in held.values() for entry in kinds.values()}
    left = {name: entry for name, entry in stored.items() if id(entry) not in parts}
    for name, kinds in held.items():
        main, scale = kinds[layout.main], kinds[layout.scale]
        # float32 scales of float8 are no sign that the model computes in float32
        dtype = "BF16" if layout.number == "fp" else scale.dtype
        left[name] = dataclasses.replace(main, shape=_shape(kinds, layout), dtype=dtype)
    return left, held


def _shape(kinds: Mapping[str, Any], layout: QuantizedLayout) -> tuple[int, ...]:
    """``(out, in)`` by the headers of the files."""
    main, (bits, *_) = kinds[layout.main].shape, layout.bits
    if layout.method == "awq":
        return main[1] * 8, main[0]
    if layout.method == "gptq":
        return main[1], main[0] * 32 // bits
    if layout.main == "weight":
        return main
    with safe_open(kinds["weight_shape"].path, "np") as file:
        return tuple(int(n) for n in file.get_tensor(kinds["weight_shape"].name))


class QuantizedReader(contextlib.ExitStack):
    """Reads quantized parameters; a context that closes the files.

    Args:
      tensors: the tensors to read, by full name, as for a ``Reader``.
      shapes: the shapes of the parameters.
      held: what ``merged`` returned.
      layout: how the weights are held.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shapes, held, layout: QuantizedLayout):
        super().__init__()
        self._shapes, self._held, self._layout = shapes, held, layout
        self._tensors = {name: t for name, t in tensors.items() if name in held}
        mixed = [name for name, t in tensors.items() if name not in held]
        self._parts = {part for t in self._tensors.values() for part in t.parts}
        floats = {part for name in mixed for part in tensors[name].parts}
        for name, tensor in self._tensors.items():
            if tensor.transposed or floats.intersection(tensor.parts):
                raise ValueError(
                    f"{name} is quantized, and "
                    + ("lies transposed" if tensor.transposed else "parts of it are not")
                    + f", which is not supported; {WAY_OUT}"
                )
            for entry in held[name].values():
                if entry.dtype.startswith("F8") and entry.dtype != FLOAT8:
                    raise ValueError(
                        f"{entry.name} is {entry.dtype}, which is not supported; of the float8 "
                        f"types {FLOAT8} is; {WAY_OUT}"
                    )
        self._open = functools.cache(lambda path: self.enter_context(safe_open(path, "np")))
        self._decoded = functools.lru_cache(maxsize=4)(self._decode)  # each is asked for thrice

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def _decode(self, name: str) -> Values:
        arrays = {}
        for kind, entry in self._held[name].items():
            if entry.dtype == FLOAT8:
                arrays[kind] = _mapped(entry.path, entry.name)
                continue
            index = tuple(slice(None) for _ in entry.shape)
            arrays[kind] = read_slice(self._open(entry.path), entry.name, index)
        try:
            return self._layout.values(arrays)
        except ValueError as error:
            # which begins with the kind of the tensor
            module = name.removesuffix("weight")
            raise ValueError(f"{self._layout.method}: {module}{error}") from None

    def numbers(self, name: str) -> np.ndarray:
        """The float32 weight ``[out, in]`` for which a quantized tensor stands."""
        found = self._decoded(name)
        groups = found.values.astype(np.float32).reshape(*found.scale.shape, -1)
        if found.zero is not None:
            groups -= found.zero[..., None]
        return (groups * found.scale[..., None]).reshape(found.values.shape)

    def read(self, part: str, mesh: Mesh | None) -> Quantized:
        """The parameter ``part`` on the default device, or on each device of a mesh its part."""
        shape = self._shapes[part]
        name = next(n for n, t in self._tensors.items() if part in t.parts)
        first = self._decoded(name)
        values = self._gathered(part, "values", shape[-1], first.bits)
        scale = self._gathered(part, "scale", first.scale.shape[1], first.bits)
        zero = self._gathered(part, "zero", first.scale.shape[1], first.bits)
        weight = as_quantized(values, scale, zero if np.any(zero) else None, first.bits)
        if mesh is None:
            return jax.device_put(weight)
        axis = MODEL if MODEL in mesh.shape else None
        return place_quantized(weight, mesh, spec_of(part, shape, mesh.shape.get(MODEL, 1), axis))

    def _gathered(self, part: str, kind: str, size: int, bits: int) -> np.ndarray:
        """One kind of array of a parameter, ``[..., out, size]``."""
        shape = (*self._shapes[part][:-1], size)

        def decoded(name):
            values = self._decoded(name)
            if values.bits != bits:
                raise ValueError(
                    f"{name} has {values.bits} bits, other parts of {part} {bits}; {WAY_OUT}"
                )
            if kind == "zero" and values.zero is None:
                return np.zeros(values.scale.shape, np.int8)
            return getattr(values, kind)

        reader = _KindReader(self._tensors, self._shapes | {part: shape}, decoded)
        index = tuple(slice(0, n) for n in shape)
        first = next(name for name, tensor in self._tensors.items() if part in tensor.parts)
        return reader.read(part, index, decoded(first).dtype)


def _mapped(path, name: str) -> np.ndarray:
    """A float8 tensor of a safetensors file, which is mapped into memory: safetensors gives numpy
    none of this type."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
    begin = 8 + size + entry["data_offsets"][0]
    return np.memmap(path, jnp.float8_e4m3fn, "r", begin, tuple(entry["shape"]))


class _KindReader(Reader):
    """Reads values, scales or zeros of decoded weights, in parts and stacks as floats are read."""

    def __init__(self, tensors, shapes, decoded):
        super().__init__(tensors, {}, shapes)
        self._array = decoded

    def _piece(self, name: str, tensor: Tensor, index: Index) -> np.ndarray:
        return self._array(name)[index]


class WidenedReader(Reader):
    """Reads parameters as floats, also those whose tensors are quantized.

    Args:
      tensors: the tensors to read, by name.
      places: of each that is not quantized the file and the name in the file.
      shapes: the shapes of the parameters.
      held: what ``merged`` returned; empty: nothing is quantized.
      layout: how the quantized weights are held; None: there are none.
    """

    def __init__(self, tensors, places, shapes, held, layout: QuantizedLayout | None):
        super().__init__(tensors, places, shapes)
        self._quantized = None
        if layout is not None:
            reader = QuantizedReader(tensors, shapes, held, layout)
            self._held, self._quantized = held, self.enter_context(reader)

    def _piece(self, name: str, tensor: Tensor, index: Index) -> np.ndarray:
        if self._quantized is None or name not in self._held:
            return super()._piece(name, tensor, index)
        return self._quantized.numbers(name)[index]


def as_quantized(values: np.ndarray, scale: np.ndarray, zero, bits: int) -> Quantized:
    """Arrays of the host as ``Quantized`` holds them: four bits are packed where their groups are
    multiples of 32 inputs, and otherwise held as eight."""
    group = values.shape[-1] // scale.shape[-1]
    if bits == 8 or group % quantized.TILE:
        return Quantized(values, scale, zero)
    packed = np.asarray(quantized.pack((values + np.int8(8)).astype(np.uint8)))
    return Quantized(packed, scale, None if zero is None else zero + np.int8(8))


def values_of(weight: Quantized, kind: str) -> np.ndarray:
    """``values``, ``scale`` or ``zero`` of ``Values`` on the host; zeros where there are none."""
    if kind == "scale":
        return np.asarray(weight.scale)
    middle = np.int8(8 if weight.bits == 4 else 0)
    if kind == "zero":
        if weight.zero is None:
            return np.zeros(weight.scale.shape, np.int8)
        return np.asarray(weight.zero) - middle
    if weight.bits == 8:
        return np.asarray(weight.qvalue)
    return np.asarray(quantized.unpack(weight.qvalue)) - middle


def quantized_tensors(tensors: Mapping[str, Tensor], params: Mapping) -> set[str]:
    """The names of the tensors whose parameters are quantized.

    Raises:
      ValueError: parameters in fp8, for which no layout is written, or a tensor that holds
        quantized parameters beside others or transposed.
    """
    found = set()
    for name, tensor in tensors.items():
        parts = [params[part] for part in tensor.parts]
        if not any(map(quantized.is_quantized, parts)):
            continue
        if not all(map(_is_of_integers, parts)) or tensor.transposed:
            why = "fp8" if not tensor.transposed else "quantized weights of this family"
            raise ValueError(
                f"model: {name} cannot be written, since there is no layout for {why}; save the "
                "model as load returns it without quantize=, or with quantize='int8'"
            )
        found.add(name)
    return found


def _is_of_integers(weight) -> bool:
    return isinstance(weight, Quantized) and jnp.issubdtype(weight.qvalue.dtype, jnp.integer)


def packed_tensors(name: str, tensor: Tensor, params: Mapping) -> dict[str, np.ndarray]:
    """The tensors in which a file holds the quantized tensor ``name``."""
    parts = {part: params[part] for part in tensor.parts}
    if tensor.expert is not None:
        parts = {part: jax.tree.map(lambda x: x[tensor.expert], w) for part, w in parts.items()}
        tensor = dataclasses.replace(tensor, expert=None)
    kinds = {
        kind: gathered(tensor, {part: values_of(w, kind) for part, w in parts.items()}, dtype)
        for kind, dtype in (("values", np.int8), ("scale", np.float32), ("zero", np.int8))
    }
    zero = kinds["zero"] if np.any(kinds["zero"]) else None
    values = Values(kinds["values"], kinds["scale"], zero, parts[tensor.parts[0]].bits)
    return encode(name.removesuffix(".weight"), values)


def bytes_of(tensor: Tensor, params: Mapping) -> int:
    """About how many bytes ``packed_tensors`` takes."""
    size = sum(leaf.nbytes for part in tensor.parts for leaf in jax.tree.leaves(params[part]))
    return size if tensor.expert is None else size // len(params[tensor.parts[0]].qvalue)


def quantization_config(names: Container[str], tensors: Mapping[str, Tensor], params) -> dict:
    """``quantization_config`` of a model of which the tensors ``names`` are quantized."""
    held, plain = {}, []
    for name, tensor in tensors.items():
        module, weight = name.removesuffix(".weight"), params[tensor.parts[0]]
        if name in names:
            groups = weight.scale.shape[-1]
            size = None if groups == 1 else weight.shape[-1] // groups
            held[module] = (weight.bits, size, weight.zero is not None)
        elif weight.ndim > 1:
            plain.append(module)
    return config_of(held, plain)
