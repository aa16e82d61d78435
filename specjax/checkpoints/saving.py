"""Writing a drafter to a folder in a published layout.

Beside what a layout prescribes, ``config.json`` gets a key ``"specjax"`` that other readers ignore.
It holds ``target_fingerprint`` (of the target for which the drafter was trained), ``tree`` (what to
draft, unless that is a plain chain of all heads: a list of parents, ``"beams:4x5"``, or
``"expand:3x2x5"`` with the other fields of ``trees.Expand`` as keys), ``trained_depth`` (how many
tokens after the root the heads were trained to draft), ``HeadDrafter.stored_settings`` that are not
the usual ones, and what the layout has no key for.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ..drafters import registry
from ..drafters.heads import HeadDrafter
from ..models.files import write_json
from ..models.headers import INDEX, SINGLE
from ..models.hf import check_dtype
from ..models.lm import LM
from ..trees.grown import Beams, Expand
from ..trees.topology import Topology, Tree, chain
from ..types import Drafter, PyTree
from . import mtp
from .dflash import MASK
from .formats import FORMATS, Layout
from .weights import PICKLES, is_float, write_pickle

KINDS = ("safetensors", "pt")  # of files of weights


def save_drafter(
    drafter: Drafter,
    params: PyTree,
    folder: str | os.PathLike,
    *,
    format: str | None = None,
    target: LM | None = None,
    dtype: object = None,
    pickled: bool = False,
    overwrite: bool = False,
) -> None:
    """Writes ``config.json`` and the weights of a drafter in a published layout.

    Every file is written beside its place and then renamed, ``config.json`` last, so that an
    interruption leaves no half-written file.

    Args:
      drafter: the drafter, as ``load_drafter`` returns it.
      params: its weights, ``params["drafter"]`` of ``specjax.decode``.
      folder: made if it does not exist. MTP modules that are saved in the folder of their target's
        checkpoint become a part of it: its config and the index of its weights then name them.
      format: a key of ``specjax.checkpoints.FORMATS``. Default: that of the drafter's authors.
      target: the model for which the drafter was trained; its fingerprint is written too.
      dtype: of the weights in the file. Default: that of ``params``.
      pickled: whether to write a PyTorch file, for programs that read no safetensors; this needs
        PyTorch.
      overwrite: whether a drafter or a model that is in ``folder`` may be replaced; all files of
        weights that a reader would take with the new one are removed, of a PyTorch file all others
        (``*.pt``, ``*.pth``, ``*.bin``).

    Raises:
      ValueError: the format is unknown, or cannot hold this drafter.
      FileExistsError: ``folder`` holds a model or a drafter, and ``overwrite`` is False.

    Example::

        specjax.save_drafter(heads.drafter, heads.params, "my-heads", target=lm, dtype="bfloat16")
    """
    name, layout = _layout_of(drafter, format)
    if pickled and name == "mtp":
        raise ValueError(
            "pickled=True with format='mtp': modules are read from safetensors alone, beside their "
            "target's weights or by themselves; leave pickled out"
        )
    dtype = check_dtype(dtype)
    config, tensors = layout.save(drafter, params, target)
    kinds = {n: dtype or x.dtype if is_float(x) else x.dtype for n, x in tensors.items()}
    tensors = {n: np.asarray(x, kinds[n]) for n, x in tensors.items()}
    floats = [x.dtype.name for x in tensors.values() if is_float(x)]
    if floats:  # a table of tokens has none
        config["torch_dtype"] = floats[0]
    own = config.pop("specjax", {})
    if drafter.max_depth is None or drafter.topology != chain(drafter.max_depth):
        own |= _tree_entry(drafter.topology)
    if isinstance(drafter, HeadDrafter):
        if drafter.trained_depth is not None:
            own["trained_depth"] = drafter.trained_depth
        for setting, usual in drafter.usual_settings.items():
            if getattr(drafter, setting) != usual:
                own[setting] = getattr(drafter, setting)
    if target is not None:
        config["base_model_name_or_path"] = target.name
        own["target_fingerprint"] = target.checkpoint
    if own:
        config["specjax"] = own

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = f"{layout.WEIGHTS_FILE}.{KINDS[bool(pickled)]}"
    files = {"config.json": config}
    within = name == "mtp" and mtp.inside(folder, config, tensors, weights)
    if within:
        files = within
    elif not overwrite and (
        any((folder / name).exists() for name in ("config.json", weights))
        or _read_with(folder, weights)
    ):
        raise FileExistsError(
            f"folder={str(folder)!r} holds a model or a drafter already: give another folder, or "
            "overwrite=True to replace what is there"
        )
    _write(folder, files, weights, tensors, pickled)
    if not within:
        for path in _read_with(folder, weights):
            path.unlink()


def _read_with(folder: Path, weights: str) -> list[Path]:
    """The files in a folder that a reader would take together with the file ``weights``, or in its
    place, see ``weights.Tensors``."""
    others = (INDEX, MASK) if weights.endswith(KINDS[0]) else PICKLES
    kinds = ("*.safetensors", *others)
    found = {path for kind in kinds for path in folder.glob(kind)}
    return sorted(path for path in found if path.name != weights)


def _layout_of(drafter: Drafter, format: str | None) -> tuple[str, Layout]:
    """The name of the format in which a drafter is to be written, and its layout."""
    name = next(iter(registry.formats_of(drafter)), None) if format is None else format
    if name is None or name not in FORMATS:
        raise ValueError(
            f"format={name!r} is unknown for {type(drafter).__name__}; known: {', '.join(FORMATS)}"
        )
    layout = FORMATS[name]
    if not isinstance(drafter, layout.DRAFTER):
        raise ValueError(
            f"format={name!r} holds {layout.DRAFTER.__name__}, not {type(drafter).__name__}"
        )
    return name, layout


def _write(folder: Path, files: dict, weights: str, tensors: dict, pickled: bool) -> None:
    """Writes ``files`` (JSON, by name) and ``tensors``, each beside its place and then renamed."""
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as staging:
        path = Path(staging) / weights
        if pickled:
            write_pickle(path, tensors)
        else:
            save_file(tensors, path, metadata={"format": "pt"})
        for name, content in files.items():
            write_json(Path(staging) / name, content)
        path.chmod((Path(staging) / "config.json").stat().st_mode)  # else only its owner reads it
        for name in sorted({weights, *files}, key=lambda name: name == "config.json"):
            if INDEX in files and name == "config.json":  # the single file would be read first
                (folder / SINGLE).unlink(missing_ok=True)
            os.replace(Path(staging) / name, folder / name)


def _tree_entry(shape: Topology) -> dict:
    """A tree as the config holds it, in a form that ``as_topology`` reads."""
    if isinstance(shape, Tree):
        return {"tree": shape.parents}
    if isinstance(shape, Beams):
        return {"tree": f"beams:{shape.width}x{shape.depth}"}
    if isinstance(shape, Expand):
        return {"tree": f"expand:{shape.width}x{shape.depth}x{shape.nodes}", **shape.settings}
    raise ValueError(
        f"topology={shape}: it is for measuring only; give the drafter the tree that it is to "
        "draft, then save it"
    )
