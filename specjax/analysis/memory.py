"""The memory of a model on a mesh, computed from ``config.json`` without loading or compiling.

Weights and caches are exact, because the table of ``models/placement.py`` determines their sizes.
The working set is an estimate: the large buffers of a round, of a chunk of the prompt or of the
encoder, whichever are largest. A pass over N nodes all-reduces the residual stream ``[H, B N]``
once after the embedding and twice per layer (three times in a decoder that also attends to an
encoder's memory).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.files import read_json
from ..models.hf import abstract, check_dtype, dtype_of, load_config
from ..models.placement import check_divides, spec_of
from ..models.quantize import FLOAT, Quantization, as_quantization, stored_arrays
from ..models.seq2seq.config import EncoderDecoderConfig
from ..models.seq2seq.encoder import QUERIES
from ..models.seq2seq.families import FAMILIES as ENCODER_FAMILIES
from ..models.seq2seq.families import config_from_hf as encoder_config_from_hf
from ..models.translate import config_from_hf
from ..sharding import DATA, MODEL, STAGE, axis_sizes
from ..text.prepare import SMALLEST_BUFFER, round_up

Config = DecoderConfig | EncoderDecoderConfig

LAWS = 4  # float32 [B, V] buffers of a sampled round: p, q, the residual, and a temporary one
CHUNK, BLOCK = 256, 2048  # prompt tokens in a pass; cache slots whose scores are computed at once
GIB = 2**30
LIKELY_CONTEXT = 8192  # tokens, the default of ``context``
LIKELY_SOURCE = 512  # tokens, the default of ``source``, and of ``context`` with an encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """One model on a mesh. All sizes are in bytes.

    Attributes:
      name: name of the model.
      parts: number of devices that share the model; 1 means that every device holds all of it.
      parameters: number of parameters.
      weights: size of the weights, on all devices together.
      weights_each: size of the weights on each device.
      whole: the part of ``weights_each`` that every device holds (norms, and arrays that are not
        split).
      cache_token: cache of one more token in one row, in all layers without a window.
      cache_token_each: cache of one more token in one row on each device.
      cache_each: cache of all rows of a device, with every slot of the buffer and the encoder's
        memory.
      reduced: size of the all-reduced arrays of a round, on each device.
      reduces: number of all-reduces in a round.
      encoder: the part of ``weights`` that belongs to an encoder; 0 without an encoder.
      memory_row: keys and values of the encoder's memory for one row, in all layers of the decoder.
      memory_row_each: keys and values of the encoder's memory for one row on each device.
    """

    name: str
    parts: int
    parameters: int
    weights: int
    weights_each: int
    whole: int
    cache_token: int
    cache_token_each: int
    cache_each: int
    reduced: int
    reduces: int
    encoder: int = 0
    memory_row: int = 0
    memory_row_each: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of a target and its draft model on a mesh, from ``plan_memory``; prints as a table.

    Attributes:
      mesh: number of devices along each axis.
      batch: number of rows.
      context: number of tokens in a row, prompt and text together; the caches have as many slots.
      buffer: number of slots that ``generate`` and ``serve_offline`` take for so many tokens.
      num_draft: number of tokens drafted in a round.
      dtype: dtype of weights and caches.
      source: number of positions that an encoder reads for a row, or None.
      models: the target, then the draft model if there is one.
      working_each: estimate of the other buffers of a program, in bytes on each device.
    """

    mesh: Mapping[str, int]
    batch: int
    context: int
    buffer: int
    num_draft: int
    dtype: str
    source: int | None
    models: tuple[ModelMemory, ...]
    working_each: int

    @property
    def total_each(self) -> int:
        """Weights, caches and working set, in bytes on each device."""
        return self.working_each + sum(m.weights_each + m.cache_each for m in self.models)

    def as_json(self) -> dict:
        """Returns the plan as JSON values."""
        return dataclasses.asdict(self) | {"total_each": self.total_each}

    def __str__(self) -> str:
        mesh, models = ", ".join(f"{k} {v}" for k, v in self.mesh.items()), self.models
        encodes = self.source is not None
        of_encoder = [
            ("  of the encoder", *(_gib(m.encoder) for m in models)),
            ("memory a row", *(_mib(m.memory_row) for m in models)),
            ("memory a row, each device", *(_mib(m.memory_row_each) for m in models)),
        ]
        rows = [
            ("", *(f"{m.name}" for m in models)),
            ("parameters", *(f"{m.parameters / 1e9:.2f} G" for m in models)),
            ("shared by", *(f"{m.parts} devices" if m.parts > 1 else "none" for m in models)),
            ("weights", *(_gib(m.weights) for m in models)),
            *(of_encoder[:1] if encodes else ()),
            ("weights, each device", *(_gib(m.weights_each) for m in models)),
            ("  held by every device", *(_mib(m.whole) for m in models)),
            ("cache a token", *(_kib(m.cache_token) for m in models)),
            ("cache a token, each device", *(_kib(m.cache_token_each) for m in models)),
            *(of_encoder[1:] if encodes else ()),
            ("cache, each device", *(_gib(m.cache_each) for m in models)),
            ("all-reduces a round", *(f"{m.reduces}" for m in models)),
            ("all-reduced bytes a round", *(_mib(m.reduced) for m in models)),
        ]
        encoder = f" and {self.source} encoder positions" if encodes else ""
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(n) if i == 0 else cell.rjust(n) for i, (cell, n) in pairs).rstrip()
            for pairs in (list(enumerate(zip(row, wide, strict=True))) for row in rows)
        ]
        buffers = [
            f"generate and serve-offline take a buffer of {self.buffer} tokens for {self.context}: "
            f"context {self.buffer} says what they need"
        ] * (self.buffer > self.context)
        return "\n".join(
            [
                f"mesh {mesh}; {self.batch} rows of {self.context} tokens{encoder}; "
                f"{self.num_draft} drafts a round; {self.dtype}",
                *lines,
                f"working set, each device: about {_gib(self.working_each)}",
                f"in all, each device: {_gib(self.total_each)}",
                *buffers,
            ]
        )


