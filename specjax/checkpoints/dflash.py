"""DFlash drafters in their authors' layout (github.com/z-lab/dflash).

With L layers i, and k hidden states of the target::

    fc.weight [H, k H]   hidden_norm.weight [H]   norm.weight [H]   layers.{i}.(as Qwen3's)

The authors' config has ``block_size`` (at the top level, or in ``dflash_config``), ``dflash_config:
{mask_token_id, target_layer_ids}`` and ``num_target_layers``. Ids count the target's layers from 0,
so that id i is ``hidden_states[i + 1]`` of Hugging Face. Without ids they are spread evenly from
the second layer to the third last. Embeddings and LM head are those of the target. ``causal`` there
says that a token of the block attends only to tokens before it; JetSpec's files call it
``causal_head``.

There are two conventions for what a place of a block says, which are not interchangeable: the token
in it, so that the root's place says nothing (the authors'), or the token after it, so that the
root's place drafts too. ``shift_label`` (SpecForge) or ``sample_from_anchor`` (speculators) is true
for the second; without either it is the first. Other keys than those of ``block_keys.READ`` and
``ONLY``, those of a drafter's own layout, and beside ``dflash_config`` those of Qwen3's config, are
refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .._internal.file_keys import file_keys
from ..drafters import block
from ..drafters.block import BlockConfig, BlockDrafter
from ..models.quantize import is_quantized
from . import block_keys
from .layers import block_names, layer_config, layer_hf
from .weights import (
    Tensors,
    check_copy,
    check_integers,
    check_num_layers,
    check_sizes,
    embedding_table,
    flags_of,
    head_table,
    params_of,
    tensors_of,
)

DESCRIPTION = "DFlash's (fc.weight, hidden_norm.weight, layers.{i}...; dflash_config)"
DRAFTER, WEIGHTS_FILE = BlockDrafter, "model"
LM_HEAD = "lm_head.weight"
TABLES = {"embed_tokens.weight": embedding_table, LM_HEAD: head_table}
KEYS = {"mask_token_id": "mask_token"}  # whose attribute has another name
MASK = "mask_embedding.pt"  # vLLM's name
HEADS = ("candidate_selector.", "prefix_gru.", "logit_head.", "xpress_head.", "lilicorr.")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")  # classes, of DeepSpec and servers, of SpecForge
_DSPARKS = tuple(
    old + head for old in ("", "logit_head.") for head in ("markov_head.", "confidence_head.")
)
_UNUSED = "rotary_emb.inv_freq"


def matches(config: Mapping, names: set[str]) -> bool:
    heads = any(name.startswith(HEADS) for name in names)  # of other drafters' layouts
    others = heads or is_dspark(config, names)
    return "dflash_config" in config and {"fc.weight", "hidden_norm.weight"} <= names and not others


def is_dspark(config: Mapping, names: set[str]) -> bool:
    """Whether a file with a ``dflash_config`` holds a DSpark drafter: it has heads of one, or names
    its class, which need not have them."""
    named = {*DSPARK} & {*(config.get("architectures") or ())}
    return bool(named) or any(name.startswith(_DSPARKS) for name in names)


def load(config: Mapping, tensors: Mapping, target):
    said = shape_of(config, tensors, target)
    with file_keys(KEYS):
        shape = BlockConfig(**said)
    return drafter_of(BlockDrafter(config=shape, target=target.target), tensors, target)


def shape_of(
    config: Mapping,
    tensors: Mapping,
    target,
    *,
    known: Iterable[str] = (),
    projectors: tuple[str, ...] = block_keys.PROJECTORS,
    can_draft_from_root: bool = True,
    part: str = "dflash_config",
) -> dict[str, Any]:
    """The arguments of ``BlockConfig``.

    Args:
      config: the file's.
      tensors: of the file.
      target: the target.
      known: keys of ``dflash_config`` that the layout reads itself.
      projectors: what ``projector_type`` may be in the layout.
      can_draft_from_root: whether the place of the root may draft in the layout.
      part: the key of the part of the config that is about blocks.

    Raises:
      ValueError: a key is missing, of another kind or not known; or the file is one of another
        target.
    """
    count = target.target.num_layers
    own = block_keys.own_part(config, part)
    block_keys.check_known(config, own, {*known}, projectors, part)
    from_root = block_keys.drafts_from_root(config, own)
    if from_root and not can_draft_from_root:
        key = next(key for key in block_keys.LABELS if block_keys.in_either(config, own, key))
        raise ValueError(
            f"{key}=true is not supported: the place of the root drafts nothing in such a drafter"
        )
    ids = block_keys.in_either(config, own, "target_layer_ids")
    layers, said = layers_of(config, own, tensors, target)
    block_keys.check_whole_vocab(config, layers.vocab_size)
    if ids is None:
        ids = usual_ids(count, layers.num_layers)
        check_ids(sorted({*ids}), target, least=0)  # there may be fewer than that
    else:
        check_ids(ids, target, least=0)
    layers, causal = _attention(config, own, layers)
    said |= dict(layers=layers, target_layers=states_of(ids), causal=causal)
    return said | {"from_root": bool(from_root)}


def layers_of(
    config: Mapping, own: Mapping, tensors: Mapping, target, *, typed: bool = False
) -> tuple:
    """The layers of a block drafter, and ``{"block_size": ..., "mask_token": ...}``.

    Args:
      config: the file's.
      own: the part of it that is about blocks; ``config`` itself where it is flat.
      tensors: of the file.
      target: the target.
      typed: see ``layer_config``.

    Raises:
      ValueError: a key is missing, or of another kind, or has two values; or the file is one of
        another target.
    """
    files = tensors.files if isinstance(tensors, Tensors) else ()
    beside = [path.with_name(MASK) for path in files]
    if any(path.exists() for path in beside):
        raise ValueError(
            f"{MASK}: masks with an embedding of their own are not supported, only the target's "
            f"of token {own.get('mask_token_id', config.get('mask_token_id'))}"
        )
    for key in ("attention_sink_bias", "add_swa_attention_sink_bias"):
        if block_keys.in_either(config, own, key):
            raise ValueError(f"{key}: attention sinks are not supported")
    block_keys.check_scales(config, own, target)
    own_names = [name for name in tensors if name.startswith("layers.")]
    usual = dict(model_type="qwen3", vocab_size=target.target.vocab_size)
    given = dict(config) | {"is_causal": None}  # of blocks, for which each layout reads it itself
    if flags_of(own, use_swa=False)["use_swa"] and not config.get("use_sliding_window"):
        given.pop("layer_types", None)  # `_attention` reads the window
    layers = layer_config(given, own_names, typed=typed, **usual)
    check_sizes(target, hidden_size=layers.hidden_size, vocab_size=layers.vocab_size)
    check_num_layers(config, target)
    said = {key: block_keys.in_either(config, own, key) for key in ("block_size", "mask_token_id")}
    lacking = [name for name, value in said.items() if value is None]
    if lacking:
        raise ValueError(f"the config.json of a block drafter lacks {', '.join(lacking)}")
    check_integers(**said)
    return layers, {"block_size": said["block_size"], "mask_token": said["mask_token_id"]}


def drafter_of(
    drafter,
    tensors: Mapping,
    target,
    more: Mapping = MappingProxyType({}),
    others=(),
    rows: np.ndarray | None = None,
) -> tuple:
    """``(drafter, its weights)``, after a look at the copies of the target's tables in the file.

    Args:
      drafter: a ``BlockDrafter``.
      tensors: of the file.
      target: the target.
      more: names of tensors besides those of ``names``, to paths of parameters.
      others: further names that the file may have.
      rows: int64 ``[Vd]``, the rows of the LM head that the file has; None: all.
    """
    check_tables(tensors, target, rows)
    named, others = {**names(drafter.config), **more}, (*TABLES, _UNUSED, *others)
    return drafter, params_of(tensors, named, drafter.shapes, target.dtype, others)


def check_tables(tensors: Mapping, target, rows: np.ndarray | None = None) -> None:
    """Raises ``ValueError`` unless the tables in a file are those of the target; ``rows``: those of
    the LM head that the file has."""
    for name, table in TABLES.items():
        if name in tensors:
            own = table(target)
            if rows is not None and name == LM_HEAD and not is_quantized(own):
                own = own[rows]
            check_copy(name, tensors[name], own, target)


def save(drafter: BlockDrafter, params, target=None) -> tuple[dict, dict]:
    if type(drafter.config) is not BlockConfig:  # of SpecDiff's the layout holds the weights
        raise ValueError(
            f"format='dflash': it has no place for the heads of a {type(drafter).__name__}; take "
            f"{drafter.name!r}"
        )
    return config_of(drafter, "dflash"), tensors_of(params, names(drafter.config))


def config_of(drafter: BlockDrafter, layout: str, *, can_draft_from_root: bool = False) -> dict:
    """The config of a block drafter in the authors' form.

    Args:
      drafter: the drafter.
      layout: its name, for errors.
      can_draft_from_root: whether the layout has a key that says ``from_root``.

    Raises:
      ValueError: the form cannot express the drafter.
    """
    shape = drafter.config
    check_layers(shape, layout)
    check_vocab(drafter, layout)
    check_read_once(shape, layout)
    if shape.from_root and not can_draft_from_root:
        raise ValueError(
            f"format={layout!r}: from_root=True: the root's place drafts nothing in this layout; "
            "take 'dspark' (of DFlash2 'block-speculators')"
        )
    own = {
        "mask_token_id": shape.mask_token,
        "target_layer_ids": [i - 1 for i in shape.target_layers],
    }
    if min(own["target_layer_ids"]) < 0:
        raise ValueError(
            f"format={layout!r}: target_layers={shape.target_layers} reads the target's "
            "embeddings, for which the layout has no number"
        )
    config = layer_hf(shape.layers) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": shape.block_size,
        "num_target_layers": drafter.target.num_layers,
        "dflash_config": own,
    }
    if shape.causal is not None:  # the keys of the authors, of vLLM and of JetSpec
        config["is_causal"] = own["causal"] = own["causal_head"] = shape.causal
    config.setdefault("layer_types", ["full_attention"] * shape.layers.num_layers)
    return config


def check_layers(shape: BlockConfig, layout: str) -> None:
    """Raises ``ValueError`` for layers of which a reader would leave out norms or biases, some
    without a word."""
    layers = shape.layers
    wrong = {"qk_norm": not layers.qk_norm, "mlp_bias": layers.mlp_bias}
    wrong["qkv_bias"] = layers.qkv_bias != layers.o_bias
    if named := [f"layers.{key}={getattr(layers, key)}" for key, is_so in wrong.items() if is_so]:
        raise ValueError(
            f"format={layout!r}: {', '.join(named)}, layers.o_bias={layers.o_bias}: its readers "
            "norm queries and keys, have one key, attention_bias, for the biases of all "
            "projections of attention, and leave out those of MLPs; a bias of zeros changes nothing"
        )


def check_vocab(drafter: BlockDrafter, layout: str) -> None:
    """Raises ``ValueError`` for a drafter over a part of the vocabulary."""
    few = drafter.config.draft_vocab_size
    if few is not None:
        raise ValueError(
            f"format={layout!r}: draft_vocab_size={few}: the layout has no draft vocabulary; take "
            "'block-speculators'"
        )


def check_read_once(shape: BlockConfig, layout: str) -> None:
    """Raises ``ValueError`` for a drafter that reads a hidden state twice."""
    if len({*shape.target_layers}) < len(shape.target_layers):
        raise ValueError(
            f"format={layout!r}: target_layers={shape.target_layers}: in this layout each hidden "
            "state is read once; train a drafter that reads each once"
        )


def names(shape: BlockConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named: dict[str, tuple] = {f"{x}.weight": (x, "weight") for x in ("fc", "hidden_norm")}
    named["norm.weight"] = ("layers", "norm", "weight")
    for i in range(shape.layers.num_layers):
        named |= block_names(shape.layers, i, f"layers.{i}.", ("layers",))
    return named


def usual_ids(num_target: int, num_layers: int) -> list[int]:
    """The layers of the target that are read by default."""
    if num_layers == 1:
        return [num_target // 2]
    return [i - 1 for i in block.spread_layers(num_target, num_layers)]


def check_ids(ids, target, least: int) -> None:
    """Raises ``ValueError`` for ids that are no layers of the target, counted from ``least``."""
    count = target.target.num_layers
    wrong = not isinstance(ids, list) or not ids
    if wrong or any(type(i) is not int or not least <= i < count for i in ids):
        raise ValueError(
            f"target_layer_ids={ids}: {target.name} has {count} layers, numbered 0 to {count - 1}; "
            "load the target that the drafter belongs to"
        )
    if len({*ids}) < len(ids):
        raise ValueError(f"target_layer_ids={ids}: each layer is read once; name it once")


def states_of(ids) -> tuple[int, ...]:
    """``BlockConfig.target_layers`` of ids that count from 0 after the embeddings."""
    return tuple(i + 1 for i in ids)


def _attention(config: Mapping, own: Mapping, layers):
    """``(layers, causal)``, with the windows that the keys of DFlash ask for."""
    flags = flags_of(config, is_causal=None)
    flags |= flags_of(own, causal=None, causal_head=None)  # the latter is JetSpec's
    causal = block_keys.only_value(flags)
    sliding = layers.window is not None
    if sliding or flags_of(own, use_swa=False)["use_swa"]:
        window = own.get("swa_window_size") or layers.window or config.get("sliding_window")
        if window is None:
            raise ValueError("dflash_config: use_swa without swa_window_size or sliding_window")
        check_integers(swa_window_size=window)
        layers = dataclasses.replace(layers, window=window)
        causal = causal if sliding else bool(causal)
    return layers, causal
