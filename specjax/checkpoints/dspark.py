"""DSpark drafters in their authors' layout (github.com/deepseek-ai/DeepSpec), and DFlash's there;
and DSpark drafters of SpecForge (github.com/sgl-project/SpecForge).

To the tensors of DFlash's layout (``dflash.py``) with a Markov head of rank R are added::

    markov_head.markov_w1.weight [V, R]      markov_head.markov_w2.weight [V, R]
    markov_head.gate_proj.weight [R, H + R], .bias        kind "gated", over (state, token before)
    markov_head.joint_proj.weight [3 R, 2 R + H], .bias   kind "rnn", over (memory, token, state)
    confidence_head.proj.weight [1, H + R], .bias         [1, H] unless confidence_head_with_markov
    embed_tokens.weight, lm_head.weight [V, H]            copies of the target's tables

The config is flat: ``block_size``, ``mask_token_id``, ``target_layer_ids`` (-1: the embeddings),
``markov_rank``, ``markov_head_type``, ``enable_confidence_head``, ``confidence_head_with_markov``.
Every place of a block drafts, the root's too. With ``markov_rank: 0`` and no confidence head the
file holds a block drafter, as DeepSpec's own DFlash. The authors' code takes both tables from the
file; servers take them from the target. ``"specjax": {"confidence_temperatures": [T, ...]}`` are
numbers by which the logits of the chances are divided, one for each place; other readers know none.

SpecForge writes the tensors without tables (``logit_head.`` before the names of heads, in older
files), and the keys in ``dflash_config``, where ``projector_type`` is ``dspark``, except for
``block_size``; the class is ``DSparkDraftModel``. Prepared for servers (``Qwen3DSparkModel``), the
keys of the heads stand beside ``dflash_config`` as well. Without ``enable_confidence_head`` there
is a confidence head if ``confidence_head_alpha``, its weight in training, is above 0. The two
layouts differ in layers with a window: in DeepSpec's their places see whole blocks, in SpecForge's
and in servers (without ``is_causal: false``) the places before them. Drafters of the latter kind
are written in SpecForge's layout, prepared for servers; all others in DeepSpec's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._internal.file_keys import file_keys
from ..drafters.block import BlockConfig, BlockDrafter
from ..drafters.dspark import DSpark, DSparkConfig
from ..models.quantize import is_quantized
from . import block_keys, dflash
from .flat_keys import TARGETS, check_flat
from .layers import layer_hf
from .weights import check_integers, check_numbers, flags_of, tensors_of

DESCRIPTION = "DSpark's (Qwen3DSparkModel; fc.weight, markov_head.markov_w1.weight...)"
DRAFTER, WEIGHTS_FILE = BlockDrafter, "model"
ARCHITECTURE = "Qwen3DSparkModel"
PROJECTOR, ALPHA, OLD = "dspark", "confidence_head_alpha", "logit_head."
KEYS = dflash.KEYS | {
    "markov_head_type": "markov",
    "enable_confidence_head": "confidence",
    "confidence_head_with_markov": "confidence_reads_token",
}
HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
READ = (  # beside the keys of the layers
    *HEADS,
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "num_anchors",
    "target_layer_ids",
    *TARGETS,
)
TEMPERATURES = "confidence_temperatures"
NUM_ANCHORS = 512  # of training; the authors' code refuses a config without the key


def matches(config: Mapping, names: set[str]) -> bool:
    if "speculators_model_type" in config or "hidden_norm.weight" not in names:
        return False
    if "dflash_config" in config:
        return dflash.is_dspark(config, names)
    return ARCHITECTURE in (config.get("architectures") or ()) or "markov_rank" in config


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config)
    if block_keys.drafts_from_root(config, own) is False:
        key = next(k for k in block_keys.LABELS if block_keys.in_either(config, own, k) is False)
        raise ValueError(
            f"{key}=false is not supported: in this layout every place says the token after it"
        )
    if "dflash_config" in config:
        said, heads = _of_specforge(config, own, tensors, target)
    else:
        said, heads = _of_deepspec(config, tensors, target)
    if not heads["markov_rank"] and not heads["confidence"]:
        with file_keys(KEYS):
            bare = BlockConfig(**said)
        return dflash.drafter_of(BlockDrafter(config=bare, target=target.target), tensors, target)
    with file_keys(KEYS):
        shape = DSparkConfig(**said, **heads)
    drafter = DSpark(config=shape, target=target.target, temperatures=temperatures_of(config))
    before = OLD if any(name.startswith(OLD) for name in tensors) else ""
    named = {before + name: path for name, path in head_names(shape).items()}
    return dflash.drafter_of(drafter, tensors, target, named)


def _of_deepspec(config: Mapping, tensors: Mapping, target) -> tuple[dict, dict]:
    """The arguments of ``BlockConfig``, and those that ``DSparkConfig`` has besides.

    Raises:
      ValueError: a key is missing, of another kind or not known; or the file is one of another
        target.
    """
    for key, value in flags_of(config, is_causal=None, causal=None, use_swa=None).items():
        if value:
            raise ValueError(f"{key}={value!r}: in this layout blocks are seen whole")
    known = {*block_keys.OUTSIDE_READ}  # `is_causal` was looked at above
    if config.get("projector_type") != PROJECTOR:
        known -= {"projector_type"}
    block_keys.check_outside(config, known, where="no drafter of this layout has it")
    layers, said = dflash.layers_of(config, config, tensors, target)
    check_flat(config, (*READ, *block_keys.LABELS, *block_keys.OUTSIDE))
    block_keys.check_whole_vocab(config, layers.vocab_size)
    ids = config.get("target_layer_ids")
    dflash.check_ids(ids, target, least=-1)
    whole = (
        None if layers.window is None else False
    )  # the authors' layers with a window see whole blocks
    said |= dict(layers=layers, target_layers=dflash.states_of(ids), from_root=True, causal=whole)
    rank: Any = config.get("markov_rank")
    flags = flags_of(config, enable_confidence_head=None, confidence_head_with_markov=None)
    confidence, reads_token = flags.values()
    check_integers(markov_rank=rank)
    if confidence is None:
        raise ValueError("the config.json lacks enable_confidence_head")
    if rank and "markov_head_type" not in config:
        raise ValueError(f"markov_rank={rank}: the config.json lacks markov_head_type")
    if confidence and reads_token is None:
        raise ValueError("the config.json lacks confidence_head_with_markov")
    markov = config.get("markov_head_type", "vanilla")
    return said, _heads(rank, markov, confidence, reads_token)


def _of_specforge(config: Mapping, own: Mapping, tensors: Mapping, target) -> tuple[dict, dict]:
    """As ``_of_deepspec``; ``own``: the config's ``dflash_config``. What is left out has the
    default of SpecForge's class."""
    given: dict[str, Any] = {key: block_keys.in_either(config, own, key) for key in HEADS}
    given = {key: value for key, value in given.items() if value is not None}
    known = (*HEADS, ALPHA)
    classes = config.get("architectures") or ()
    if not {*dflash.DSPARK} & {*classes} and not block_keys.in_either(
        config, own, "projector_type"
    ):
        raise ValueError(
            f"architectures={classes!r}: the file has heads of DSpark, and names none of its "
            f"classes, {' and '.join(dflash.DSPARK)}; if every place was trained to say the token "
            "after it, so that the root's drafts too, write projector_type 'dspark' into "
            "dflash_config"
        )
    said = dflash.shape_of(config, tensors, target, known=known, projectors=(PROJECTOR,))
    alpha, rank = block_keys.in_either(config, own, ALPHA) or 0.0, given.get("markov_rank", 0)
    check_numbers(**{ALPHA: alpha})
    check_integers(markov_rank=rank)
    usual = dict(enable_confidence_head=alpha > 0, confidence_head_with_markov=False)
    markov = given.get("markov_head_type", "vanilla")
    heads = _heads(rank, markov, *flags_of(given, **usual).values())
    return said | {"from_root": True}, heads


