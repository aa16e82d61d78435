"""Drafters on disk, in the layouts in which the world publishes them. One layout, one file.

``load_drafter`` finds out which layout a folder has; ``save_drafter`` writes one. A layout is a
module with ``KNOWN`` (how an error describes it), ``DRAFTER`` (a class), ``FILE`` (of the weights,
without its ending),

    matches(config: dict, names: set[str]) -> bool
    load(config: dict, tensors: Mapping[str, np.ndarray], target: LM) -> (Drafter, params)
    save(drafter, params, target: LM | None) -> (config dict, tensors dict)

registered here by one line. Our own files name the target they were trained for besides, in the
config, and the tree to draft if it is no plain chain of all heads: ``"specjax":
{"target_fingerprint": ..., "tree": parents}`` (or words, ``"beams:4x5"``; ``"gain"`` beside
``"expand:3x2x5"``), and what a layout has no place for; other readers pass over it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from .. import kernels
from ..drafters import registry
from ..drafters.heads import with_topology
from ..models.causal_lm import CausalLM
from ..models.files import read_json, write_json
from ..models.hf import check_dtype
from ..models.lm import LM, fingerprint, folder_of
from ..trees.topology import Beams, Expand, Topology, Tree, as_topology, chain
from ..types import Drafter, PyTree
from . import eagle, mtp
from .formats import FORMATS, Layout
from .weights import PICKLES, Tensors, is_float, some, write_pickle

__all__ = ["FORMATS", "HeadLM", "Layout", "holds_heads", "load_drafter", "save_drafter"]

_MARKS = ("medusa_", "hydra_", "dflash_", "eagle_", "draft_vocab_size", "speculators_")
_HUB_FILES = ["config.json", "*.safetensors", *PICKLES]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLM:
    """A drafter that belongs to a target, with its weights: what ``generate(drafter=)`` takes.

    ``name``: what ``load_drafter`` was asked for. ``fingerprint``: of its weights. ``target``:
    the ``checkpoint`` of the target that it was loaded for.
    """

    drafter: Drafter
    params: PyTree
    name: str
    fingerprint: str
    target: str

    def __repr__(self) -> str:
        return f"HeadLM({self.name!r}, {self.drafter.name})"


def says_heads(config: dict) -> bool:
    """Whether a config alone tells that it is of heads."""
    kinds = " ".join(config.get("architectures") or ())
    return any(key.startswith(_MARKS) for key in config) or "Eagle" in kinds


def holds_heads(name: str | os.PathLike, config: dict) -> bool:
    """Whether a folder or a hub name holds heads, or a model of its own, which have the same
    ``model_type``. The config tells, but for EAGLE's, which is a model's of one layer: there the
    names of the tensors do."""
    if says_heads(config):
        return True
    if config.get("num_hidden_layers") != 1:
        return False
    return eagle.matches(config, {*Tensors(folder_of(os.fspath(name), None, _HUB_FILES))})


def load_drafter(
    path_or_hub_name: str | os.PathLike,
    target: LM,
    *,
    topology=None,
    revision: str | None = None,
) -> HeadLM:
    """Loads a drafter that reads the hidden states of ``target``, whatever its layout.

    Args:
      path_or_hub_name: a folder, or a name on the Hugging Face hub.
      target: what ``specjax.load`` returned; the drafter's weights are converted to its dtype. (The
        CPU kernels read bfloat16 beside float32: weights that bfloat16 holds exactly are stored in
        half of the bytes.)
      topology: what to draft (see ``topology.py``); default: the tree that lies beside the weights,
        else a chain as deep as the heads allow.
      revision: branch, tag or commit on the hub.

    Raises:
      FileNotFoundError: no such folder, or it lacks its config or weights.
      ValueError: a layout that no format knows; missing, misshapen or left-over tensors; a drafter
        for another target (by hidden size, vocabulary or fingerprint); a topology that is deeper.
      OSError: the hub does not have it, or cannot be reached.

    Example::

        lm = specjax.load("lmsys/vicuna-7b-v1.3")
        heads = specjax.load_drafter("FasterDecoding/medusa-vicuna-7b-v1.3", lm)
        specjax.generate(lm, "...", drafter=heads)
    """
    if not isinstance(target, LM) or not isinstance(target.target, CausalLM):
        raise TypeError(
            f"target={target!r}: heads read a decoder's hidden states; give what specjax.load "
            "returns for a decoder-only model"
        )
    name = os.fspath(path_or_hub_name)
    folder = folder_of(name, revision, _HUB_FILES)
    try:
        drafter, params, found = _read(folder, target)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if topology is not None:
        drafter = with_topology(drafter, topology)
    return HeadLM(
        drafter=drafter, params=params, name=name, fingerprint=found, target=target.checkpoint
    )


def _read(folder: Path, target: LM):
    """The drafter of a folder, its weights, their fingerprint."""
    config, tensors = read_json(folder, "config.json"), Tensors(folder)
    layout = next((f for f in FORMATS.values() if f.matches(config, {*tensors})), None)
    if layout is None:
        known = "; ".join(layout.KNOWN for layout in FORMATS.values())
        kinds = (config.get(key) for key in ("speculators_model_type", "model_type"))
        kind = next(filter(None, kinds), config.get("architectures"))
        raise ValueError(
            f"a layout that is not known (model_type={kind!r}, tensors {some([*tensors])}). Known "
            f"are: {known}. A draft model is loaded with specjax.load"
        )
    own = config.get("specjax") or {}
    made_for = own.get("target_fingerprint")
    if made_for and target.checkpoint and made_for != target.checkpoint:
        raise ValueError(
            f"it was trained for a target with the fingerprint {made_for}, {target.name} has "
            f"{target.checkpoint}: take the target that it belongs to. For a target that says much "
            'the same (a fine-tuned one), delete "target_fingerprint" from its config.json: texts '
            "stay the target's own, fewer drafts may be accepted"
        )
    drafter, params = layout.load(config, tensors, target)
    if given := own.get("tree"):
        shape = as_topology(given)
        if "gain" in own:
            shape = dataclasses.replace(shape, gain=own["gain"])
        drafter = with_topology(drafter, shape)
    if target.dtype == jnp.float32:
        params = kernels.of(target.params).store(params)
    return drafter, params, fingerprint(tensors.files)


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

    Files are written beside their place and then renamed, ``config.json`` last.

    Args:
      drafter, params: as ``load_drafter`` returns them (``params`` is ``params["drafter"]``).
      folder: made if it does not exist. MTP modules saved where their target's checkpoint lies
        become a part of it: its config and the index of its weights name them from then on.
      format: a key of ``FORMATS``; default: that of the drafter's authors.
      target: the model it was trained for, whose fingerprint is then written too.
      dtype: of the file; default: that of the parameters.
      pickled: a PyTorch file, for codes that read no safetensors; needs PyTorch.
      overwrite: whether a drafter that is in ``folder`` already may be replaced.

    Raises:
      ValueError: an unknown format, or one that cannot hold this drafter.
      FileExistsError: ``folder`` holds a model or a drafter already, unless ``overwrite``.
    """
    usual = next(iter(registry.formats_of(drafter)), None)
    name = usual if format is None else format
    if name not in FORMATS:
        raise ValueError(
            f"format={name!r} is unknown for {type(drafter).__name__}; known: {', '.join(FORMATS)}"
        )
    layout, dtype = FORMATS[name], check_dtype(dtype)
    if not isinstance(drafter, layout.DRAFTER):
        raise ValueError(
            f"format={name!r} holds {layout.DRAFTER.__name__}, not {type(drafter).__name__}"
        )
    config, tensors = layout.save(drafter, params, target)
    kinds = {n: dtype or x.dtype if is_float(x) else x.dtype for n, x in tensors.items()}
    tensors = {n: np.asarray(x, kinds[n]) for n, x in tensors.items()}
    config["torch_dtype"] = next(x.dtype.name for x in tensors.values() if is_float(x))
    own = config.pop("specjax", {})
    if drafter.max_depth is None or drafter.topology != chain(drafter.max_depth):
        own |= _written(drafter.topology)
    if target is not None:
        config["base_model_name_or_path"] = target.name
        own["target_fingerprint"] = target.checkpoint
    if own:
        config["specjax"] = own

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = f"{layout.FILE}.{'pt' if pickled else 'safetensors'}"
    files = {"config.json": config}
    if layout is mtp and (whole := mtp.inside(folder, config, tensors, weights)):
        files = whole
    elif (folder / "config.json").exists() and not overwrite:
        raise FileExistsError(
            f"folder={str(folder)!r} holds a model or a drafter already: give another folder, or "
            "overwrite=True to replace what is there"
        )
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as staging:
        path = Path(staging) / weights
        if pickled:
            write_pickle(path, tensors)
        else:
            save_file(tensors, path, metadata={"format": "pt"})
        for name, content in files.items():
            write_json(Path(staging) / name, content)
        path.chmod((Path(staging) / "config.json").stat().st_mode)  # written for its owner alone
        for name in sorted({weights, *files}, key=lambda name: name == "config.json"):
            os.replace(Path(staging) / name, folder / name)
        if mtp.INDEX in files:
            (folder / mtp.SINGLE).unlink(missing_ok=True)


def _written(shape: Topology) -> dict:
    """A tree as the config holds it, in what ``as_topology`` reads."""
    if isinstance(shape, Tree):
        return {"tree": shape.parents}
    if isinstance(shape, Beams):
        return {"tree": f"beams:{shape.width}x{shape.depth}"}
    if isinstance(shape, Expand):
        words = {"tree": f"expand:{shape.width}x{shape.depth}x{shape.nodes}"}
        return words | ({"gain": shape.gain} if shape.gain else {})
    raise ValueError(f"{shape} is for measuring; save the drafter with the tree it is to draft")
