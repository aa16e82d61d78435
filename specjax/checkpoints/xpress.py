"""XPress drafters in their authors' layout (vllm#54448).

To the tensors of DFlash's layout (``dflash.py``) are added, with a block of N places, a refiner of
rank R and I inner features::

    xpress_head.w1.weight [V, R]   xpress_head.w2.weight [V, R]    of the token before; to logits
    xpress_head.{down_h, down_g}.weight [R, H]       of the state of a place, of the block's mean
    xpress_head.in_proj.weight [R, 3R]               over these two and the token before
    xpress_head.mix.L [R, N, N]                      below the diagonal and on it; without identity
    xpress_head.mlp.{gate_proj, up_proj}.weight [I, R]   xpress_head.mlp.down_proj.weight [R, I]

The config also holds, at its top level or in ``dflash_config``, ``xpress_rank`` (R),
``xpress_mlp_hidden`` (I), ``xpress_num_passes``, ``xpress_block_size`` (N) and
``sample_from_anchor: false``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .._internal.file_keys import file_keys
from ..drafters.xpress import XPress, XPressConfig
from . import block_keys, dflash
from .weights import check_integers, tensors_of

DESCRIPTION = "XPress's (xpress_head.w1.weight, xpress_head.mix.L; dflash_config)"
DRAFTER, WEIGHTS_FILE = XPress, "model"
ARCHITECTURE, HEAD = "Qwen3XPressModel", "xpress_head."
KEYS = {
    "xpress_rank": "rank",
    "xpress_mlp_hidden": "inner_size",
    "xpress_num_passes": "num_passes",
}
NAMES = {
    "w1.weight": ("embedding",),
    "down_h.weight": ("local", "weight"),
    "down_g.weight": ("whole", "weight"),
    "in_proj.weight": ("fuse", "weight"),
    "mix.L": ("mix",),
    "mlp.gate_proj.weight": ("gate", "weight"),
    "mlp.up_proj.weight": ("up", "weight"),
    "mlp.down_proj.weight": ("down", "weight"),
    "w2.weight": ("lm_head", "weight"),
}


def matches(config: Mapping, names: set[str]) -> bool:
    return "dflash_config" in config and f"{HEAD}w1.weight" in names


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config)
    said = {key: block_keys.in_either(config, own, key) for key in KEYS}
    lacking = [key for key, value in said.items() if value is None]
    if lacking:
        raise ValueError(f"the config.json of an XPress drafter lacks {', '.join(lacking)}")
    check_integers(**said)
    block = dflash.shape_of(
        config,
        tensors,
        target,
        known=(*KEYS, "xpress_block_size", "xpress_topc"),  # that of their server: all are scored
        projectors=("xpress", *block_keys.PROJECTORS),
        can_draft_from_root=False,
    )
    with file_keys(dflash.KEYS | KEYS):
        shape = XPressConfig(**block, **{name: said[key] for key, name in KEYS.items()})
    places = block_keys.in_either(config, own, "xpress_block_size")
    if places not in (None, shape.block_size):
        raise ValueError(
            f"xpress_block_size={places}: the block has {shape.block_size} places (block_size); "
            "both must be equal"
        )
    drafter = XPress(config=shape, target=target.target)
    return dflash.drafter_of(drafter, tensors, target, _names())


def save(drafter: XPress, params, target=None) -> tuple[dict, dict]:
    config, shape = dflash.config_of(drafter, "xpress"), drafter.config
    config["architectures"] = [ARCHITECTURE]
    config |= {key: vars(shape)[name] for key, name in KEYS.items()}
    config |= {"xpress_block_size": shape.block_size, "sample_from_anchor": False}
    return config, tensors_of(params, dflash.names(shape) | _names())


def _names() -> dict[str, tuple]:
    """Names of the tensors of the refiner to paths of parameters."""
    return {HEAD + name: ("refiner", *path) for name, path in NAMES.items()}