def _heads(rank: int, markov: str, confidence: bool, reads_token: bool | None) -> dict[str, Any]:
    """The arguments that ``DSparkConfig`` has beside those of ``BlockConfig``."""
    heads: dict[str, Any] = dict(markov_rank=rank, markov=markov, confidence=confidence)
    return heads | {"confidence_reads_token": bool(reads_token)}


def save(drafter: BlockDrafter, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    if type(drafter) not in (BlockDrafter, DSpark):
        raise ValueError(
            f"format='dspark': it has no place for what a {type(drafter).__name__} adds to the "
            f"block; take {drafter.name!r}"
        )
    dflash.check_vocab(drafter, "dspark")
    dflash.check_read_once(shape, "dspark")
    dflash.check_layers(shape, "dspark")
    wrong = {"from_root": not shape.from_root, "causal": bool(shape.causal)}
    if wrong := [name for name, is_so in wrong.items() if is_so]:
        raise ValueError(
            f"format='dspark': its readers draft from the root's place and see whole blocks in "
            f"layers without a window; this drafter has another {', '.join(wrong)}"
        )
    named, heads = dflash.names(shape), {"markov_rank": 0, "enable_confidence_head": False}
    if isinstance(shape, DSparkConfig):
        named |= head_names(shape)
        heads = {
            "markov_rank": shape.markov_rank,
            "markov_head_type": shape.markov,
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence_reads_token,
        }
    tensors = tensors_of(params, named)
    if shape.layers.window is not None and shape.causal is None:
        return _as_specforge(drafter, heads) | own_entry(drafter), tensors
    config = layer_hf(shape.layers) | {
        "architectures": [ARCHITECTURE],
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "target_layer_ids": [i - 1 for i in shape.target_layers],
        "num_target_layers": drafter.target.num_layers,
        "num_anchors": NUM_ANCHORS,
        "tie_word_embeddings": False,
    }
    config.setdefault("layer_types", ["full_attention"] * shape.layers.num_layers)
    if shape.layers.window is not None:
        config["is_causal"] = False  # without it, servers have causal layers where a window is
    if target is not None:
        tables = {name: table(target) for name, table in dflash.TABLES.items()}
        tensors |= {n: np.ascontiguousarray(x) for n, x in tables.items() if not is_quantized(x)}
    return config | heads | own_entry(drafter), tensors


def _as_specforge(drafter: BlockDrafter, heads: dict) -> dict:
    """The config as SpecForge writes it and prepares it for servers; ``heads``: the keys of the
    heads."""
    config = dflash.config_of(drafter, "dspark", can_draft_from_root=True)
    layers = drafter.config.layers
    all_heads = layers.num_kv_heads == layers.num_heads
    config["dflash_config"] |= heads | {
        "projector_type": PROJECTOR,
        "attention_mode": "mha" if all_heads else "gqa",
    }
    return config | heads | {"architectures": [ARCHITECTURE], "tie_word_embeddings": False}


def temperatures_of(config: Mapping) -> tuple[float, ...]:
    """The temperatures of the chances in a config; (): there are none.

    Raises:
      ValueError: they are no list.
    """
    found = (config.get("specjax") or {}).get(TEMPERATURES, [])
    if not isinstance(found, list):
        raise ValueError(f"{TEMPERATURES}={found!r}: it must be a list of numbers above 0")
    return tuple(found)


def own_entry(drafter: BlockDrafter) -> dict:
    """What a config holds of the temperatures of a drafter's chances."""
    if not isinstance(drafter, DSpark) or not drafter.temperatures:
        return {}
    return {"specjax": {TEMPERATURES: list(drafter.temperatures)}}


def head_names(shape: DSparkConfig) -> dict[str, tuple]:
    """Names of the tensors of both heads to paths of parameters."""
    named: dict[str, tuple] = {}
    if shape.markov_rank:
        named["markov_head.markov_w1.weight"] = ("markov", "embedding")
        named["markov_head.markov_w2.weight"] = ("markov", "lm_head", "weight")
    linear: dict[str, tuple] = {"confidence_head.proj": ("confidence",)} if shape.confidence else {}
    if shape.markov_rank and shape.markov != "vanilla":
        mix = "gate_proj" if shape.markov == "gated" else "joint_proj"
        linear[f"markov_head.{mix}"] = ("markov", "mix")
    for name, path in linear.items():
        named |= {f"{name}.{leaf}": (*path, leaf) for leaf in ("weight", "bias")}
    return named
