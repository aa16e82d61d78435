"""Quantized weights as published checkpoints hold them, in numpy: which layouts are read, how their
tensors decode, and how ours are written.

==================  ==========================================================================
compressed-tensors  ``pack-quantized`` (four and eight bits, groups or channels) and weight-only
                    ``int-quantized`` (eight bits); what ``save_pretrained`` writes
GPTQ                four and eight bits, ``desc_act`` false, of either version of the zeros
AWQ                 four bits, version ``gemm``
fp8                 float8 (e4m3) with a scale for each block of outputs and inputs, as DeepSeek-V3
                    and Qwen3 publish it; activations are not quantized here, whatever it asks for
==================  ==========================================================================

Every other layout is refused by the name of the field that says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from .quantized_fields import WAY_OUT, accept, group_size, refuse_unknown
from .quantized_words import pack_words, unpack_words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that lies at each place of a word
GPTQ_ZEROS = {"gptq": 1, "gptq_v2": 0}  # what the versions of GPTQ add to stored zeros
# the names of the tensors of one weight, by what stands in place of "weight" in their names
COMPRESSED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
PACKED = ("qweight", "qzeros", "scales", "g_idx")


@dataclasses.dataclass(frozen=True)
class Values:
    """One weight ``scale * (value - zero)``, decoded.

    Attributes:
      values: int8 ``[out, in]``, of four bits -8 to 7; or float8 (e4m3).
      scale: float32 ``[out, G]``.
      zero: int8 ``[out, G]``, or None: 0.
      bits: 8 or 4.
    """

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    bits: int


@dataclasses.dataclass(frozen=True)
class QuantizedLayout:
    """How a checkpoint holds its quantized weights.

    Attributes:
      method: ``quant_method`` of its config.
      bits: of its weights: all kinds that it may have.
      kinds: what stands in place of ``weight`` in the names of the tensors of one weight.
      main: the kind that holds the values.
      scale: the kind that holds the scales.
      decode: of the arrays of one weight by kind, the values.
      groups: by the field of the config that says so, the bits and the inputs of a group (None:
        all inputs) that weights may have. Empty: ``decode`` itself holds the scales to the config.
      number: what the values are, ``"int"`` or ``"fp"``.
    """

    method: str
    bits: tuple[int, ...]
    kinds: tuple[str, ...]
    main: str
    scale: str
    decode: Callable[[Mapping[str, np.ndarray]], Values]
    groups: Mapping[str, tuple[int, int | None]] = dataclasses.field(default_factory=dict)
    number: str = "int"

    def __str__(self) -> str:
        return "+".join(f"{self.number}{bits}" for bits in sorted(set(self.bits)))

    def values(self, arrays: Mapping[str, np.ndarray]) -> Values:
        """``decode``, held to the groups that the config names.

        Raises:
          ValueError: arrays that contradict each other or the config; the message begins with the
            kind of one of them.
        """
        found = self.decode(arrays)
        (out, inputs), groups = found.values.shape, found.scale.shape[-1]
        if found.scale.shape != (out, groups) or inputs % groups:
            raise ValueError(
                f"{self.scale} is {list(arrays[self.scale].shape)}, which are no scales of "
                f"{out} outputs of {inputs} inputs; {WAY_OUT}"
            )
        if self.groups and not any(
            bits == found.bits and inputs == groups * (size or inputs)
            for bits, size in self.groups.values()
        ):
            said = ", ".join(f"{field}={size or -1}" for field, (_, size) in self.groups.items())
            raise ValueError(
                f"{self.scale} has {groups} groups of the {inputs} inputs of weights in "
                f"{found.bits} bits, which contradicts {said} of config.json; {WAY_OUT}"
            )
        return found


def layout_of(hf: Mapping[str, object]) -> QuantizedLayout | None:
    """The layout that a ``config.json`` names in ``quantization_config``; None without one.

    Raises:
      ValueError: it is not one that is read; the message names the field.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config.json: quantization_config={config!r} is no object of settings; {WAY_OUT}"
        )
    config = dict(config)
    method = config.get("quant_method", "unknown")
    readers = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _float8}
    if method not in readers:
        raise ValueError(
            f"config.json: quantized checkpoints (quant_method={method!r}) are not supported; "
            f"accepted: {', '.join(readers)}; {WAY_OUT}"
        )
    refuse_unknown(config, method, "quantization_config.")
    return readers[method](config)


