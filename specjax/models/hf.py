"""Weights and configs in Hugging Face layout: folders in, folders out.

Reading goes straight from safetensors, one tensor at a time: a tensor is copied from the mapped
file, converted, put on the device, and forgotten, so the host never holds the model twice.
Everything that can be wrong with a checkpoint is found before that (see ``headers.py``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from .. import kernels
from ..sharding import MODEL, STAGE
from ..types import PyTree
from . import stage_weights, translate
from .config import DecoderConfig
from .decoder import abstract as abstract_decoder
from .files import read_json, write_json
from .headers import (
    FILE_DTYPES,
    INDEX,
    SINGLE,
    WEIGHT_FILE,
    as_stored,
    check_stored,
    check_tied,
    main_dtype,
    read_headers,
)
from .placement import check_divides
from .quantize import (
    FLOAT,
    SCHEMES,
    Quantization,
    as_quantization,
    computes,
    encode,
    floats,
    is_multiplied,
    is_quantized,
)
from .quantized_files import (
    QuantizedReader,
    bytes_of,
    merged,
    packed_tensors,
    quantization_config,
    quantized_tensors,
)
from .quantized_layouts import WAY_OUT, layout_of
from .reading import Reader, placed
from .seq2seq import families
from .seq2seq.config import EncoderDecoderConfig
from .seq2seq.encoder_decoder import abstract as abstract_encoder_decoder
from .tensors import gathered, shape_of
from .tokenizer import wrap_tokenizer

GENERATION = "generation_config.json"  # its ids of the end of a text count before config.json's
DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
}
IN_FLOAT32 = ".router.bias"  # the end of the names of parameters that need it in any model


def check_dtype(dtype: Any) -> np.dtype | None:
    """The dtype asked for, or None. Raises ValueError naming the accepted ones."""
    if dtype is None:
        return None
    try:
        name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; accepted: {', '.join(DTYPES)}, None")
    return jnp.dtype(DTYPES[name])


def load_config(folder: str | os.PathLike) -> DecoderConfig | EncoderDecoderConfig:
    """Reads ``config.json``; end-of-text ids of ``generation_config.json`` take precedence, and
    with an encoder–decoder all else that it says of prompts and tokens.

    Raises:
      ValueError: a value is missing, or not supported, naming the folder.
    """
    raw, generation = read_json(folder, "config.json"), {}
    if (Path(folder) / GENERATION).is_file():
        generation = read_json(folder, GENERATION)
    eos = generation.get("eos_token_id")
    try:
        if raw.get("model_type") in families.FAMILIES:
            return families.config_from_hf(raw, generation)
        return translate.config_from_hf(raw if eos is None else raw | {"eos_token_id": eos})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def quantized_layout(folder: str | os.PathLike):
    """How the checkpoint of a folder holds quantized weights; None where they are floats, or where
    no ``config.json`` says anything.

    Raises:
      ValueError: in a layout that is not read.
    """
    if not (Path(folder) / "config.json").is_file():
        return None
    return layout_of(read_json(folder, "config.json"))


def abstract(config) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of a model and the shapes of its weights; nothing is allocated."""
    encodes = isinstance(config, EncoderDecoderConfig)
    return (abstract_encoder_decoder if encodes else abstract_decoder)(config)


def tables_of(config) -> Any:
    """The module that translates the config and tensor names of such a model."""
    return families if isinstance(config, EncoderDecoderConfig) else translate


