"""Medusa heads in their authors' layout (github.com/FasterDecoding/Medusa).

Head i of K, with L blocks::

    {i}.{j}.linear.weight [H, H]   {i}.{j}.linear.bias [H]   {i}.{L}.weight [V, H]

in ``medusa_lm_head.pt`` or ``.safetensors``. In a model that was trained together with its heads,
they are among its weights, with ``medusa_head.`` before their names. Where the last tensor is
absent (the authors' first trainer), all heads share the target's LM head. ``medusa_num_heads`` of
published configs is not always the number of heads in the file; that of the file is used. The
authors' code shares ONE block among the L of a head, and its files hold it L times; here it is read
as L blocks with equal weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
import numpy as np

from ..drafters.medusa import Medusa, MedusaConfig
from .weights import check_sizes, params_of, tensors_of

DESCRIPTION = (
    "Medusa's ({i}.{j}.linear.weight, {i}.{L}.weight, with or without medusa_head. before)"
)
DRAFTER, WEIGHTS_FILE = Medusa, "medusa_lm_head"
_PREFIX = "medusa_head."
_BLOCK = rf"({re.escape(_PREFIX)})?(\d+)\.(\d+)\.linear\.weight"
_LM_HEAD = rf"({re.escape(_PREFIX)})?(\d+)\.(\d+)\.weight"


def matches(config: Mapping, names: set[str]) -> bool:
    named = "medusa_num_heads" in config  # heads without a block have no name of their own
    return any(re.fullmatch(_BLOCK, n) or named and re.fullmatch(_LM_HEAD, n) for n in names)


def load(config: Mapping, tensors: Mapping, target):
    blocks = [found for name in tensors if (found := re.fullmatch(_BLOCK, name))]
    own = [found for name in tensors if (found := re.fullmatch(_LM_HEAD, name))]
    some = [*blocks, *own]
    prefix = some[0][1] or ""
    first = tensors[some[0][0]]
    vocab = tensors[own[0][0]].shape[0] if own else target.target.vocab_size
    check_sizes(target, hidden_size=first.shape[1], vocab_size=vocab)
    shape = MedusaConfig(
        hidden_size=first.shape[1],
        vocab_size=vocab,
        num_heads=1 + max(int(found[2]) for found in some),
        num_layers=1 + max((int(found[3]) for found in blocks), default=-1),
        tied=not own,
    )
    # a model that was trained with its heads has its own weights in the same file
    others = [name for name in tensors if not name.startswith(prefix)] if prefix else ()
    drafter = Medusa(config=shape, target=target.target)
    params = params_of(tensors, names(shape, prefix), drafter.shapes, target.dtype, others)
    return drafter, params


def save(drafter: Medusa, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    if shape.num_layers and any(map(_differ, params["heads"].values())):
        raise ValueError(
            "format='medusa': the authors' code shares one block among the layers of a head, and "
            "these differ; take 'medusa-vllm'"
        )
    if not shape.bias:
        raise ValueError(
            "format='medusa' has biases, these heads have none; 'medusa-vllm' may lack them"
        )
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
    if shape.tied:
        config["version"] = "2"  # of the authors' trainer that ties the heads
    return config, tensors_of(params, names(shape))


def names(shape: MedusaConfig, prefix: str = "") -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named = {}
    for i in range(shape.num_heads):
        for j in range(shape.num_layers):
            for leaf in ("weight", "bias"):
                named[f"{prefix}{i}.{j}.linear.{leaf}"] = ("heads", i, j, "linear", leaf)
        if not shape.tied:
            named[f"{prefix}{i}.{shape.num_layers}.weight"] = ("lm_heads", i, "weight")
    return named


def _differ(blocks: Mapping) -> bool:
    """Whether the blocks of a head are not all the same."""
    first, *others = (jax.tree.leaves(block) for block in blocks.values())
    return any(not np.array_equal(x, y) for own in others for x, y in zip(first, own, strict=True))