def _compressed(config: dict) -> QuantizedLayout:
    method, top = "compressed-tensors", "quantization_config."
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        groups = {}
        accept(config, method, top, "config_groups", "an object with one entry at least")
    accept(config, method, top, "kv_cache_scheme", None)
    accept(config, method, top, "transform_config", None, {})
    sparsity = dict(config.get("sparsity_config") or {})
    accept(sparsity, method, f"{top}sparsity_config.", "format", None, "dense")
    formats, bits, sizes = set(), [], {}
    for name, group in groups.items():
        where = f"{top}config_groups.{name}."
        given = {"format": group.get("format") or config.get("format")}
        accept(given, method, where, "format", "pack-quantized", "int-quantized")
        accept(group, method, where, "input_activations", None)
        accept(group, method, where, "output_activations", None)
        weights, inner = dict(group.get("weights") or {}), f"{where}weights."
        accept(weights, method, inner, "type", "int")
        widths = (4, 8) if given["format"] == "pack-quantized" else (8,)
        accept(weights, method, inner, "num_bits", *widths)
        accept(weights, method, inner, "strategy", "group", "channel")
        accept(weights, method, inner, "dynamic", None, False)
        accept(weights, method, inner, "actorder", None, "static", "weight")
        if weights["strategy"] == "channel":
            accept(weights, method, inner, "group_size", None, -1)
            size = None
        else:
            size = group_size(weights, method, inner)
        formats.add(given["format"])
        bits.append(weights["num_bits"])
        sizes[f"{inner}group_size"] = weights["num_bits"], size
    if len(formats) > 1:
        raise ValueError(
            f"config.json: quantized checkpoint (quant_method={method!r}): {top}config_groups mix "
            f"the formats {', '.join(sorted(formats))}; accepted: one for all; {WAY_OUT}"
        )
    if formats == {"int-quantized"}:
        kinds = ("weight", "weight_scale", "weight_zero_point")
        return QuantizedLayout(
            method, tuple(bits), kinds, "weight", "weight_scale", _decode_plain, sizes
        )
    return QuantizedLayout(
        method, tuple(bits), COMPRESSED, "weight_packed", "weight_scale", _decode_compressed, sizes
    )


def _gptq(config: dict) -> QuantizedLayout:
    method, top = "gptq", "quantization_config."
    accept(config, method, top, "bits", 4, 8)
    accept(config, method, top, "desc_act", None, False)
    version = config.get("checkpoint_format") or config.get("format")
    for field in ("checkpoint_format", "format"):  # two names of one thing
        accept(
            config, method, top, field, None, *([version] if version in GPTQ_ZEROS else GPTQ_ZEROS)
        )
    accept(config, method, top, "dynamic", None, {})
    accept(config, method, top, "is_marlin_format", None, False)
    accept(config, method, top, "pack_dtype", None, "int32")
    sizes = {f"{top}group_size": (config["bits"], group_size(config, method, top))}
    bits, first = config["bits"], GPTQ_ZEROS.get(version, 1)

    def decode(arrays):
        codes = unpack_words(arrays["qweight"], bits, axis=0).T
        stored = unpack_words(arrays["qzeros"], bits, axis=1).T[: codes.shape[0]]
        top = (1 << bits) - 1
        if first and np.any(stored == top):
            raise ValueError(
                f"qzeros holds {top}, which in version 1 of the zeros (checkpoint_format='gptq') "
                f"is a zero point of {top + 1} for some readers and of 0 for others; accepted: 0 "
                f"to {top - 1}; use a checkpoint in gptq_v2, or the unquantized one"
            )
        _check_order(arrays.get("g_idx"), codes.shape[1], stored.shape[1])
        return _centred(codes, arrays["scales"].T, stored.astype(np.int32) + first, bits, "qzeros")

    return QuantizedLayout(method, (bits,), PACKED, "qweight", "scales", decode, sizes)


