"""LiLiCorr drafters in their authors' layout (Model-Optimizer, sglang#37462).

To the tensors of DFlash's layout (``dflash.py``) are added, each under ``lilicorr.``, with N places
that draft, K candidates, S features of a candidate, I of an MLP, A heads and F of a matched vector
(every linear layer has a bias)::

    token_proj [S, H], absent where S = H   pass_hidden_proj, context_proj [S, H]
    feature_norm [5], a layer norm   feature_mlp.up_proj [S, 5]   feature_mlp.down_proj [S, S]
    slot_embedding [1, 1, N, 1, S]    rank_embedding [1, 1, 1, K, S]
    relative_slot_bias [A, 2N + 1]    same_slot_bias [A]
    layers.{i}.attn_norm.weight [S]   layers.{i}.attn.{in_proj_weight [3S, S], in_proj_bias}
    layers.{i}.attn.out_proj [S, S]   layers.{i}.mlp_norm.weight [S]
    layers.{i}.mlp.up_proj [I, S]     layers.{i}.mlp.down_proj [S, I]
    output_norm.weight, anchor_norm.weight [S]   factor_input_proj [S, 3S]
    out_head, in_head, anchor_out_head [F, S]

These are the names that servers read; Model-Optimizer's own, ``OLDER``, are read too.

``dflash_config`` also holds the numbers of ``KEYS``, none of which has a default
(``lilicorr_hidden_size`` 0 is H), for layers with convolutions as DFlash2's ``conv_kernel_size``
and ``conv_group_size``, and from Model-Optimizer ``lilicorr_enabled: true``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._internal.file_keys import file_keys
from ..drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from . import block_keys, dflash, dflash2
from .weights import check_integers, check_numbers, flags_of, tensors_of

DESCRIPTION = "LiLiCorr's (lilicorr.relative_slot_bias, lilicorr.layers.{i}...; dflash_config)"
DRAFTER, WEIGHTS_FILE = LiLiCorr, "model"
ARCHITECTURE, HEAD = "LiLiCorrDraftModel", "lilicorr."
KEYS = {
    "lilicorr_candidate_topk": "num_candidates",
    "lilicorr_hidden_size": "lattice_size",
    "lilicorr_num_layers": "lattice_layers",
    "lilicorr_num_heads": "lattice_heads",
    "lilicorr_factor_dim": "factor_size",
    "lilicorr_mlp_ratio": "mlp_ratio",
    "lilicorr_vector_eps": "vector_eps",
    "lilicorr_logit_scale": "logit_scale",
}
CONVOLUTIONS = {"conv_kernel_size": "conv_taps", "conv_group_size": "conv_group"}
ENABLED = "lilicorr_enabled"  # Model-Optimizer writes true
FLOATS = ("lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale")
LINEAR = {  # names of linear layers and norms to attributes
    "pass_hidden_proj": "state",
    "context_proj": "context",
    "feature_norm": "feature_norm",
    "feature_mlp.up_proj": "feature_up",
    "feature_mlp.down_proj": "feature_down",
    "factor_input_proj": "factor",
    "out_head": "leave",
    "in_head": "enter",
    "anchor_out_head": "anchor_leave",
}
OLDER = {  # parts of names of servers to those of Model-Optimizer
    ".feature_norm.": ".feature_mlp.0.",
    ".feature_mlp.up_proj.": ".feature_mlp.1.",
    ".feature_mlp.down_proj.": ".feature_mlp.3.",
    ".mlp.up_proj.": ".mlp.0.",
    ".mlp.down_proj.": ".mlp.2.",
}
PLAIN = {
    "slot_embedding": ("slots",),
    "rank_embedding": ("ranks",),
    "relative_slot_bias": ("distances",),
    "same_slot_bias": ("same",),
    "output_norm.weight": ("norm", "weight"),
    "anchor_norm.weight": ("anchor_norm", "weight"),
}


def matches(config: Mapping, names: set[str]) -> bool:
    return "dflash_config" in config and f"{HEAD}relative_slot_bias" in names


def load(config: Mapping, tensors: Mapping, target):
    own = block_keys.own_part(config)
    on = flags_of({ENABLED: block_keys.in_either(config, own, ENABLED)}, **{ENABLED: True})
    if not on[ENABLED]:
        raise ValueError(
            f"{ENABLED}=false: the file holds the network that this key turns off; write true into "
            "it, or take the network's tensors out of the file"
        )
    given = {key: block_keys.in_either(config, own, key) for key in (*KEYS, *CONVOLUTIONS)}
    given = {key: value for key, value in given.items() if value is not None}
    lacking = [key for key in KEYS if key not in given]
    if lacking:
        raise ValueError(f"the config.json of a LiLiCorr drafter lacks {', '.join(lacking)}")
    said: dict[str, Any] = {key: given[key] for key in KEYS}
    check_numbers(**{key: said[key] for key in FLOATS})
    if given.get("conv_kernel_size"):
        said |= {key: given[key] for key in CONVOLUTIONS if key in given}
    check_integers(**{key: value for key, value in said.items() if key not in FLOATS})
    sizes = {(KEYS | CONVOLUTIONS)[key]: value for key, value in said.items()}
    block = dflash.shape_of(
        config,
        tensors,
        target,
        known=(*KEYS, *CONVOLUTIONS, ENABLED),
        projectors=("lilicorr", *block_keys.PROJECTORS),
        can_draft_from_root=False,
    )
    sizes["lattice_size"] = sizes["lattice_size"] or block["layers"].hidden_size
    with file_keys(dflash.KEYS | KEYS | CONVOLUTIONS):
        shape = LiLiCorrConfig(**block, **sizes)
    drafter = LiLiCorr(config=shape, target=target.target)
    named = _names(shape)
    if f"{HEAD}feature_mlp.0.weight" in tensors:
        named = {_older(name): path for name, path in named.items()}
    return dflash.drafter_of(drafter, tensors, target, named)


def save(drafter: LiLiCorr, params, target=None) -> tuple[dict, dict]:
    config, shape = dflash.config_of(drafter, "lilicorr"), drafter.config
    config["architectures"] = [ARCHITECTURE]
    keys = KEYS | (CONVOLUTIONS if shape.conv_taps else {})
    config["dflash_config"] |= {key: vars(shape)[name] for key, name in keys.items()}
    return config, tensors_of(params, dflash.names(shape) | _names(shape))


def _older(name: str) -> str:
    """The name that a tensor has in Model-Optimizer."""
    found = [part for part in OLDER if name.startswith(HEAD) and part in name]
    return name.replace(found[0], OLDER[found[0]]) if found else name


def _names(shape: LiLiCorrConfig) -> dict[str, tuple]:
    """Names of the tensors of the network and of convolutions to paths of parameters."""
    linear: dict[str, tuple] = {name: (path,) for name, path in LINEAR.items()}
    if shape.lattice_size != shape.hidden_size:
        linear["token_proj"] = ("token",)
    plain: dict[str, tuple] = dict(PLAIN)
    for i in range(shape.lattice_layers):
        before, path = f"layers.{i}.", ("layers", i)
        linear |= {f"{before}attn.out_proj": (*path, "out")}
        linear[f"{before}mlp.up_proj"] = (*path, "up")
        linear[f"{before}mlp.down_proj"] = (*path, "down")
        plain |= {
            f"{before}attn.in_proj_weight": (*path, "qkv", "weight"),
            f"{before}attn.in_proj_bias": (*path, "qkv", "bias"),
            f"{before}attn_norm.weight": (*path, "attention_norm", "weight"),
            f"{before}mlp_norm.weight": (*path, "mlp_norm", "weight"),
        }
    for name, path in linear.items():
        plain |= {f"{name}.{leaf}": (*path, leaf) for leaf in ("weight", "bias")}
    named = {HEAD + name: ("lattice", *path) for name, path in plain.items()}
    return named | (dflash2.convolution_names(shape) if shape.conv_taps else {})
