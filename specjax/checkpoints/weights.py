"""Named tensors of a drafter's folder: read one at a time, checked against what is expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from ..models.files import holdings
from ..models.lm import LM
from ..models.quantize import is_quantized

PICKLES = ("*.pt", "*.pth", "*.bin")
_LISTED = 6  # names that an error gives before it only counts


class Tensors(Mapping):
    """Names to arrays: those of all safetensors files of a folder, else of its PyTorch files.

    Only headers are read before a tensor is asked for (of PyTorch files: everything). ``files``:
    these alone.
    """

    def __init__(self, folder: Path, files: Sequence[Path] | None = None):
        self.files = sorted(folder.glob("*.safetensors")) if files is None else [*files]
        self._at: dict[str, Path | np.ndarray] = {}
        for path in self.files:
            try:
                with safe_open(path, "np") as file:
                    self._at |= dict.fromkeys(file.keys(), path)
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is truncated or corrupt ({path.stat().st_size} bytes; {error}); "
                    "download or save it again"
                ) from None
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
                return file.get_tensor(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read."""
        found = self._at[name]
        if not isinstance(found, Path):
            return found.shape
        with safe_open(found, "np") as file:
            return tuple(file.get_slice(name).get_shape())

    def place(self, name: str) -> tuple[Path, str]:
        """The file of a tensor, and its name there. Raises ValueError in PyTorch files."""
        found = self._at[name]
        if not isinstance(found, Path):
            raise ValueError(f"{name} lies in a PyTorch file; save it as safetensors")
        return found, name

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def read_pickle(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a PyTorch file, of which nothing but tensors is unpickled.

    Raises:
      ValueError: PyTorch is not installed, or the file holds something else.
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
        raise ValueError(f"{path} is no dictionary of tensors: it holds {some(wrong)}")
    return {name: _array(x) for name, x in content.items()}


def _array(tensor) -> np.ndarray:
    """NumPy has no bfloat16 of its own; float32 holds all its values."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().numpy()


def write_pickle(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A PyTorch file of ``tensors``, for codes that read no other. Raises ValueError without it."""
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


def take(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]], others=()
) -> dict[str, np.ndarray]:
    """The ``wanted`` tensors, whose shapes are given; ``others``: names that may be there too.

    Raises:
      ValueError: with all that is missing, left over or of another shape.
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
    lines = [f"  {kind} ({len(n)}): {some(n)}" for kind, n in problems.items() if n]
    if lines:
        raise ValueError("the weights are not those that the config promises:\n" + "\n".join(lines))
    return found


def check_whole(**values) -> None:
    """Raises ValueError for entries of a config, by their names, that are no whole numbers."""
    wrong = [f"{name}={value!r}" for name, value in values.items() if not isinstance(value, int)]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}: it must be a whole number")


def check_sizes(target: LM, **sizes: int) -> None:
    """Raises ValueError unless ``hidden_size`` and ``vocab_size`` of a drafter are the target's."""
    own = {"hidden_size": target.config.hidden_size, "vocab_size": target.target.vocab_size}
    wrong = [
        f"{name}={size} (the target: {own[name]})"
        for name, size in sizes.items()
        if size != own[name]
    ]
    if wrong:
        raise ValueError(
            f"made for another target than {target.name}: {', '.join(wrong)}; load the target that "
            "it belongs to"
        )


def check_same(name: str, found: np.ndarray, own, target: LM) -> None:
    """Raises ValueError where a file holds, for a table of the target, what is not that.

    ``own``: that table. Numbers may be rounded otherwise; a quantized table is not compared."""
    if is_quantized(own):
        return
    own = np.asarray(own, np.float32)
    if own.shape != found.shape or not np.allclose(own, found.astype(np.float32), 2e-2, 2e-3):
        raise ValueError(
            f"made for another target than {target.name}: they share one table of their target, "
            f"{name} {list(found.shape)}, and {target.name} has another"
        )


def loaded(
    tensors: Mapping[str, np.ndarray],
    names: Mapping[str, tuple],
    state: nnx.State,
    dtype,
    others=(),
) -> dict:
    """The parameters that lie in a file under ``names``, as a nested dictionary in ``dtype``.

    Args:
      names: of each tensor in the file the path of its parameter, ``(..., "linear", "weight")``.
        Several may have one path if they hold the same.
      state: shapes of the parameters, abstract.
      others: see ``take``.

    Raises:
      ValueError: as ``take``; tensors for one parameter that differ.
    """
    shapes = {path: param.shape for path, param in nnx.to_flat_state(state)}
    found = take(tensors, {name: shapes[path] for name, path in names.items()}, others)
    params: dict = {}
    first = {}
    for name, path in names.items():
        same = first.setdefault(path, name)
        if same != name:
            if not np.array_equal(found[name], found[same]):
                raise ValueError(f"{name} differs from {same}; the authors' code holds them once")
            continue
        inner = params
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = jnp.asarray(found[name], dtype)
    return params


def stored(params, names: Mapping[str, tuple]) -> dict[str, np.ndarray]:
    """The reverse: tensors for a file, by their names there."""

    def at(path):
        inner = params
        for key in path:
            inner = inner[key]
        return np.ascontiguousarray(inner)

    return {name: at(path) for name, path in names.items()}


def is_float(x: np.ndarray) -> bool:
    """Whether it is of a floating type, bfloat16 too."""
    return np.issubdtype(x.dtype, np.floating) or x.dtype.name == "bfloat16"


def some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return "; ".join(names[:_LISTED]) + (f"; and {more} more" if more > 0 else "")
