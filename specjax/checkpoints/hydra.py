"""Hydra heads in their authors' layout (github.com/zankner/Hydra), plain and Hydra++.

Head i of K, with L layers, in ``hydra_lm_head.pt`` (or ``.safetensors``)::

    hydra_mlp.{i}.{j}.linear.weight [H, (i + 2) H], j = 0; [H, H] after   (and .bias)
    hydra_mlp.{i}.0.res_connection.weight [H, (i + 2) H]                    (and .bias)
    hydra_lm_head.{i}.weight [V, H]                                         (and .bias)

With ``hydra_head_arch: prefix-mlp``, dropout layers count too, so that j is 1, 3, ... and the LM
heads are ``hydra_lm_head.{i}.1``; and there is one Llama layer followed by a norm,
``prefix_embeding_layer.layers.0...`` (so spelt), of the target's shape, which the file does not
state. The file may hold the target's embeddings (``input_embed_fn.weight``). Where
``hydra_lm_head`` is absent, which only files written here do, all heads share the target's LM head.
The other architectures of the authors' code do not make Hydra heads and are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._internal.file_keys import file_keys
from .._internal.optional import required
from ..drafters.hydra import Hydra, HydraConfig
from ..drafters.prefix import prefix_config
from .layers import block_names, check_layer, config_of
from .weights import (
    check_copy,
    check_integers,
    check_sizes,
    embedding_table,
    flags_of,
    params_of,
    tensors_of,
)

DESCRIPTION = "Hydra's (hydra_mlp.{i}.{j}.linear.weight, hydra_lm_head.{i}.weight)"
DRAFTER, WEIGHTS_FILE = Hydra, "hydra_lm_head"
ARCHITECTURES = ("mlp", "prefix-mlp")
KEYS = {"hydra_num_heads": "num_heads", "hydra_num_layers": "num_layers"}
USUAL = {"hydra_num_heads": 4, "hydra_num_layers": 1}
_PREFIX = "prefix_embeding_layer."
_UNUSED = ("embed_tokens.weight", "layers.0.self_attn.rotary_emb.inv_freq")


def matches(config: Mapping, names: set[str]) -> bool:
    return "hydra_num_heads" in config or any(name.startswith("hydra_mlp.") for name in names)


def load(config: Mapping, tensors: Mapping, target):
    kind = config.get("hydra_head_arch", "mlp")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"hydra_head_arch={kind!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    if not flags_of(config, grounded_heads=False)["grounded_heads"]:
        raise ValueError(
            "grounded_heads=false: such heads do not read the drafted tokens, which makes them "
            "Medusa's; Hydra's have grounded_heads=true"
        )
    first = tensors.get(f"hydra_mlp.0.{int(kind == 'prefix-mlp')}.linear.weight")
    size = target.target.hidden_size if first is None else first.shape[0]
    own = [name for name in tensors if name.startswith("hydra_lm_head.0.")]
    vocab = tensors[own[0]].shape[0] if own else target.target.vocab_size
    check_sizes(target, hidden_size=size, vocab_size=vocab)
    sizes: dict[str, Any] = {key: config.get(key, usual) for key, usual in USUAL.items()}
    check_integers(**sizes)
    with file_keys(KEYS):
        shape = HydraConfig(
            hidden_size=size,
            vocab_size=vocab,
            **{KEYS[key]: value for key, value in sizes.items()},
            tied=not own,
            prefix=prefix_config(target.config) if kind == "prefix-mlp" else None,
        )
    offset = config.get("hidden_state_offset")
    offset = 0 if offset is None else offset
    check_integers(hidden_state_offset=offset)
    if not 0 <= offset <= target.target.num_layers:
        raise ValueError(
            f"hidden_state_offset={offset}: {target.name} has {target.target.num_layers} layers"
        )
    embedding = "input_embed_fn.weight"
    if embedding in tensors:
        check_copy(embedding, tensors[embedding], embedding_table(target), target)
    others = [embedding, *(_PREFIX + name for name in _UNUSED)]
    drafter = Hydra(config=shape, target=target.target)
    params = params_of(tensors, names(shape), drafter.shapes, target.dtype, others)
    return dataclasses.replace(drafter, layer=drafter.usual_layer - offset), params


def save(drafter: Hydra, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    if shape.prefix is not None:
        check_layer(
            "format='hydra': the prefix layer",
            shape.prefix,
            prefix_config(config_of(drafter.target)),
            "make it with drafters.prefix.prefix_config(target.config)",
        )
    config = {
        "hydra_num_heads": shape.num_heads,
        "hydra_num_layers": shape.num_layers,
        "hydra_head_arch": "mlp" if shape.prefix is None else "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": drafter.target.num_layers - required(drafter.layer, "layer"),
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
    return config, tensors_of(params, names(shape))


def names(shape: HydraConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named: dict[str, tuple] = {}
    dropout = int(shape.prefix is not None)
    for i in range(shape.num_heads):
        for leaf in ("weight", "bias"):
            for j in range(shape.num_layers):
                at = f"hydra_mlp.{i}.{j * (1 + dropout) + dropout}"
                named[f"{at}.linear.{leaf}"] = ("heads", i, min(j, 1), "linear", leaf)
                if j == 0:
                    named[f"{at}.res_connection.{leaf}"] = ("heads", i, 0, "residual", leaf)
            if not shape.tied:
                at = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
                named[f"{at}.{leaf}"] = ("lm_heads", i, leaf)
    if shape.prefix is not None:
        named[f"{_PREFIX}norm.weight"] = ("prefix", "norm", "weight")
        named |= block_names(shape.prefix, 0, f"{_PREFIX}layers.0.", ("prefix",))
    return named