def load_weights(
    folder: str | os.PathLike,
    config: DecoderConfig | EncoderDecoderConfig,
    dtype: object = None,
    quantize: str | Quantization | None = None,
    mesh: Mesh | None = None,
) -> PyTree:
    """Reads a checkpoint onto the default device, or each part of it onto the devices of a mesh.

    Args:
      folder: holds ``model.safetensors``, or its shards and ``model.safetensors.index.json``.
      config: what the checkpoint should be.
      dtype: in which the model computes. Default: float32 on CPUs, few of which compute faster in
        bfloat16, else the type in which most of the checkpoint is stored. The parameters have this
        type, except for matrices that the backend holds in another one with the same numbers
        (``Backend.matrix_dtype``).
      quantize: a scheme, a ``Quantization`` or None; tensor by tensor, so that the device never
        holds the model unquantized. See ``quantize.py``. Weights that the checkpoint holds in few
        bits are read as the floats for which they stand, and these are quantized; ``"float"``
        leaves them floats, and every parameter in ``dtype``, as those who train it want it.
      mesh: each process reads only what its devices hold, tensor by tensor; which parts these are,
        ``placement.py`` says. A tied LM head that is stored all the same is read and compared.

    Returns:
      The state of ``Decoder(config)``, as ``nnx.split`` returns it; on a mesh whose axis ``stage``
      has several devices, what ``stage_weights.divided`` makes of it.

    Raises:
      FileNotFoundError: no weights, or a shard is absent.
      ValueError: corrupt or truncated files; missing, misshapen or left-over tensors; a group size
        that does not divide the inputs of a weight; a mesh whose devices cannot share the model.
    """
    stages = 1 if mesh is None else mesh.shape.get(STAGE, 1)
    if mesh is not None:
        check_divides(config, mesh.shape.get(MODEL, 1))
        stage_weights.check_stages(config, stages)
    folder, dtype, state = Path(folder), check_dtype(dtype), abstract(config)[1]
    shapes = {name: param.get_value().shape for name, param in _named(state)}
    widened = quantize == FLOAT
    quantize = None if widened else as_quantization(quantize)
    if quantize is not None:
        for name, shape in shapes.items():
            quantize.of(name, shape)
    tables = tables_of(config)
    wanted = tables.tensors_of(config, shapes)
    packed = tables.tensors_of(config, shapes, packed=True)
    family = tables.family_of(config.model_type)
    stored, held = read_headers(folder, family, {*wanted, *packed}), {}
    layout = quantized_layout(folder)
    if layout is not None:
        if layout.number == "fp" and not computes(SCHEMES["fp8"]):
            raise ValueError(
                f"the weights in {folder} are in fp8 ({layout.method}), which "
                f"{kernels.platform()} devices cannot convert; {WAY_OUT}"
            )
        stored, held = merged(stored, layout, {*wanted, *packed}, family.prefix)
    wanted = as_stored(wanted, packed, stored)
    tied = []
    if config.tie_embeddings:
        (table,) = (name for name, one in wanted.items() if one.parts == ("embedding",))
        tied = [(table, row.name) for row in family.tensors if row.parts == ("lm_head.weight",)]
    # some programs store the LM head of a tied model, and not the embedding
    alone = [(own, head) for own, head in tied if head in stored and own not in stored]
    stored |= {own: stored[head] for own, head in alone}
    held |= {own: held[head] for own, head in alone if head in held}
    check_stored(folder, config, wanted, stored, shapes, tables.is_harmless)
    for own, head in tied:
        check_tied(folder, own, head, stored, held)
    if dtype is None:
        dtype = kernels.current(mesh).param_dtype(jnp.dtype(main_dtype(stored)))
    if stages > 1 and not widened and (quantize is not None or layout is not None):
        raise ValueError(
            f"mesh: weights in few bits are not divided over stage={stages} devices; load the "
            "original weights without quantize, or these with quantize='float', or share the model "
            "over the axes data and model"
        )

    held_in: dict[str, set[str]] = {}  # the types of the tensors of which a parameter is made
    for name, tensor in wanted.items():
        for part in tensor.parts:
            held_in.setdefault(part, set()).add(stored[name].dtype)

    def matrix_dtype(part):
        kind = dtype_of(part, dtype)
        if widened or len(shapes[part]) != 2 or not is_multiplied(part, shapes[part]):
            return kind
        (one, *more) = held_in[part]
        known = not more and one in FILE_DTYPES
        stored_in = jnp.dtype(FILE_DTYPES[one]) if known else kind
        return kernels.current(mesh).matrix_dtype(stored_in, kind)

    arrays: dict[str, jax.Array] = {}
    places = {name: (stored[name].path, stored[name].name) for name in wanted}
    with contextlib.ExitStack() as files:
        reader = files.enter_context(Reader(wanted, places, shapes))
        in_bits = None
        if layout is not None:
            in_bits = files.enter_context(QuantizedReader(wanted, shapes, held, layout))
        if mesh is not None and stages > 1:

            def part_of(name):
                if in_bits is not None and name in in_bits:
                    return np.asarray(_widen(in_bits.read(name, None), dtype_of(name, dtype)))
                every = (slice(None),) * len(shapes[name])
                return reader.read(name, every, dtype_of(name, dtype))

            return stage_weights.read(config, mesh, part_of)
        for part, shape in shapes.items():
            if in_bits is not None and part in in_bits:
                piece, kind = in_bits.read(part, mesh), dtype_of(part, dtype)
                if quantize:
                    piece = encode(part, _widen(piece, jnp.dtype("float32")), quantize, kind)
                elif widened or not is_multiplied(part, shape):
                    piece = _widen(piece, kind)
                arrays[part] = jax.block_until_ready(piece)
                continue
            kind = dtype_of(part, dtype)
            if not quantize:
                kind = matrix_dtype(part)
            read = functools.partial(reader.read, part, dtype="float32" if quantize else kind)
            piece = placed(part, read, shape, mesh)
            if quantize:
                piece = encode(part, piece, quantize, kind)
            arrays[part] = jax.block_until_ready(piece)  # or copies would pile up on the host
    return _filled(state, arrays)


# one program for each shape, where single operations would be a dozen
_widen = jax.jit(floats, static_argnums=1)


