"""A saved choice of the target's own layers, which ``drafter="self"`` reads.

One small JSON file, ``self.json`` in the folder of the model or anywhere else::

    {"specjax": "self", "model": "owner/name", "fingerprint": "...", "num_draft": 4,
     "skip": ["attention.3", "mlp.7"], "found": {...}}

``exit`` stands in place of ``skip`` for the first layers; ``window`` and ``sinks``, and ``chunks``
with its settings, say what a drafted token sees where that is not the whole text; ``stop`` holds
the settings of ``drafters.confidence_stop``, where a chain ends by them. The fingerprint
is that of the weights for which the layers were chosen. ``found`` holds whatever the search
measured.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from ..drafters.confidence_stop import ConfidenceStop
from ..drafters.self_draft import SelfDraft
from ..models.files import read_json, write_json
from ..models.lm import LM
from ..models.snap_kv import SnapKV
from ..models.top_chunks import TopChunks

FILE, KIND = "self.json", "self"


def default_path(lm: LM) -> Path | None:
    """Where the layers of a model are saved if nothing else is said: in its folder, if it has one
    of its own."""
    folder = Path(lm.name)
    return folder / FILE if folder.is_dir() else None


def checked_path(path: str | os.PathLike) -> Path:
    """The file that ``save_layers`` writes for ``path``, a file or a folder.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"{path}: there is no folder {path.absolute().parent}; make it, or give another file"
        )
    return path


def save_layers(
    drafter: SelfDraft, lm: LM, path: str | os.PathLike, found: dict | None = None
) -> Path:
    """Writes which layers of ``lm`` draft, whole or not at all.

    Args:
      drafter: the choice, and how many tokens it drafts.
      path: the file, or a folder for ``self.json`` in it.
      found: figures to keep beside the choice, plain data.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: the drafter was made of another target.
    """
    if drafter.target != lm.target:
        raise ValueError(f"drafter={drafter!r}: it was made of another target than {lm.name}")
    path = checked_path(path)
    content = {"specjax": KIND, "model": lm.name, "fingerprint": lm.checkpoint}
    content |= {"num_draft": drafter.num_draft}
    content |= {"skip": list(drafter.skip)} if drafter.skip else {"exit": drafter.exit}
    if drafter.window is not None:
        content |= {"window": drafter.window, "sinks": drafter.sinks}
    if drafter.chunks is not None:
        fields: Any = drafter.chunks  # a dataclass of numbers
        content |= {"chunks": dataclasses.asdict(fields)}
    if drafter.stop is not None:
        content |= {"stop": dataclasses.asdict(drafter.stop)}
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.absolute().parent) as staging:
        write_json(Path(staging) / FILE, content | {"found": found or {}})
        os.replace(Path(staging) / FILE, path)
    return path


def load_layers(path: str | os.PathLike, lm: LM) -> SelfDraft:
    """The drafter that a file describes.

    Args:
      path: what ``save_layers`` wrote, or the folder of it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is none of these, or was written for another model.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    content = read_json(path.parent, path.name)
    if content.get("specjax") != KIND:
        raise ValueError(f"{path}: it is no file of layers; search some with: specjax layers")
    if content.get("fingerprint") != lm.checkpoint:
        raise ValueError(
            f"{path}: its layers were chosen for other weights than those of {lm.name} (it names "
            f"{content.get('model')!r}); search again with: specjax layers --model {lm.name}"
        )
    given = {name: _read(path, content, name) for name in _KINDS if name in content}
    given = {name: value for name, value in given.items() if value is not None}
    if "num_draft" not in given:
        raise ValueError(f"{path}: num_draft is missing: the file was changed by hand")
    chosen = SnapKV if "observe" in given.get("chunks", {}) else TopChunks
    for name, kind in (("chunks", chosen), ("stop", ConfidenceStop)):
        if name in given:
            try:
                given[name] = kind(**given[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {name}={content[name]!r}: {error}") from None
    try:
        return SelfDraft(target=lm.target, **given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_NUMBER, _NUMBERS = "a whole number from 1", "an object of numbers"
_KINDS = {  # what a field of the file must hold; the constructors check the rest
    "num_draft": _NUMBER,
    "exit": _NUMBER,
    "skip": "a list of texts",
    "window": _NUMBER,
    "sinks": "a whole number from 0",
    "chunks": _NUMBERS,
    "stop": _NUMBERS,
}


def _read(path: Path, content: dict, name: str) -> Any:
    """A field of the file; raises ValueError that names both where the field is of another kind."""
    value, kind = content[name], _KINDS[name]
    if kind == _NUMBERS:
        right = isinstance(value, dict) and all(type(x) in (int, float) for x in value.values())
    elif name == "skip":
        right = isinstance(value, list) and all(isinstance(item, str) for item in value)
    elif name == "exit" and value is None:  # all layers draft
        right = True
    else:
        right = type(value) is int and value >= (kind == _NUMBER)  # True is no number here
    if not right:
        raise ValueError(f"{path}: {name}={value!r}: it must be {kind}; was it changed by hand?")
    return value
