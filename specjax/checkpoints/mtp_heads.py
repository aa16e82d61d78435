"""Parallel heads of multi-token prediction.

Their authors' checkpoints are whole models in a layout of their own. This layout is specific to
this project; head k has ::

    heads.{k}.(as Llama's layers: self_attn.q_proj.weight ...)

and all heads share ``norm.weight [H]``. The config is that of the layers, with ``model_type:
mtp_heads``, ``num_heads`` = K and ``layer``, the hidden state of the target that they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .._internal.file_keys import file_keys
from ..drafters.mtp_heads import MTPHeadsConfig, ParallelHeads
from .layers import block_names, layer_config, layer_hf
from .weights import check_integers, check_sizes, params_of, tensors_of

DESCRIPTION = "parallel heads (model_type mtp_heads; heads.{k}.self_attn...)"
DRAFTER, WEIGHTS_FILE = ParallelHeads, "model"


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("model_type") == "mtp_heads"


def load(config: Mapping, tensors: Mapping, target):
    lacking = [key for key in ("num_heads", "layer") if config.get(key) is None]
    if lacking:
        raise ValueError(f"the config.json of parallel heads lacks {', '.join(lacking)}")
    check_integers(num_heads=config["num_heads"], layer=config["layer"])
    hf = {key: value for key, value in config.items() if key != "model_type"}
    kind = "qwen3" if any(name.endswith(".q_norm.weight") for name in tensors) else "llama"
    layers = layer_config(hf, tensors, model_type=kind)
    check_sizes(target, hidden_size=layers.hidden_size, vocab_size=layers.vocab_size)
    if not 0 <= config["layer"] <= target.target.num_layers:
        raise ValueError(
            f"layer={config['layer']}: {target.name} has {target.target.num_layers} layers; load "
            "the target that the heads belong to"
        )
    with file_keys({"num_heads": "num_layers"}):
        layers = dataclasses.replace(layers, num_layers=config["num_heads"])
    shape = MTPHeadsConfig(layers=layers)
    drafter = ParallelHeads(config=shape, target=target.target, layer=config["layer"])
    return drafter, params_of(tensors, names(shape), drafter.shapes, target.dtype)


def save(drafter: ParallelHeads, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    own = {"model_type": "mtp_heads", "num_heads": shape.num_heads, "layer": drafter.layer}
    config = {k: v for k, v in layer_hf(shape.layers).items() if k != "architectures"}
    return config | own, tensors_of(params, names(shape))


def names(shape: MTPHeadsConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named = {"norm.weight": ("layers", "norm", "weight")}
    for k in range(shape.num_heads):
        named |= block_names(shape.layers, k, f"heads.{k}.", ("layers",))
    return named
