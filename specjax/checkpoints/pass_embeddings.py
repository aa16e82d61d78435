"""Look-ahead vectors (PaSS). No published layout exists; this one is specific to this project::

    embeddings [K, H]

The config has ``model_type: pass_embeddings``, ``num_heads`` K, ``hidden_size`` H and
``vocab_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drafters.pass_embeddings import PaSS, PaSSConfig
from .weights import check_integers, check_sizes, params_of, tensors_of

DESCRIPTION = "look-ahead vectors (model_type pass_embeddings; embeddings)"
DRAFTER, WEIGHTS_FILE = PaSS, "model"
_SIZES = ("num_heads", "hidden_size", "vocab_size")
NAMES = {"embeddings": ("embeddings",)}


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("model_type") == "pass_embeddings"


def load(config: Mapping, tensors: Mapping, target):
    sizes: dict[str, Any] = {name: config.get(name) for name in _SIZES}
    check_integers(**sizes)
    check_sizes(target, hidden_size=sizes["hidden_size"], vocab_size=sizes["vocab_size"])
    drafter = PaSS(config=PaSSConfig(**sizes), target=target.target)
    return drafter, params_of(tensors, NAMES, drafter.shapes, target.dtype)


def save(drafter: PaSS, params, target=None) -> tuple[dict, dict]:
    sizes = {name: getattr(drafter.config, name) for name in _SIZES}
    return {"model_type": "pass_embeddings"} | sizes, tensors_of(params, NAMES)