def save_pretrained(
    model,
    folder: str | os.PathLike,
    *,
    dtype: object = None,
    tokenizer=None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model in Hugging Face layout, which transformers and ``specjax.load`` read.

    Every file is written under a temporary name and then renamed, ``config.json`` last, so that an
    interruption leaves no half-written file. Shards of an earlier save are removed, and so is its
    chat template where a tokenizer is saved; a ``generation_config.json`` that is there gets the
    model's ids of the end of a text.

    Args:
      model: a ``Decoder``, or an ``LM``, whose tokenizer is then saved too.
      folder: the folder to write to; it is made if it does not exist.
      dtype: the type of the weights in the files; default: that of the parameters. Weights of
        eight and four bits are written as they are, in compressed-tensors' ``pack-quantized``.
      tokenizer: a tokenizer of the library tokenizers or transformers, to save with the model.
      max_shard_bytes: the largest size of a file, unless a single tensor is larger.

    Raises:
      ValueError: an unknown dtype, weights in fp8, a model that is divided over ``stage``, or a
        config that the layout cannot express.
    """
    dtype = check_dtype(dtype)
    whole = not isinstance(model, nnx.Module)  # an LM
    state = model.params if whole else nnx.state(model)
    if not isinstance(state, nnx.State):
        raise ValueError(
            f"model: the layers are divided over the axis {STAGE!r} of a mesh; load the model "
            "without that axis to save it"
        )
    params = {name: param.get_value() for name, param in _named(state)}
    tensors = tables_of(model.config).tensors_of(model.config, params)
    in_bits = quantized_tensors(tensors, params)
    dtype = dtype or _widest(params)
    config = tables_of(model.config).config_to_hf(model.config) | {"torch_dtype": dtype.name}
    if in_bits:
        config["quantization_config"] = quantization_config(in_bits, tensors, params)
    if tokenizer is None and whole:
        tokenizer = model.tokenizer
    if tokenizer is not None:
        tokenizer = wrap_tokenizer(tokenizer, model.config.eos_ids)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        _write_weights(staging, tensors, params, dtype, max_shard_bytes, in_bits)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        write_json(staging / "config.json", config)
        if (folder / GENERATION).is_file():  # which would be read before the config
            ends = {"eos_token_id": config.get("eos_token_id")}
            write_json(staging / GENERATION, read_json(folder, GENERATION) | ends)
        written = sorted((p.name for p in staging.iterdir()), key=lambda n: n == "config.json")
        mode = (staging / "config.json").stat().st_mode  # safetensors writes for its owner alone
        for name in written:
            (staging / name).chmod(mode)
            if name == "config.json":  # what stood there before might be read with it
                _remove_stale(folder, written, tokenizer is not None)
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_stale(folder: Path, written: Sequence[str], with_tokenizer: bool) -> None:
    """Removes the weights of an earlier save, and its chat template where a tokenizer is saved."""
    stale = rf"{WEIGHT_FILE}|chat_template\.jinja" if with_tokenizer else WEIGHT_FILE
    for path in folder.iterdir():
        if re.fullmatch(stale, path.name) and path.name not in written:
            path.unlink()


def _widest(params: Mapping[str, Any]) -> np.dtype:
    """The type that holds the numbers of all parameters but those that are always float32."""
    floating = {name: x.dtype for name, x in params.items() if not is_quantized(x)}
    return jnp.result_type(*(d for name, d in floating.items() if not name.endswith(IN_FLOAT32)))


def dtype_of(part: str, dtype: np.dtype) -> np.dtype:
    """The dtype of a parameter in a model of ``dtype``."""
    return np.dtype("float32") if part.endswith(IN_FLOAT32) else dtype


def _named(state: nnx.State) -> Iterator[tuple[str, nnx.Variable]]:
    for path, param in nnx.to_flat_state(state):
        yield ".".join(map(str, path)), param


def _filled(state: nnx.State, arrays: Mapping[str, jax.Array]) -> nnx.State:
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state(
        [(path, param.replace(arrays[".".join(map(str, path))])) for path, param in flat]
    )


def _write_weights(folder: Path, tensors, params, dtype, max_shard_bytes: int, in_bits) -> None:
    """One file, or shards and their index; the host holds one shard at a time."""
    shapes = {name: value.shape for name, value in params.items()}
    kinds = {n: dtype_of(t.parts[0], dtype) for n, t in tensors.items()}
    sizes = {n: math.prod(shape_of(t, shapes)) * kinds[n].itemsize for n, t in tensors.items()}
    sizes |= {n: bytes_of(tensors[n], params) for n in in_bits}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size

    weight_map = {}
    for i, names in enumerate(shards):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for n in names:
            if n in in_bits:
                content |= packed_tensors(n, tensors[n], params)
            else:
                content[n] = gathered(tensors[n], params, kinds[n])
        weight_map |= dict.fromkeys(content, file)
        save_file(content, folder / file, {"format": "pt"})
    if len(shards) > 1:
        total = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})
