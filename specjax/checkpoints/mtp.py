"""Modules for multi-token prediction, in their target's checkpoint or in a folder of their own.

For a target with n layers, module k of K (from 0) has tensors with these prefixes: those of a
layer, named as in the target's family (``self_attn.q_proj.weight`` ...), and these::

    DeepSeek-V3    model.layers.{n + k}.    enorm, hnorm, eh_proj [H, 2 H], shared_head.norm
    MiMo, FastMTP  model.mtp_layers.{k}.    token_layernorm, hidden_layernorm, input_proj,
                                            final_layernorm
    Qwen3-Next     mtp.layers.{k}.          and once for all: mtp.pre_fc_norm_embedding,
                                            mtp.pre_fc_norm_hidden, mtp.fc, mtp.norm
    speculators    mtp_layers.0.            as MiMo's, in a folder of their own

``fc`` reads (embedding, hidden), that of MiMo (hidden, embedding). DeepSeek's files repeat the
target's tables (``embed_tokens.weight``, ``shared_head.head.weight``). The config has
``num_nextn_predict_layers`` = K; for FastMTP, whose only module follows itself, it has
``num_speculative_steps`` too, and for speculators ``speculative_tokens``. The shape of a layer is
not in the file: it is that of the target's last layer.

In the training code of speculators, further steps see only entries of their own step. Here, as in
servers, drafts see what is cached: entries of the first step, and of the tokens before.

No file states what the next module takes for the hidden state. Here it is the normed output, as in
transformers, in SGLang and, except for DeepSeek's, in vLLM, unless the config has ``"specjax":
{"normed_output": false}``; it matters from the second drafted token on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.file_keys import file_keys
from .._internal.optional import required
from ..drafters.mtp import MTP, MTPConfig, module_layer
from ..models import translate
from ..models.files import read_json
from ..models.headers import INDEX, MODULES, SHARD, SINGLE, weight_files
from ..models.model_folder import folder_of
from ..models.quantized_files import WidenedReader, merged
from ..models.quantized_layouts import layout_of
from ..models.tensors import Tensor, gathered, shape_of
from .flat_keys import proposed_tokens
from .layers import check_layer, config_of
from .loading import holds_heads
from .weights import (
    Tensors,
    check_copy,
    check_integers,
    embedding_table,
    flags_of,
    head_table,
    listed,
)

DESCRIPTION = "MTP modules (model.layers.{n}.eh_proj, [model.]mtp_layers.{k}.input_proj or mtp.fc)"
DRAFTER, WEIGHTS_FILE = MTP, MODULES.removesuffix(".safetensors")
SAID = ("num_nextn_predict_layers", "num_speculative_steps", "specjax")  # keys of the config
OURS = ("embedding_norm", "hidden_norm", "fc", "norm")


@dataclasses.dataclass(frozen=True)
class ModuleLayout:
    """The names of the tensors of a family's modules.

    Attributes:
      layer: prefix of the tensors of a module's layer, with ``{k}`` for the module and ``{n}`` for
        n + k.
      ends: prefix of ``names``, likewise.
      names: how the family calls the tensors of ``OURS``.
      config: the fields of ``MTPConfig`` that it fixes.
      tables: names of copies of the target's embeddings and LM head.
    """

    layer: str
    ends: str
    names: tuple[str, ...]
    config: Mapping[str, bool]
    tables: tuple[str, ...] = ()


LAYOUTS = {
    "deepseek": ModuleLayout(
        "model.layers.{n}.",
        "model.layers.{n}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        {"shared_ends": False, "embedding_first": True},
        ("embed_tokens.weight", "shared_head.head.weight"),
    ),
    "mimo": ModuleLayout(
        "model.mtp_layers.{k}.",
        "model.mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        {"shared_ends": False, "embedding_first": False},
    ),
    "speculators": ModuleLayout(
        "mtp_layers.{k}.",
        "mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        {"shared_ends": False, "embedding_first": True},
    ),
    "qwen": ModuleLayout(
        "mtp.layers.{k}.",
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        {"shared_ends": True, "embedding_first": True},
    ),
}


def matches(config: Mapping, names: set[str]) -> bool:
    return _layout_of(names) is not None


def holds_modules(name: str, revision: str | None) -> bool:
    """Whether the checkpoint of a target (a folder, or a name on the hub) holds modules too."""
    return _layout_of(Tensors(folder_of(name, revision))) is not None


def inside(folder: Path, config: Mapping, tensors: Mapping, file: str) -> dict[str, dict] | None:
    """The files with which modules become a part of their target's checkpoint in a folder.

    Where the checkpoint is a single file, it gets a second name, that of a shard, since
    transformers reads ``model.safetensors`` alone where there is one; the caller removes the first
    name at last.

    Args:
      folder: where the modules are to be written.
      config: as ``save`` returns it.
      tensors: as ``save`` returns them.
      file: the file in which the tensors will be.

    Returns:
      ``config.json`` of the target with the keys of the modules, and the index of all weights, by
      file name; None where the folder holds no checkpoint, or that of other heads.

    Raises:
      ValueError: the folder holds the checkpoint of another model.
    """
    try:
        own, weights = read_json(folder, "config.json"), weight_files(folder)
    except FileNotFoundError:
        return None
    if holds_heads(folder, own):
        return None
    there = translate.config_from_hf(own)
    for name in ("hidden_size", "vocab_size"):
        if getattr(there, name) != config[name]:
            raise ValueError(
                f"{folder} holds another model than the modules belong to: its {name} is "
                f"{getattr(there, name)}, theirs {config[name]}; give the folder of their target, "
                "or an empty one"
            )
    if weights == [folder / SINGLE]:
        (folder / SHARD).unlink(missing_ok=True)
        (folder / SHARD).hardlink_to(folder / SINGLE)
        weights = [folder / SHARD]
    kept = [path for path in weights if path.name != file]
    places = {name: path.name for path in kept for name in Tensors(folder, [path])}
    places |= dict.fromkeys(tensors, file)
    said = {key: config[key] for key in SAID if key in config}
    if beside := said.pop("specjax", {}):  # its own checkpoint needs no fingerprint
        said["specjax"] = {k: v for k, v in beside.items() if k != "target_fingerprint"}
    before = {key: value for key, value in own.items() if key not in SAID}  # of earlier modules
    return {"config.json": before | said, INDEX: {"metadata": {}, "weight_map": places}}


def _layout_of(names) -> ModuleLayout | None:
    for layout in LAYOUTS.values():
        first = re.escape(layout.ends + layout.names[2]).replace(r"\{n\}", r"\d+")
        pattern = re.compile(first.replace(r"\{k\}", r"\d+") + r"\.weight")
        if any(pattern.fullmatch(name) for name in names):
            return layout
    return None


def load(config: Mapping, tensors, target):
    layout, count = required(_layout_of(tensors), "the layout"), target.config.num_layers
    prefix = re.escape(layout.layer).replace(r"\{n\}", r"(\d+)").replace(r"\{k\}", r"(\d+)")
    found = {int(m[1]) for name in tensors if (m := re.match(prefix, name))}
    begin = count if "{n}" in layout.layer else 0
    num = len([i for i in found if i >= begin])
    said = config.get("num_nextn_predict_layers") or num
    trained = config.get("num_speculative_steps") or proposed_tokens(config)
    steps = trained or 1
    check_integers(num_nextn_predict_layers=said, num_speculative_steps=steps)
    if not num or {i for i in found if i >= begin} != {*range(begin, begin + num)} or said != num:
        raise ValueError(
            f"num_nextn_predict_layers={said}, and the modules that are there have the numbers "
            f"{sorted(i for i in found if i >= begin)} after {layout.layer!r}: those of a target "
            f"with {count} layers are {begin} to {begin + said - 1}; load the target that they "
            "belong to"
        )
    layer = module_layer(target.config)
    here = [
        name for name in tensors if any(name.startswith(p) for p in _prefixes(layout, begin, num))
    ]
    if not any(".experts." in name for name in here):
        layer = dataclasses.replace(layer, num_experts=0)
    own = config.get("specjax") or {}
    with file_keys({"num_speculative_steps": "num_modules"}):
        shape = MTPConfig(
            layer=layer,
            num_modules=steps if num == 1 else num,
            share_layers=num == 1,
            normed_output=flags_of(own, normed_output=True)["normed_output"],
            **layout.config,
            **_own_tables(layout, tensors, target, begin, num),
        )
    trained = trained if num == 1 else None
    drafter = MTP(config=shape, target=target.target, trained_depth=trained)
    stored = {name: tensors.entry(name) for name in here}
    return drafter, _read(drafter, layout, stored, layout_of(config), target)


def save(drafter: MTP, params, target=None) -> tuple[dict, dict]:
    shape, num = drafter.config, drafter.config.num_stages
    wanted = dict(shared_ends=shape.shared_ends, embedding_first=shape.embedding_first)
    layout = next((x for x in LAYOUTS.values() if x.config == wanted), None)
    if layout is None:
        raise ValueError(f"format='mtp': no published layout has {wanted}")
    tables = [name for name in ("own_embedding", "own_head") if getattr(shape, name)]
    if tables and (not layout.tables or num > 1):
        raise ValueError(
            f"format='mtp': {' and '.join(tables)}: the layout of modules with {wanted} has no "
            "tables of their own" + " for more than one module" * bool(layout.tables) + "; train "
            "them with those of the target"
        )
    layer = module_layer(config_of(drafter.target))
    if not shape.layer.num_experts:
        layer = dataclasses.replace(layer, num_experts=0)  # told by the tensors
    check_layer(
        "format='mtp': the modules' layer",
        shape.layer,
        layer,
        "make it with drafters.mtp.module_layer(target.config)",
    )
    config = {
        "model_type": "mtp",
        "num_nextn_predict_layers": num,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
    if shape.share_layers:
        config["num_speculative_steps"] = shape.num_modules
    if not shape.normed_output:
        config["specjax"] = {"normed_output": False}
    flat = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.State(params))}
    flat = {
        name: np.asarray(x.get_value() if isinstance(x, nnx.Variable) else x)
        for name, x in flat.items()
    }
    rows = _tensors(drafter, layout)
    return config, {
        name: gathered(row, flat, flat[row.parts[0]].dtype) for name, row in rows.items()
    }


def _prefixes(layout: ModuleLayout, begin: int, num: int) -> set[str]:
    places = [dict(n=begin + k, k=k) for k in range(num)]
    return {part.format(**at) for at in places for part in (layout.layer, layout.ends)}


def _tensors(drafter: MTP, layout: ModuleLayout) -> dict[str, Tensor]:
    """Names of tensors in the file to the parameters of ``MTPModules`` that each holds."""
    shape, begin = drafter.config, drafter.target.num_layers
    parts = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(drafter.shapes)}
    layers = dataclasses.replace(shape.layer, num_layers=shape.num_stages)
    found = {}
    for name, row in translate.tensors_of(layers, parts).items():
        if inside := re.match(r"[\w.]*?\.(\d+)\.", name):
            k = int(inside[1])
            before = layout.layer.format(n=begin + k, k=k)
            name = before + name.removeprefix(inside[0])
            found[name] = dataclasses.replace(row, name=name)
    for k in range(1 if shape.shared_ends else shape.num_stages):
        before = layout.ends.format(n=begin + k, k=k)
        for theirs, ours in zip(layout.names, OURS, strict=True):
            name = f"{before}{theirs}.weight"
            found[name] = Tensor(name, (f"ends.{k}.{ours}.weight",))
    if layout.tables:
        before = layout.layer.format(n=begin, k=0)
        for theirs, ours in zip(layout.tables, ("embedding", "lm_head.weight"), strict=True):
            if ours in parts:
                found[before + theirs] = Tensor(before + theirs, (ours,))
    return found


def _own_tables(layout: ModuleLayout, tensors, target, begin, num) -> dict[str, bool]:
    """Whether the tables in the file differ from the target's, as fields of ``MTPConfig``."""
    if not layout.tables:
        return {}
    shared = embedding_table(target), head_table(target)
    own = {}
    for theirs, table, key in zip(
        layout.tables, shared, ("own_embedding", "own_head"), strict=True
    ):
        names = [layout.layer.format(n=begin + k, k=k) + theirs for k in range(num)]
        own[key] = False
        for name in (name for name in names if name in tensors):
            try:
                check_copy(name, tensors[name], table, target)
            except ValueError:
                if num > 1:
                    raise
                own[key] = True
    return own


