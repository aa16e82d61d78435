"""Kangaroo's adapter in its authors' layout (github.com/Equationliu/Kangaroo)::

    layers.0.input_layernorm.weight [H]
    layers.0.self_attn.{q,k,v,o}_proj.weight [q, H], [k, H], [k, H], [H, q]
    norm.weight [H]

The config is a Llama's with one layer, of which the sizes of attention, the rotary settings and the
epsilon of norms are read; its MLP does not exist. The LM head is that of the target. The authors'
config does not say how many of the target's layers run first, which is an argument of their
program: 2 for Vicuna-7B, 3 for Vicuna-13B. A file written here states it, with the threshold::

    "specjax": {"exit": E, "threshold": eta}

Where a file does not state the exit, targets of 32 and of 40 layers have the authors' numbers, and
other targets are refused. The authors' program reads ``pytorch_model.bin``; a file that was written
here with ``pickled=True`` can be renamed to that.
"""

from __future__ import annotations

from collections.abc import Mapping

from .._internal.file_keys import file_keys
from ..drafters.kangaroo import THRESHOLD, Kangaroo, KangarooConfig
from .layers import block_names, layer_config, layer_hf
from .weights import check_integers, check_sizes, params_of, tensors_of

DESCRIPTION = "Kangaroo's (norm.weight, layers.0.self_attn... without layers.0.mlp)"
DRAFTER, WEIGHTS_FILE = Kangaroo, "model"
EXITS = {32: 2, 40: 3}  # the authors' number of first layers by that of the target's
_LAYER = "layers.0."
_UNUSED = (f"{_LAYER}self_attn.rotary_emb.inv_freq",)


def matches(config: Mapping, names: set[str]) -> bool:
    norms = {"norm.weight", f"{_LAYER}input_layernorm.weight"}
    if not {*norms, f"{_LAYER}self_attn.q_proj.weight"} <= names:
        return False
    attention = f"{_LAYER}self_attn."
    return all(name in norms or name.startswith(attention) for name in names)


def load(config: Mapping, tensors: Mapping, target):
    layer = layer_config(
        dict(config) | {"num_hidden_layers": 1},
        tensors,
        model_type="llama",
        vocab_size=target.target.vocab_size,
    )
    check_sizes(target, hidden_size=layer.hidden_size, vocab_size=layer.vocab_size)
    own, layers = config.get("specjax") or {}, target.target.num_layers
    first = own.get("exit", EXITS.get(layers))
    if first is None:
        raise ValueError(
            f"config.json does not say how many of the {layers} layers of {target.name} run before "
            'the adapter: add {"specjax": {"exit": E}} with the number with which it was trained'
        )
    check_integers(exit=first)
    threshold = own.get("threshold", THRESHOLD)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ValueError(f"config.json: threshold={threshold!r}: it must be a number from 0 to 1")
    shape = KangarooConfig(layer=layer)
    with file_keys({"exit": "layer"}):
        drafter = Kangaroo(config=shape, target=target.target, layer=first, threshold=threshold)
    named = names(drafter.config)
    return drafter, params_of(tensors, named, drafter.shapes, target.dtype, _UNUSED)


def save(drafter: Kangaroo, params, target=None) -> tuple[dict, dict]:
    config = layer_hf(drafter.config.layer)
    own = {"exit": drafter.layer, "threshold": drafter.threshold}
    config["specjax"] = config.get("specjax", {}) | own
    return config, tensors_of(params, names(drafter.config))


def names(shape: KangarooConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    block = block_names(shape.layer, 0, _LAYER, ())
    named = {name: path for name, path in block.items() if not {*path} & {"mlp", "mlp_norm"}}
    return named | {"norm.weight": ("norm", "weight")}
