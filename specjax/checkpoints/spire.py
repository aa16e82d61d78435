"""SPIRe drafters in a layout of this project; no other is published::

    layers.{i}.input_layernorm.weight, layers.{i}.self_attn.{q,k,v,o}_proj.weight, ... as in a Llama
    norm.weight [H]
    memory.weight [n, n + 1]

The config is that of a Llama of n layers, beside ``"spire_config": {"window": W, "sinks": A}``.
Embeddings and LM head are those of the target.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..drafters.spire import SPIRe, SPIReConfig
from .layers import block_names, layer_config, layer_hf
from .weights import check_integers, check_sizes, params_of, tensors_of

DESCRIPTION = "SPIRe's of this project (memory.weight, layers.{i}...; spire_config)"
DRAFTER, WEIGHTS_FILE = SPIRe, "model"
KEYS = ("window", "sinks")


def matches(config: Mapping, names: set[str]) -> bool:
    return "spire_config" in config and "memory.weight" in names


def load(config: Mapping, tensors: Mapping, target):
    own = dict(config["spire_config"])
    lacking = [key for key in KEYS if key not in own]
    if lacking:
        raise ValueError(f"spire_config: it lacks {', '.join(lacking)}")
    sizes = {key: own[key] for key in KEYS}
    check_integers(**sizes)
    names_of_layers = [name for name in tensors if name.startswith("layers.")]
    vocab = target.target.vocab_size
    layers = layer_config(config, names_of_layers, model_type="llama", vocab_size=vocab)
    check_sizes(target, hidden_size=layers.hidden_size, vocab_size=layers.vocab_size)
    drafter = SPIRe(config=SPIReConfig(layers=layers, **sizes), target=target.target)
    return drafter, params_of(tensors, names(drafter.config), drafter.shapes, target.dtype)


def save(drafter: SPIRe, params, target=None) -> tuple[dict, dict]:
    config = layer_hf(drafter.config.layers) | {
        "architectures": ["SPIReDraftModel"],
        "spire_config": {key: getattr(drafter.config, key) for key in KEYS},
    }
    return config, tensors_of(params, names(drafter.config))


def names(shape: SPIReConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named: dict[str, tuple] = {"norm.weight": ("norm", "weight"), "memory.weight": ("memory",)}
    for i in range(shape.layers.num_layers):
        named |= block_names(shape.layers, i, f"layers.{i}.", ())
    return named
