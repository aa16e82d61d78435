"""DFlash2 drafters in their authors' layout (github.com/z-lab/dflash).

To the tensors of DFlash's layout (``dflash.py``) are added, with T taps, groups of G features and a
selector of rank R::

    layers.{i}.attention_conv.base_kernel [2, T, H]    of the sublayer's input, of its output
    layers.{i}.attention_conv.kernel_projection.weight [2 T H / G, H]
    layers.{i}.mlp_conv.(the same)
    candidate_selector.{predecessor_codebook, successor_codebook} [V, R]
    candidate_selector.hidden_projection.weight [R, H]

``dflash_config`` also holds ``conv_kernel_size`` (T), ``conv_group_size`` (G), ``selector_rank``
and ``selector_top_k``; each of its keys may stand at the top level instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._internal.file_keys import file_keys
from ..drafters.block import BlockConfig
from ..drafters.dflash2 import DFlash2, DFlash2Config
from . import block_keys, dflash
from .weights import check_integers, tensors_of

DESCRIPTION = "DFlash2's (layers.{i}.attention_conv.base_kernel, candidate_selector...)"
DRAFTER, WEIGHTS_FILE = DFlash2, "model"
ARCHITECTURE = "DFlash2DraftModel"
KEYS = {
    "conv_kernel_size": "conv_taps",
    "conv_group_size": "conv_group",
    "selector_rank": "selector_rank",
    "selector_top_k": "num_candidates",
}
USUAL = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
SELECTOR = "candidate_selector"


def matches(config: Mapping, names: set[str]) -> bool:
    return "dflash_config" in config and f"{SELECTOR}.predecessor_codebook" in names


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config)
    said: dict[str, Any] = {key: block_keys.in_either(config, own, key) for key in KEYS}
    lacking = [key for key, value in said.items() if value is None]
    if lacking:
        raise ValueError(f"the config.json of a DFlash2 drafter lacks {', '.join(lacking)}")
    check_integers(**said)
    sizes = {KEYS[key]: value for key, value in said.items()}
    kinds = ("dflash2", *block_keys.PROJECTORS)
    block = dflash.shape_of(config, tensors, target, known=KEYS, projectors=kinds)
    with file_keys(dflash.KEYS | KEYS):
        shape = DFlash2Config(**block, **sizes)
    drafter = DFlash2(config=shape, target=target.target)
    return dflash.drafter_of(drafter, tensors, target, head_names(shape))


def save(drafter: DFlash2, params, target=None) -> tuple[dict, dict]:
    config, shape = dflash.config_of(drafter, "dflash2"), drafter.config
    config["architectures"] = [ARCHITECTURE]
    config["dflash_config"] |= {key: getattr(shape, name) for key, name in KEYS.items()}
    if cap := block_keys.cap_of(drafter.target):  # the selector adds its scores to capped logits
        config["dflash_config"][block_keys.CAP] = cap
    return config, tensors_of(params, dflash.names(shape) | head_names(shape))


def head_names(shape: DFlash2Config) -> dict[str, tuple]:
    """Names of the tensors of convolutions and selector to paths of parameters."""
    named: dict[str, tuple] = {
        f"{SELECTOR}.predecessor_codebook": ("selector", "predecessors"),
        f"{SELECTOR}.successor_codebook": ("selector", "successors"),
        f"{SELECTOR}.hidden_projection.weight": ("selector", "projection", "weight"),
    }
    return named | convolution_names(shape)


def convolution_names(shape: BlockConfig) -> dict[str, tuple]:
    """Names of the tensors of convolutions to paths of parameters."""
    named: dict[str, tuple] = {}
    for i in range(shape.layers.num_layers):
        for conv in ("attention_conv", "mlp_conv"):
            before, path = f"layers.{i}.{conv}", ("layers", "blocks", i, conv)
            named[f"{before}.base_kernel"] = (*path, "base_kernel")
            named[f"{before}.kernel_projection.weight"] = (*path, "kernel_projection", "weight")
    return named