def plan_memory(
    target: Config | str | os.PathLike,
    drafter: Config | str | os.PathLike | None = None,
    *,
    mesh: str | Mapping[str, int] = "data=1,model=1",
    batch: int = 1,
    context: int | None = None,
    source: int | None = None,
    num_draft: int = 3,
    temperature: float = 0.0,
    dtype: object = "bfloat16",
    quantize: str | Quantization | None = None,
    drafter_quantize: str | Quantization | None = None,
    replicate_drafter: bool = False,
) -> MemoryPlan:
    """Computes the memory of a target, and of a draft model, on a mesh that need not exist.

    Args:
      target: a config, a ``config.json``, or a folder or hub name with a ``config.json``.
      drafter: a config, a ``config.json``, or a folder or hub name of a draft model, or None.
      mesh: the number of devices along each axis, as for ``specjax.load``.
      batch: the number of rows.
      context: the number of tokens in a row, prompt and text together, for each of which caches
        have a slot (``capacity`` of ``decode``). ``generate`` and ``serve_offline`` round it up to
        256, 512, 1024 and so on; the plan names that number (``buffer``). None: 8,192, or the
        target's context if that is shorter; 512 for T5.
      source: the number of positions that an encoder reads for a row, including padding. None: 512,
        or the whole window of a model that reads windows.
      num_draft: the number of tokens drafted in a round.
      temperature: above 0, a round also stores laws over the vocabulary.
      dtype: the dtype of weights and caches.
      quantize: ``quantize`` of ``specjax.load`` for the target.
      drafter_quantize: ``quantize`` of ``specjax.load`` for the draft model.
      replicate_drafter: whether every device holds the whole draft model, which then needs no
        all-reduces.

    Returns:
      a ``MemoryPlan`` with sizes in bytes, in total and on each device.

    Raises:
      ValueError: the mesh cannot split a model or the rows, a size is below 1, a name is unknown,
        target and draft model read different inputs, or a setting of a draft model is given without
        a draft model.
      FileNotFoundError: there is no such config.

    Example::

        print(specjax.plan_memory("benchmarks/shapes/llama-3.1-70b.json", mesh="model=8"))
    """
    sizes = axis_sizes(mesh)
    if STAGE in sizes:
        raise ValueError(
            f"mesh: stage={sizes[STAGE]}: the memory of layers divided over the axis stage is not "
            "computed; give sizes of data and model"
        )
    for name, value in (("batch", batch), ("context", context), ("source", source)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: it must be at least 1")
    unused = [("drafter_quantize", drafter_quantize), ("replicate_drafter", replicate_drafter)]
    for name, value in unused if drafter is None else ():
        if value:
            raise ValueError(
                f"{name}={value!r}: there is no draft model; give drafter, or leave {name} out"
            )
    if num_draft < 0:
        raise ValueError(f"num_draft={num_draft}: it must be at least 0")
    if batch % sizes[DATA]:
        raise ValueError(
            f"batch={batch} rows cannot be shared by data={sizes[DATA]} devices: give a multiple"
        )
    name, config = _config_of(target)
    context, longest, source = _lengths(name, config, context, source)
    kind = check_dtype(dtype) or jnp.dtype("bfloat16")
    rows = batch // sizes[DATA]
    planned = [(name, config, quantize, sizes[MODEL], [num_draft + 1])]
    if drafter is not None:
        parts = 1 if replicate_drafter else sizes[MODEL]
        other, small = _config_of(drafter)
        if getattr(small, "reads", None) != getattr(config, "reads", None):
            raise ValueError(
                f"drafter: {other} ({small.model_type}) does not read what {name} "
                f"({config.model_type}) reads; give a draft model that does"
            )
        planned.append((other, small, drafter_quantize, parts, [2] + [1] * (num_draft - 1)))
    models, working = [], []
    for name, config, scheme, parts, widths in planned:
        scheme = None if scheme == FLOAT else as_quantization(scheme)
        check_divides(config, parts)
        shape = parts, rows, context, source, kind
        models.append(_model(name, config, *shape, scheme, widths))
        working.append(_working(config, *shape, num_draft, temperature))
    return MemoryPlan(
        mesh=sizes,
        batch=batch,
        context=context,
        buffer=round_up(context, SMALLEST_BUFFER, longest),
        num_draft=num_draft,
        dtype=kind.name,
        source=source,
        models=tuple(models),
        working_each=max(working),  # target and drafter run in turn
    )


def _lengths(name, config, context, source) -> tuple[int, int | None, int | None]:
    """Returns the tokens of a row, the most that the model takes, and the positions that an encoder
    reads.

    Raises:
      ValueError: a number is beyond the limits of the model.
    """
    encodes = isinstance(config, EncoderDecoderConfig)
    longest = config.max_positions if encodes else config.context_length
    if context is None:
        likely = LIKELY_SOURCE if encodes else LIKELY_CONTEXT
        context = likely if longest is None else longest if encodes else min(likely, longest)
    if longest is not None and context > longest:
        raise ValueError(
            f"context={context}: {name} reads at most {longest} tokens; give at most {longest}"
        )
    if not encodes and source is not None:
        raise ValueError(f"source={source}: {name} has no encoder; leave it out")
    window = config.max_source if encodes else None
    if window is not None and source not in (None, window):
        raise ValueError(f"source={source}: {name} reads windows of {window}; leave it out")
    return context, longest, (source or window or LIKELY_SOURCE) if encodes else None


def _config_of(source) -> tuple[str, Config]:
    from ..checkpoints import says_heads
    from ..models.model_folder import config_folder

    if isinstance(source, Config):
        return source.model_type, source
    path, name = Path(source).expanduser(), os.fspath(source)
    if path.is_file():
        file, name = path, path.stem
    elif path.is_dir():
        file, name = path / "config.json", path.name
    else:
        path = config_folder(name)
        file = path / "config.json"
    raw = read_json(file.parent, file.name)
    if says_heads(raw):
        raise ValueError(
            f"{name}: these are heads, for which no memory is computed; give a draft model, or "
            "leave the drafter out: heads add the size of their file, and at most the cache of one "
            "layer"
        )
    if not path.is_file():
        return name, load_config(path)
    encodes = raw.get("model_type") in ENCODER_FAMILIES
    return name, encoder_config_from_hf(raw, {}) if encodes else config_from_hf(raw)


def _model(name, config, parts, rows, context, source, dtype, scheme, widths) -> ModelMemory:
    total = each = whole = count = encoder = 0
    for path, param in nnx.to_flat_state(abstract(config)[1]):
        part, shape = ".".join(map(str, path)), param.get_value().shape
        size, here, copied = _stored(part, shape, dtype, scheme, parts)
        count += math.prod(shape)
        total += size
        each += here
        whole += copied
        encoder += size if part.startswith("encoder.") else 0
    entry, entry_each, layers = _entries(config, parts, context)
    entry, entry_each = entry * dtype.itemsize, entry_each * dtype.itemsize
    endless = sum(window is None for window, _ in layers)
    slots = sum(num for _, num in layers)
    read = (source or 0) * len(layers)
    sums = 2 if source is None else 3
    reduces = (sums * len(layers) + (config.vocab_size % parts == 0)) if parts > 1 else 0
    return ModelMemory(
        name=name,
        parts=parts,
        parameters=count,
        weights=total,
        weights_each=each,
        whole=whole if parts > 1 else 0,
        cache_token=entry * endless,
        cache_token_each=entry_each * endless,
        cache_each=entry_each * (slots + read) * rows,
        reduces=reduces * len(widths),
        reduced=reduces * config.hidden_size * dtype.itemsize * rows * sum(widths),
        encoder=encoder,
        memory_row=entry * read,
        memory_row_each=entry_each * read,
    )


def _entries(config: Config, parts: int, context: int):
    """Returns the count of numbers in a layer's cache for one token, in total and on each device;
    and for each layer its window (or None) and the slots of a row."""
    if isinstance(config, EncoderDecoderConfig):
        size = 2 * config.num_heads * config.head_dim
        return size, size // parts, [(None, context)] * config.num_layers
    layers = [(config.window_of(i), config.slots(i, context)) for i in range(config.num_layers)]
    if config.kv_rank:  # every device holds the whole latent cache
        return config.head_dim, config.head_dim, layers
    size = 2 * config.num_kv_heads * config.head_dim
    return size, size // parts, layers


def _stored(part: str, shape: tuple[int, ...], dtype, scheme, parts: int) -> tuple[int, int, int]:
    """Returns the bytes of a parameter after ``quantize.encode``: in total, on each device, and the
    part of the latter that every device holds."""
    arrays = stored_arrays(part, shape, scheme, dtype_of(part, dtype).itemsize)
    spec, total, each, whole = spec_of(part, shape, parts, MODEL), 0, 0, 0
    for sizes, width in arrays:
        size = math.prod(sizes) * width
        split = any(axis and n % parts == 0 for axis, n in zip(spec, sizes, strict=True))
        total += size
        each += size // (parts if split else 1)
        whole += 0 if split else size
    return total, each, whole


def _working(config, parts, rows, context, source, dtype, num_draft, temperature) -> int:
    """Returns the bytes of the largest buffers: of a round, of the prompt or of the encoder."""
    vocab = config.vocab_size // (parts if config.vocab_size % parts == 0 else 1)
    entries = _entries(config, parts, context)[1] * config.num_layers * dtype.itemsize
    wide = (2 * config.intermediate_size // parts + 4 * config.hidden_size) * dtype.itemsize
    score = 2 * 4 * config.num_heads // parts  # float32, and weights

    def trunk(columns):
        seen = min(max(context, source or 0), BLOCK)
        return columns * (wide + entries + score * seen)

    nodes = num_draft + 1
    logits = 4 * rows * nodes * vocab
    laws = 4 * rows * vocab * (num_draft + LAWS) if temperature else 0
    read = source or 0
    encoder = rows * read * (wide + entries // config.num_layers + score * min(read, QUERIES))
    prompt = trunk(rows * min(CHUNK, context))
    return max(trunk(rows * nodes) + logits + laws, prompt, encoder)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _kib(size: int) -> str:
    return f"{size / 2**10:.1f} KiB"
