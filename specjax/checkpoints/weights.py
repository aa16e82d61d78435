"""The named tensors of a drafter's folder: reading, checking and naming them.

A layout states the names of its tensors and the path of the parameter that each one holds;
``params_of`` and ``tensors_of`` convert in the two directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from ..models.causal_lm import CausalLM
from ..models.files import holdings, read_json
from ..models.headers import INDEX, ROWS_AT_ONCE, StoredTensor
from ..models.lm import LM
from ..models.quantize import is_quantized
from ..types import HeadTarget

_FLAG = (bool, type(None))
PICKLES = ("*.pt", "*.pth", "*.bin")
_LISTED = 6  # names that an error lists before it only counts the rest


class Tensors(Mapping):
    """The tensors of a folder by name: of all its safetensors files, else of its PyTorch files.

    Of safetensors files only the headers are read until a tensor is asked for; PyTorch files are
    read whole.

    Args:
      folder: where the files are.
      files: the safetensors files to read; default: all in ``folder``.

    Raises:
      FileNotFoundError: the folder has no weights.
      ValueError: a file is truncated or corrupt, or needs PyTorch, which is not installed; or two
        files hold a tensor of one name, and no index says which of them counts.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None):
        self.files = sorted(folder.glob("*.safetensors")) if files is None else [*files]
        at: dict[str, Path] = {}
        twice: dict[str, tuple[Path, Path]] = {}
        for path in self.files:
            try:
                with safe_open(path, "np") as file:
                    named = dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({path.stat().st_size} bytes; {error}); "
                    "download or save it again"
                ) from None
            twice |= {name: (at[name], path) for name in named if name in at}
            at |= named
        self._at: dict[str, Path | np.ndarray] = {**at, **_counting(folder, self.files, twice)}
        if not self.files:
            self.files = sorted(path for kind in PICKLES for path in folder.glob(kind))
            for path in self.files:
                self._at |= read_pickle(path)
        if not self.files:
            kinds = ", ".join(("*.safetensors", *PICKLES))
            raise FileNotFoundError(f"{folder} has no weights, {kinds} ({holdings(folder)})")

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._at[name]
        if isinstance(found, Path):
            with safe_open(found, "np") as file:
                kind = file.get_slice(name).get_dtype()
                if kind.startswith("F8"):
                    raise ValueError(
                        f"{name} is {kind}, a number that stands for a weight only with its scale, "
                        "and this layout has no quantized weights: take the unquantized checkpoint"
                    )
                return file.get_tensor(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._at  # that of ``Mapping`` would read the tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        found = self._at[name]
        if not isinstance(found, Path):
            return found.shape
        with safe_open(found, "np") as file:
            return tuple(file.get_slice(name).get_shape())

    def place(self, name: str) -> tuple[Path, str]:
        """The file of a tensor, and its name there.

        Raises:
          ValueError: the tensor is in a PyTorch file.
        """
        found = self._at[name]
        if not isinstance(found, Path):
            raise ValueError(f"{name} is in a PyTorch file: save the weights as safetensors")
        return found, name

    def entry(self, name: str) -> StoredTensor:
        """What the header of a file says of a tensor.

        Raises:
          ValueError: the tensor is in a PyTorch file.
        """
        path, _ = self.place(name)
        with safe_open(path, "np") as file:
            piece = file.get_slice(name)
            return StoredTensor(path, name, tuple(piece.get_shape()), piece.get_dtype())

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _counting(folder: Path, files: Sequence[Path], twice: Mapping) -> dict[str, Path]:
    """The file that counts by the index, for each of the tensors ``twice`` that two files hold.

    Raises:
      ValueError: there is no index, or it names none of them.
    """
    index = read_json(folder, INDEX) if twice and (folder / INDEX).is_file() else {}
    said, known = index.get("weight_map"), {path.name: path for path in files}
    named = {name: str(said.get(name)) for name in twice} if isinstance(said, dict) else {}
    for name, (one, other) in twice.items():
        if named.get(name) not in known:
            raise ValueError(
                f"{name} is both in {one.name} and in {other.name}, and no {INDEX} says which "
                f"counts: move the file that does not belong to the others out of {folder}"
            )
    return {name: known[at] for name, at in named.items()}


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """Reads a PyTorch file of tensors; nothing else in it is unpickled.

    Raises:
      ValueError: PyTorch is not installed, or the file holds something other than tensors.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError(
            f"{path} is a PyTorch file, and PyTorch is not installed: pip install torch, or save "
            "its tensors as a safetensors file"
        ) from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types: what an unpickler meets in a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as PyTorch tensors: {reason:.200}") from None
    wrong = [f"a {type(content).__name__}"]
    if isinstance(content, Mapping):
        wrong = [str(name) for name, x in content.items() if not torch.is_tensor(x)]
    if wrong:
        raise ValueError(f"{path} is no dictionary of tensors: it holds {listed(wrong)}")
    return {name: _array(x) for name, x in content.items()}


def _array(tensor) -> np.ndarray:
    """A NumPy array; bfloat16, which NumPy lacks, becomes float32, which has all its values."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()


def write_pickle(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes ``tensors`` to a PyTorch file, for programs that read no safetensors.

    Raises:
      ValueError: PyTorch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise ValueError(
            f"{path.name}: PyTorch is not installed; pip install torch, or save safetensors"
        ) from None

    def tensor(x):
        if x.dtype.name != "bfloat16":
            return torch.from_numpy(np.array(x))
        return torch.from_numpy(x.astype(np.float32)).bfloat16()

    torch.save({name: tensor(x) for name, x in tensors.items()}, path)


def select(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]], others=()
) -> dict[str, np.ndarray]:
    """Picks the tensors of a layout out of a file, and checks that the file fits the layout.

    Args:
      tensors: the tensors of the file.
      wanted: names to shapes.
      others: names that the file may have besides.

    Raises:
      ValueError: a tensor is missing, left over, misshapen or no floating-point one; lists them.
    """
    missing = [name for name in wanted if name not in tensors]
    left_over = [name for name in tensors if name not in wanted and name not in {*others}]
    found = {name: tensors[name] for name in wanted if name in tensors}
    misshapen = [
        f"{name} is {list(x.shape)}, expected {list(wanted[name])}"
        for name, x in found.items()
        if x.shape != tuple(wanted[name])
    ]
    mistyped = [f"{name} is {x.dtype}" for name, x in found.items() if not is_float(x)]
    problems = {
        "missing": missing,
        "wrong shape": misshapen,
        "no floating point": mistyped,
        "left over": left_over,
    }
    lines = [f"  {kind} ({len(n)}): {listed(n)}" for kind, n in problems.items() if n]
    if lines:
        raise ValueError(
            "the weights are not those that config.json describes:\n" + "\n".join(lines)
        )
    return found