def _awq(config: dict) -> QuantizedLayout:
    method, top = "awq", "quantization_config."
    accept(config, method, top, "bits", 4)
    accept(config | {"version": str(config.get("version")).lower()}, method, top, "version", "gemm")
    accept(config, method, top, "format", None, "gemm")
    accept(config, method, top, "pack_dtype", None, "int32")
    accept(config, method, top, "zero_point", True)
    sizes = {f"{top}group_size": (4, group_size(config, method, top))}

    def decode(arrays):
        codes = unpack_words(arrays["qweight"], 4, axis=1, order=AWQ_ORDER).T
        zeros = unpack_words(arrays["qzeros"], 4, axis=1, order=AWQ_ORDER).T
        return _centred(codes, arrays["scales"].T, zeros, 4, "qzeros")

    return QuantizedLayout(method, (4,), PACKED, "qweight", "scales", decode, sizes)


def _float8(config: dict) -> QuantizedLayout:
    method, top = "fp8", "quantization_config."
    accept(config, method, top, "fmt", None, "e4m3")
    accept(config, method, top, "activation_scheme", None, "dynamic")
    size = config.get("weight_block_size")
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(n, int) and n > 0 for n in size)
    ):
        accept(config, method, top, "weight_block_size", [128, 128])
    outputs, inputs = config["weight_block_size"]

    def decode(arrays):
        values, scale = arrays["weight"], arrays["weight_scale_inv"].astype(np.float32)
        out, columns = values.shape
        blocks = -(-out // outputs), -(-columns // inputs)
        if scale.shape != blocks:
            raise ValueError(
                f"weight_scale_inv is {list(scale.shape)}, and weight, {list(values.shape)}, has "
                f"{blocks[0]} by {blocks[1]} blocks of {outputs} by {inputs}; {WAY_OUT}"
            )
        group = math.gcd(columns, inputs)  # all groups have the same number of inputs
        of_group = np.arange(0, columns, group) // inputs
        scale = np.repeat(scale[:, of_group], outputs, axis=0)[:out]
        return Values(values, np.ascontiguousarray(scale), None, 8)

    kinds = ("weight", "weight_scale_inv")
    return QuantizedLayout(method, (8,), kinds, "weight", "weight_scale_inv", decode, number="fp")


def _decode_plain(arrays: Mapping[str, np.ndarray]) -> Values:
    values = arrays["weight"].astype(np.int8)
    scale = _scales(arrays["weight_scale"], len(values))
    zero = arrays.get("weight_zero_point")
    if zero is not None and not np.any(zero):
        zero = None
    if zero is None:
        return Values(values, scale, None, 8)
    zeros = zero.astype(np.int32).reshape(len(zero), -1) + 128
    return _centred(values.astype(np.int32) + 128, scale, zeros, 8, "weight_zero_point")


def _decode_compressed(arrays: Mapping[str, np.ndarray]) -> Values:
    out, size = (int(n) for n in arrays["weight_shape"])
    packed = arrays["weight_packed"]
    bits = next((b for b in (4, 8) if -(-size * b // 32) == packed.shape[1]), None)
    if bits is None or packed.shape[0] != out:
        raise ValueError(
            f"weight_packed is {list(packed.shape)}, which holds no {out} by {size} values of 4 or "
            f"8 bits; {WAY_OUT}"
        )
    codes = unpack_words(packed, bits, axis=1)[:, :size]
    scale = _scales(arrays["weight_scale"], out)
    _check_order(arrays.get("weight_g_idx"), size, scale.shape[1])
    zeros = arrays.get("weight_zero_point")
    if zeros is None:
        zeros = np.full(scale.shape, 1 << (bits - 1), np.int32)
    elif zeros.dtype == np.int8:  # of older versions, not packed
        zeros = zeros.astype(np.int32).reshape(len(zeros), -1) + (1 << (bits - 1))
    else:
        zeros = unpack_words(zeros, bits, axis=0)[:out]
    return _centred(codes, scale, zeros, bits, "weight_zero_point")


def _scales(scale: np.ndarray, out: int) -> np.ndarray:
    if scale.size % out:
        raise ValueError(f"weight_scale is {list(scale.shape)}, of {out} outputs; {WAY_OUT}")
    return np.ascontiguousarray(scale.reshape(out, -1), np.float32)


def _check_order(order: np.ndarray | None, size: int, groups: int) -> None:
    """Raises ``ValueError`` where inputs are not in the order of their groups."""
    if order is None or order.size == 0 or np.all(order == -1):
        return
    if size % groups or not np.array_equal(order, np.arange(size) // (size // groups)):
        raise ValueError(f"g_idx: the groups are not in the order of the inputs; {WAY_OUT}")


def _centred(
    codes: np.ndarray, scale: np.ndarray, zeros: np.ndarray, bits: int, kind: str
) -> Values:
    """``Values`` of unsigned codes, and of zeros from the tensor ``kind``."""
    middle = 1 << (bits - 1)
    if zeros.shape != scale.shape:
        raise ValueError(
            f"{kind} holds zeros {list(zeros.shape)}, and there are scales {list(scale.shape)}; "
            f"{WAY_OUT}"
        )
    beyond = zeros[(zeros < 0) | (zeros >= 2 * middle)]
    if beyond.size:
        raise ValueError(
            f"{kind} has a zero point of {beyond[0]}, and codes of {bits} bits are 0 to "
            f"{2 * middle - 1}; {WAY_OUT}"
        )
    zeros = zeros.astype(np.int32) - middle
    zero = np.ascontiguousarray(zeros, np.int8) if np.any(zeros) else None
    values = np.ascontiguousarray(codes.astype(np.int32) - middle, np.int8)
    return Values(values, np.ascontiguousarray(scale, np.float32), zero, bits)


def encode(name: str, weight: Values) -> dict[str, np.ndarray]:
    """The tensors of the weight ``name`` (without ``.weight``) in compressed-tensors'
    ``pack-quantized``.

    Raises:
      ValueError: a zero that does not fit in the bits of the weight.
    """
    middle = 1 << (weight.bits - 1)
    codes = weight.values.astype(np.int32) + middle
    tensors = {
        f"{name}.weight_packed": pack_words(codes, weight.bits, axis=1),
        f"{name}.weight_scale": weight.scale,
        f"{name}.weight_shape": np.asarray(weight.values.shape, np.int64),
    }
    if weight.zero is not None:
        zeros = weight.zero.astype(np.int32) + middle
        kind = f"{name}.weight_zero_point"
        try:
            tensors[kind] = pack_words(zeros, weight.bits, axis=0)
        except ValueError as error:
            raise ValueError(f"{kind} cannot be written: {error}") from None
    return tensors


def config_of(held: Mapping[str, tuple[int, int | None, bool]], floats: list[str]) -> dict:
    """``quantization_config`` of what ``encode`` writes.

    Args:
      held: of each quantized module the bits, the inputs of a group (None: all), and whether it
        has zeros.
      floats: the modules with a weight that is not quantized.
    """
    kinds: dict[tuple, list[str]] = {}
    for module, kind in held.items():
        kinds.setdefault(kind, []).append(module)
    groups = {}
    for i, (kind, modules) in enumerate(sorted(kinds.items(), key=lambda item: -len(item[1]))):
        bits, size, zeros = kind
        groups[f"group_{i}"] = {
            "targets": modules if i else ["Linear"],  # names go before classes
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": not zeros,
                "strategy": "channel" if size is None else "group",
                "group_size": size,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": floats,
    }