def _read(drafter: MTP, layout: ModuleLayout, stored, quantized, target) -> dict:
    """The weights as a nested dictionary, in the target's dtype.

    Args:
      stored: what the headers of the files say of the modules' tensors, by name.
      quantized: how the checkpoint holds quantized weights, which are widened; None: it has none.

    Raises:
      ValueError: lists the tensors that are missing, misshapen or left over.
    """
    wanted = _tensors(drafter, layout)
    shapes = {
        ".".join(map(str, path)): tuple(x.get_value().shape)
        for path, x in nnx.to_flat_state(drafter.shapes)
    }
    others, held = tuple(f".{name}" for name in layout.tables), {}
    if quantized is not None:
        stored, held = merged(stored, quantized, wanted, "")
    misshapen = [
        f"{name} is {list(stored[name].shape)}, expected {list(shape_of(row, shapes))}"
        for name, row in wanted.items()
        if name in stored and stored[name].shape != shape_of(row, shapes)
    ]
    left = [n for n in stored if n not in wanted and not n.endswith((*others, "inv_freq"))]
    problems = {
        "missing": [name for name in wanted if name not in stored],
        "wrong shape": misshapen,
        "left over": left,
    }
    lines = [f"  {kind} ({len(n)}): {listed(n)}" for kind, n in problems.items() if n]
    if lines:
        raise ValueError("the MTP modules are not those of this target:\n" + "\n".join(lines))
    places = {name: (stored[name].path, name) for name in wanted if name not in held}
    params: dict = {}
    with WidenedReader(wanted, places, shapes, held, quantized) as reader:
        for path, _ in nnx.to_flat_state(drafter.shapes):
            part, inner = ".".join(map(str, path)), params
            kind = jnp.float32 if part.endswith(".router.bias") else target.dtype
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            whole = (slice(None),) * len(shapes[part])
            inner[path[-1]] = jnp.asarray(reader.read(part, whole, np.dtype(kind)))
    return params
