"""EAGLE heads in their authors' layout (github.com/SafeAILab/EAGLE) and that of speculators.

The authors' layout, of L layers, the first of which does not norm what it reads::

    fc.weight [H, 2 H]   fc.bias [H], perhaps   embed_tokens.weight [V, H], perhaps
    layers.{i}.(as Llama's)

The config is a Llama's. Its ``bias`` (default: true) refers to ``fc.bias``, and its number of
layers is that of the target in some published files; here the tensors of the file decide both.
Embeddings are a copy of the target's; the LM head is that of the target.

The layout of speculators (``speculators_model_type: eagle``) has one layer, its config in
``transformer_layer_config``, and with ``layernorms`` three norms::

    fusion_fc.weight   fusion_fc.bias   transformer.(as a Llama layer's)
    embedding_layernorm.weight   transformer.input_layernorm.weight   pre_lm_head_layernorm.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..drafters.eagle import Eagle, EagleConfig
from .layers import block_names, layer_config, layer_hf, rope_of
from .weights import (
    check_copy,
    check_sizes,
    embedding_table,
    head_table,
    params_of,
    tensors_of,
)

DESCRIPTION = "EAGLE's (fc.weight, layers.{i}...; fusion_fc.weight, transformer...)"
DRAFTER, WEIGHTS_FILE = Eagle, "model"
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_EMBEDDING_NORM, _HEAD_NORM = "embedding_layernorm.weight", "pre_lm_head_layernorm.weight"


def matches(config: Mapping, names: set[str]) -> bool:
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names:
        return not any(name.endswith("hidden_norm.weight") for name in names)
    return {"fusion_fc.weight", "transformer.self_attn.q_proj.weight"} <= names


def load(config: Mapping, tensors: Mapping, target):
    fused = "fusion_fc.weight" in tensors
    inner = dict(config.get("transformer_layer_config") or config)
    if fused:
        inner = rope_of(config) | inner
    layer = layer_config(
        inner | {"num_hidden_layers": 1 if fused else num_layers(tensors)},
        tensors,
        model_type="llama",
        vocab_size=target.target.vocab_size,
    )
    check_sizes(target, hidden_size=layer.hidden_size, vocab_size=layer.vocab_size)
    fc, first = ("fusion_fc", "transformer.") if fused else ("fc", "layers.0.")
    shape = EagleConfig(
        layer=layer,
        fc_bias=f"{fc}.bias" in tensors,
        input_norm=f"{first}input_layernorm.weight" in tensors,
        embedding_norm=_EMBEDDING_NORM in tensors,
        head_norm=_HEAD_NORM in tensors,
    )
    for name, table in zip((_EMBEDDING, _LM_HEAD), (embedding_table, head_table), strict=True):
        if name in tensors:
            check_copy(name, tensors[name], table(target), target)
    drafter = Eagle(config=shape, target=target.target)
    others = (_EMBEDDING, _LM_HEAD)
    params = params_of(tensors, names(shape, fc, first), drafter.shapes, target.dtype, others)
    return drafter, params


def save(drafter: Eagle, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    for said in ("input_norm", "embedding_norm", "head_norm", "own_embedding"):
        if getattr(shape, said):
            raise ValueError(f"format='eagle': the layout has no place for {said}")
    if shape.layer.qk_norm:
        raise ValueError("format='eagle': its layers have no norms of queries and keys, these have")
    config = layer_hf(shape.layer) | {
        "architectures": ["EagleLlamaForCausalLM"],  # vLLM's name; SGLang has another
        "bias": shape.fc_bias,
    }
    return config, tensors_of(params, names(shape))


def names(shape: EagleConfig, fc: str = "fc", first: str = "layers.0.") -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters.

    ``fc``: how the layout calls that layer; ``first``: what its names of the first layer begin
    with.
    """
    named = {f"{fc}.weight": ("fc", "weight")}
    if shape.fc_bias:
        named[f"{fc}.bias"] = ("fc", "bias")
    for i in range(shape.layer.num_layers):
        named |= block_names(shape.layer, i, f"layers.{i}." if i else first, ())
    if not shape.input_norm:
        del named[f"{first}input_layernorm.weight"]
    if shape.embedding_norm:
        named[_EMBEDDING_NORM] = ("embedding_norm", "weight")
    if shape.head_norm:
        named[_HEAD_NORM] = ("head_norm", "weight")
    return named


def num_layers(names: Iterable[str]) -> int:
    """The number of layers ``layers.{i}.`` among the names, at least one."""
    found = [re.match(r"layers\.(\d+)\.", name) for name in names]
    return 1 + max((int(match[1]) for match in found if match), default=0)
