"""Medusa heads in vLLM's layout (``model_type: medusa``)::

    blocks.{i}.layers.{j}.weight [H, H] (and .bias, with medusa_fc_bias)
    lm_heads.{i}.weight [V, H]

All names may begin with ``medusa_heads.``. With ``original_lm_head`` there is one LM head, that of
the target, which the file may hold (``lm_head.weight`` or ``lm_heads.0.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from ..drafters.medusa import Medusa, MedusaConfig
from .weights import check_copy, check_sizes, flags_of, params_of, tensors_of

DESCRIPTION = "vLLM's of Medusa (blocks.{i}.layers.{j}.weight, lm_heads.{i}.weight)"
DRAFTER, WEIGHTS_FILE = Medusa, "model"
_BLOCK = r"(medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight"
_ORIGINAL = r"(medusa_heads\.)?(lm_head|lm_heads\.\d+)\.weight"


def matches(config: Mapping, names: set[str]) -> bool:
    return any(re.fullmatch(_BLOCK, name) for name in names)


def load(config: Mapping, tensors: Mapping, target):
    found = [f for name in tensors if (f := re.fullmatch(_BLOCK, name))]
    prefix, size = found[0][1] or "", tensors[found[0][0]].shape[1]
    vocab = config.get("vocab_size", target.target.vocab_size)
    if config.get("truncated_vocab_size", vocab) != vocab or f"{prefix}token_map" in tensors:
        raise ValueError(
            f"truncated_vocab_size={config.get('truncated_vocab_size')}: Medusa heads over a part "
            f"of the {vocab} tokens (token_map) are not supported"
        )
    if config.get("logit_scale", 1.0) != 1.0:
        raise ValueError(f"logit_scale={config['logit_scale']}: only 1.0 is supported")
    check_sizes(target, hidden_size=size, vocab_size=vocab)
    shape = MedusaConfig(
        hidden_size=size,
        vocab_size=vocab,
        num_heads=1 + max(int(f[2]) for f in found),
        num_layers=1 + max(int(f[3]) for f in found),
        bias=f"{found[0][0].removesuffix('weight')}bias" in tensors,
        tied=flags_of(config, original_lm_head=False)["original_lm_head"],
    )
    others = [name for name in tensors if shape.tied and re.fullmatch(_ORIGINAL, name)]
    for name in others:
        check_copy(name, tensors[name], target.target.head_table(target.params), target)
    drafter = Medusa(config=shape, target=target.target)
    params = params_of(tensors, names(shape, prefix), drafter.shapes, target.dtype, others)
    return drafter, params


def save(drafter: Medusa, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    if not shape.num_layers:
        raise ValueError(
            "format='medusa-vllm': num_layers=0: heads of this layout have at least one block; "
            "take 'medusa'"
        )
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": shape.bias,
        "original_lm_head": shape.tied,
    }
    tensors = tensors_of(params, names(shape))
    if shape.tied:
        if target is None or target.target.quantized:
            raise ValueError(
                "format='medusa-vllm': vLLM reads the LM head from the file; give target=, the "
                "target not quantized"
            )
        head = np.asarray(target.target.head_table(target.params))
        tensors["lm_head.weight"] = head[: shape.vocab_size]
    return config, tensors


def names(shape: MedusaConfig, prefix: str = "") -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    leaves, named = ("weight", "bias") if shape.bias else ("weight",), {}
    for i in range(shape.num_heads):
        for j in range(shape.num_layers):
            for leaf in leaves:
                name = f"{prefix}blocks.{i}.layers.{j}.{leaf}"
                named[name] = ("heads", i, j, "linear", leaf)
        if not shape.tied:
            named[f"{prefix}lm_heads.{i}.weight"] = ("lm_heads", i, "weight")
    return named