def check_integers(**values) -> None:
    """Raises ValueError for entries of a config, given by name, that are not integers; true and
    false are none."""
    wrong = [f"{name}={value!r}" for name, value in values.items() if type(value) is not int]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}: it must be a whole number")


def check_numbers(**values) -> None:
    """Raises ValueError for entries of a config, given by name, that are no finite numbers."""
    for name, value in values.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"config.json: {name}={value!r}: it must be a finite number")


def flags_of(config: Mapping, **usual: bool | None) -> dict[str, Any]:
    """The entries of a config that are true or false, by name.

    Args:
      config: the config, or a part of it.
      usual: the names, each with the value of one that is absent or null.

    Raises:
      ValueError: an entry is neither true nor false, such as ``"false"`` or 0.
    """
    found = usual | {key: config[key] for key in usual if config.get(key) is not None}
    wrong = [f"{key}={value!r}" for key, value in found.items() if type(value) not in _FLAG]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}: it must be true or false")
    return found


def readable(target: LM) -> HeadTarget:
    """The target of an ``LM``; raises TypeError where no heads can read it."""
    if not isinstance(target.target, HeadTarget):
        raise TypeError(f"target={target!r:.60}: heads read a specjax.HeadTarget")
    return target.target


def check_sizes(target: LM, **sizes: int) -> None:
    """Raises ValueError unless a drafter's ``hidden_size`` and ``vocab_size`` are the target's. A
    target of one's own need not say its ``hidden_size``; it is not compared then."""
    own = {"hidden_size": readable(target).hidden_size, "vocab_size": target.target.vocab_size}
    wrong = [
        f"{name}={size} (the target: {own[name]})"
        for name, size in sizes.items()
        if own[name] is not None and size != own[name]
    ]
    if wrong:
        raise ValueError(
            f"made for another target than {target.name}: {', '.join(wrong)}; load the target that "
            "it belongs to"
        )


