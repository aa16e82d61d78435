"""Blockwise heads. No published layout exists; this one is specific to this project::

    trunk.weight [D, H]   trunk.bias [D]   offsets.weight [K H, D]   offsets.bias [K H]

Rows ``k H ... (k + 1) H`` belong to offset k. The config has ``model_type: blockwise``,
``num_heads`` K, ``trunk_size`` D, ``hidden_size`` H and ``vocab_size``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..drafters.blockwise import Blockwise, BlockwiseConfig
from .weights import check_integers, check_sizes, params_of, tensors_of

DESCRIPTION = "blockwise heads (trunk.weight, offsets.weight)"
DRAFTER, WEIGHTS_FILE = Blockwise, "model"
_SIZES = ("num_heads", "trunk_size", "hidden_size", "vocab_size")
NAMES = {
    f"{layer}.{leaf}": (layer, leaf)
    for layer in ("trunk", "offsets")
    for leaf in ("weight", "bias")
}


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("model_type") == "blockwise"


def load(config: Mapping, tensors: Mapping, target):
    if absent := [name for name in _SIZES if name not in config]:
        raise ValueError(f"config.json lacks {', '.join(absent)}")
    check_integers(**{name: config[name] for name in _SIZES})
    check_sizes(target, hidden_size=config["hidden_size"], vocab_size=config["vocab_size"])
    shape = BlockwiseConfig(**{name: config[name] for name in _SIZES})
    drafter = Blockwise(config=shape, target=target.target)
    params = params_of(tensors, NAMES, drafter.shapes, target.dtype)
    return drafter, params


def save(drafter: Blockwise, params, target=None) -> tuple[dict, dict]:
    sizes = {name: getattr(drafter.config, name) for name in _SIZES}
    return {"model_type": "blockwise"} | sizes, tensors_of(params, NAMES)
