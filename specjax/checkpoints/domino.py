"""Domino drafters in their authors' layout (github.com/sgl-project/SpecForge).

To the tensors of DFlash's layout (``dflash.py``) are added, with a recurrent state of S numbers and
a correction of rank R::

    prefix_gru.weight_ih_l0 [3S, H]   prefix_gru.weight_hh_l0 [3S, S]    reset, update, candidate
    embed_proj.0.weight [R, H + S]    embed_proj.2.weight [V, R]

(older files write ``logit_head.`` before these names). ``dflash_config`` also holds
``projector_type: domino``, ``gru_hidden_dim`` (S), ``emb_dim`` (R), ``pure_draft_prefix_len`` (the
number of first tokens without a correction, 0 if absent) and ``shift_label`` (whether the place of
the root drafts, false if absent).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._internal.file_keys import file_keys
from ..drafters.domino import Domino, DominoConfig
from . import block_keys, dflash
from .weights import check_integers, tensors_of

DESCRIPTION = "Domino's (prefix_gru.weight_ih_l0, embed_proj.0.weight; dflash_config)"
DRAFTER, WEIGHTS_FILE = Domino, "model"
ARCHITECTURE, PROJECTORS = "DominoDraftModel", ("domino", "causal_v5")  # the latter an older name
KEYS = {"gru_hidden_dim": "gru_size", "emb_dim": "rank", "pure_draft_prefix_len": "prefix"}
OLD = "logit_head."


def matches(config: Mapping, names: set[str]) -> bool:
    gru = "prefix_gru.weight_ih_l0"
    return "dflash_config" in config and bool({gru, OLD + gru} & names)


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config)
    said: dict[str, Any] = {key: block_keys.in_either(config, own, key) for key in KEYS}
    said["pure_draft_prefix_len"] = said["pure_draft_prefix_len"] or 0
    lacking = [key for key, value in said.items() if value is None]
    if lacking:
        raise ValueError(f"the config.json of a Domino drafter lacks {', '.join(lacking)}")
    check_integers(**said)
    block = dflash.shape_of(config, tensors, target, known=KEYS, projectors=PROJECTORS)
    sizes = {KEYS[key]: value for key, value in said.items()}
    with file_keys(dflash.KEYS | KEYS):
        shape = DominoConfig(**block, **sizes)
    old = any(name.startswith(OLD) for name in tensors)
    drafter = Domino(config=shape, target=target.target)
    return dflash.drafter_of(drafter, tensors, target, names(OLD if old else ""))


def save(drafter: Domino, params, target=None) -> tuple[dict, dict]:
    config = dflash.config_of(drafter, "domino", can_draft_from_root=True)
    shape = drafter.config
    config["architectures"] = [ARCHITECTURE, *config["architectures"]]  # SGLang knows the latter
    config["dflash_config"] |= {key: vars(shape)[name] for key, name in KEYS.items()}
    config["dflash_config"] |= {"projector_type": "domino", "shift_label": shape.from_root}
    return config, tensors_of(params, dflash.names(shape) | names())


def names(before: str = "") -> dict[str, tuple]:
    """Names of the tensors of GRU and correction to paths of parameters."""
    paths = {
        "prefix_gru.weight_ih_l0": "read",
        "prefix_gru.weight_hh_l0": "recall",
        "embed_proj.0.weight": "down",
        "embed_proj.2.weight": "lm_head",
    }
    return {before + name: (path, "weight") for name, path in paths.items()}
