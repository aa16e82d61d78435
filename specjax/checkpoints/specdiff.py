"""SpecDiff drafters in a layout of this project; no other is published.

The tensors are those of DFlash's layout (``dflash.py``). ``specdiff_config`` holds the keys of
``dflash_config`` (``mask_token_id``, ``target_layer_ids``) and those of the passes: ``steps``,
``order`` and ``schedule``. ``format="dflash"`` writes the same weights for programs that fill in
all masks in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._internal.file_keys import file_keys
from ..drafters.block import BlockConfig
from ..drafters.specdiff import SpecDiff
from . import block_keys, dflash
from .weights import check_integers, tensors_of

DESCRIPTION = "SpecDiff's of this project (fc.weight, layers.{i}...; specdiff_config)"
DRAFTER, WEIGHTS_FILE = SpecDiff, "model"
PART = "specdiff_config"
KEYS = ("steps", "order", "schedule")


def matches(config: Mapping, names: set[str]) -> bool:
    return PART in config and "fc.weight" in names


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config, PART)
    lacking = [key for key in KEYS if key not in own]
    if lacking:
        raise ValueError(f"{PART}: it lacks {', '.join(lacking)}")
    said: dict[str, Any] = {key: own[key] for key in KEYS}
    check_integers(steps=said["steps"])
    shape = dflash.shape_of(config, tensors, target, known=KEYS, part=PART)
    with file_keys(dflash.KEYS):
        drafter = SpecDiff(config=BlockConfig(**shape), target=target.target, **said)
    return dflash.drafter_of(drafter, tensors, target)


def save(drafter: SpecDiff, params, target=None) -> tuple[dict, dict]:
    config = dflash.config_of(drafter, "specdiff")
    said = {"steps": drafter.steps, "order": drafter.order, "schedule": drafter.schedule}
    config["architectures"] = ["SpecDiffDraftModel"]
    config[PART] = config.pop("dflash_config") | said
    return config, tensors_of(params, dflash.names(drafter.config))
