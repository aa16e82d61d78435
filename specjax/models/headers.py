"""What the weight files of a checkpoint hold, as their headers state it.

Everything that can be wrong with a checkpoint is found here, before the first byte of a weight is
read, and reported at once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
from safetensors import SafetensorError, safe_open

from .config import DecoderConfig
from .family import Family
from .files import holdings, read_json
from .seq2seq.config import EncoderDecoderConfig
from .tensors import Tensor, shape_of

FILE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# the name of SINGLE beside MODULES; published shards are counted from 1, so that none has it
SHARD = "model-00000-of-00001.safetensors"
MODULES = "mtp.safetensors"  # modules for multi-token prediction that this project adds
WEIGHT_FILE = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
ROWS_AT_ONCE = 4096  # of a table that is compared
_LISTED = 8  # problems of one kind that an error names before it only counts


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The file of a tensor, and the entry of the file's header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
      FileNotFoundError: there are none, or a file that the index names is absent.
      ValueError: the index names files outside its folder, or none.
    """
    if (folder / SINGLE).is_file():  # before an index, as in transformers
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = read_json(folder, INDEX).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{folder / INDEX} has no weight_map")
        shards = sorted({str(name) for name in names.values()})
        for name in shards:
            for kind in (PurePosixPath(name), PureWindowsPath(name)):
                if kind.anchor or ".." in kind.parts:
                    raise ValueError(
                        f"{folder / INDEX} names the file {name!r}, which may lie outside its "
                        "folder: an index must name files in its own folder; download it again"
                    )
        files = [folder / name for name in shards]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(
                f"{folder} lacks {len(absent)} of the {len(files)} shards that its index names: "
                f"{_some(absent)}; download it again"
            )
        return files
    pickled = any([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    raise FileNotFoundError(
        f"{folder} has no weights: neither {SINGLE} nor {INDEX} ({holdings(folder)})"
        + ("; save PyTorch pickles again as safetensors with transformers" if pickled else "")
    )


def read_headers(folder: Path, family: Family, wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its full name, from the files' headers alone."""
    wanted, stored = set(wanted), {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():
                    own = name.removeprefix(family.inside)
                    full = family.prefix + own if family.prefix + own in wanted else own
                    piece = file.get_slice(name)
                    stored[full] = StoredTensor(
                        path, name, tuple(piece.get_shape()), piece.get_dtype()
                    )
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or corrupt ({path.stat().st_size} bytes; {error}); "
                "download or save it again"
            ) from None
    return stored


def as_stored(wanted: dict[str, Tensor], packed: dict[str, Tensor], stored) -> dict[str, Tensor]:
    """``wanted``, with the packed tensors that are there in place of those of their parameters."""
    present = {name: tensor for name, tensor in packed.items() if name in stored}
    covered = {part for tensor in present.values() for part in tensor.parts}
    return {n: t for n, t in wanted.items() if not covered.intersection(t.parts)} | present


def check_stored(
    folder: Path,
    config: DecoderConfig | EncoderDecoderConfig,
    wanted: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    is_harmless: Callable[..., bool],
) -> None:
    """Compares what the files hold with what the config promises.

    Args:
      folder: holds the files; an error names it.
      config: the config of the model.
      wanted: the tensors that the config promises, by name.
      stored: the tensors of the files, by name.
      shapes: the shape of each parameter.
      is_harmless: called with the config, a name and ``stored``: whether a tensor that is not
        wanted may be left over.

    Raises:
      ValueError: with all differences.
    """
    found = {_layer(name) for name in stored}
    absent = list(dict.fromkeys(n for n in map(_layer, wanted) if n and n not in found))
    missing = [name for name in wanted if name not in stored and _layer(name) not in absent]
    left_over = [n for n in stored if n not in wanted and not is_harmless(config, n, stored)]
    misshapen, mistyped = [], []
    for name in (n for n in wanted if n in stored):
        expected = shape_of(wanted[name], shapes)
        if stored[name].shape != expected:
            misshapen.append(f"{name} is {list(stored[name].shape)}, expected {list(expected)}")
        if stored[name].dtype not in FILE_DTYPES:
            mistyped.append(f"{name} is {stored[name].dtype}, expected {'/'.join(FILE_DTYPES)}")
    problems = {
        "whole layers missing": absent,
        "missing": missing,
        "wrong shape": misshapen,
        "wrong type": mistyped,
        "left over": left_over,
    }
    if any(problems.values()):
        lines = [f"  {kind} ({len(n)}): {_some(n)}" for kind, n in problems.items() if n]
        raise ValueError(
            f"the weights in {folder} are not those of its config.json "
            f"(model_type={config.model_type!r}):\n" + "\n".join(lines)
        )


def check_tied(
    folder: Path,
    table: str,
    head: str,
    stored: Mapping[str, StoredTensor],
    quantized: Container[str] = (),
) -> None:
    """Raises ``ValueError`` where the LM head of a tied model is stored, and not as its embedding.

    Args:
      folder: holds the files; an error names it.
      table: the name of the embedding.
      head: the name of the LM head.
      stored: the tensors of the files, by name.
      quantized: the names of those that are quantized; such an LM head is never the embedding.
    """
    pair = [stored.get(name) for name in (table, head)]
    if None in pair or pair[0] == pair[1] or any(one.dtype not in FILE_DTYPES for one in pair):
        return
    (size, width), (other, others) = pair[0].shape, pair[1].shape
    size, equal = min(size, other), width == others  # further rows are padding
    equal = equal and table not in quantized and head not in quantized
    with contextlib.ExitStack() as files:
        rows = [files.enter_context(safe_open(one.path, "np")).get_slice(one.name) for one in pair]
        for start in range(0, size if equal else 0, ROWS_AT_ONCE):
            parts = (one[start : min(start + ROWS_AT_ONCE, size)] for one in rows)
            one, same = (part.astype(np.float32) for part in parts)
            equal = equal and np.array_equal(one, same, equal_nan=True)
    if not equal:
        raise ValueError(
            f"config.json in {folder} says tie_word_embeddings=true, and the files hold {head}, "
            f"which is not {table}: if the LM head was trained by itself, write "
            '"tie_word_embeddings": false into config.json; otherwise remove that tensor'
        )


def main_dtype(stored: Mapping[str, StoredTensor]) -> str:
    counts = collections.Counter()
    for entry in stored.values():
        counts[entry.dtype] += math.prod(entry.shape)
    return next(FILE_DTYPES[d] for d, _ in counts.most_common() if d in FILE_DTYPES)


def _layer(name: str) -> str | None:
    """``model.layers.7`` of ``model.layers.7.mlp.up_proj.weight``; None outside the layers."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found and found.group(1)


def _some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return "; ".join(names[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