def check_num_layers(config: Mapping, target: LM) -> None:
    """Raises ValueError where a config has ``num_target_layers``, and it is not the target's."""
    said, count = config.get("num_target_layers"), readable(target).num_layers
    check_integers(num_target_layers=count if said is None else said)
    if said not in (None, count):
        raise ValueError(
            f"num_target_layers={said}: made for another target than {target.name}, which has "
            f"{count} layers; load the target that it belongs to"
        )


def embedding_table(target: LM):
    """The embeddings ``[V, H]`` of a target that is a ``HeadTarget``."""
    model = readable(target)
    if isinstance(model, CausalLM):
        return model.table(target.params)
    return model.embed(target.params, jnp.arange(model.vocab_size, dtype=jnp.int32)[None]).T


def head_table(target: LM):
    """The weight ``[V, H]`` of the LM head of a target that is a ``HeadTarget``."""
    return readable(target).head_table(target.params)


def same_table(found: np.ndarray, own) -> bool:
    """Whether a tensor of a file differs from a table of the target by no more than rounding."""

    def rows(table, start):
        return np.asarray(table[start : start + ROWS_AT_ONCE], np.float32)

    return found.shape == own.shape and all(
        np.allclose(rows(own, i), rows(found, i), 2e-2, 2e-3)
        for i in range(0, len(found), ROWS_AT_ONCE)
    )


def check_copy(name: str, found: np.ndarray, own, target: LM) -> None:
    """Checks that a tensor of a file is a copy of a table of the target.

    Args:
      name: name of the tensor in the file.
      found: the tensor.
      own: the table of the target. A quantized one is not compared.
      target: the target, for the error.

    Raises:
      ValueError: they differ by more than rounding.
    """
    if not is_quantized(own) and not same_table(found, own):
        raise ValueError(
            f"made for another target than {target.name}: {name} {list(found.shape)} is a copy of "
            f"a table of the target, and that of {target.name} differs"
        )


def params_of(
    tensors: Mapping[str, np.ndarray],
    names: Mapping[str, tuple],
    state: nnx.State,
    dtype,
    others=(),
) -> dict:
    """The parameters that a file holds, as a nested dictionary.

    Args:
      tensors: the tensors of the file.
      names: the name of each tensor to the path of its parameter, ``(..., "linear", "weight")``.
        Several tensors may have one path if they are equal.
      state: the shapes of the parameters, ``HeadDrafter.shapes``.
      dtype: of the parameters that are returned.
      others: names that the file may have besides.

    Raises:
      ValueError: as ``select``; or tensors of one parameter differ.
    """
    shapes = {path: param.shape for path, param in nnx.to_flat_state(state)}
    found = select(tensors, {name: shapes[path] for name, path in names.items()}, others)
    params: dict = {}
    first = {}
    for name, path in names.items():
        same = first.setdefault(path, name)
        if same != name:
            if not np.array_equal(found[name], found[same]):
                raise ValueError(
                    f"{name} differs from {same}, and both are one parameter: save the heads again"
                )
            continue
        inner = params
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = jax.device_put(np.array(found[name], dtype))
    return params


def tensors_of(params, names: Mapping[str, tuple]) -> dict[str, np.ndarray]:
    """The tensors of a file, by name: the reverse of ``params_of``."""

    def at(path):
        inner = params
        for key in path:
            inner = inner[key]
        return np.ascontiguousarray(inner)

    return {name: at(path) for name, path in names.items()}


def is_float(x: np.ndarray) -> bool:
    """Whether an array is of a floating-point type, bfloat16 included."""
    return np.issubdtype(x.dtype, np.floating) or x.dtype.name == "bfloat16"


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _LISTED
    return "; ".join(names[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
