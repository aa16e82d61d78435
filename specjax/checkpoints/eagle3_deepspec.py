"""EAGLE-3 heads in the layout of DeepSpec (github.com/deepseek-ai/DeepSpec).

A head of one layer, as wide as the target, over all tokens, has, with k hidden states (the authors'
heads read five)::

    fc.weight [H, k H]   norm.weight [H]   layers.0.hidden_norm.weight [H]
    layers.0.(as Qwen3's, q, k and v_proj reading 2 H, with norms of queries and keys)
    embed_tokens.weight, lm_head.weight [V, H]      copies of the target's tables

The config is a Qwen3's with ``target_layer_ids``, which count the target's layers from 0 and
ascend (id i is ``hidden_states[i + 1]`` of Hugging Face), ``ttt_length`` (how many tokens the
authors' code drafts, and for how many steps it trained), ``num_target_layers``,
``draft_num_hidden_layers`` and ``step_loss_decay`` (of training). There are none of the settings of
``eagle3.py``: the residual stream begins as the unnormed ``fc``, and unnormed states are passed on.

The authors' code takes both tables from the file; a head that is loaded here uses the target's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import trees
from ..drafters.eagle3 import Eagle3, Eagle3Config
from ..models.quantize import is_quantized
from . import eagle3
from .dflash import TABLES, check_tables
from .flat_keys import TARGETS, check_flat
from .layers import layer_config, layer_hf
from .weights import (
    check_integers,
    check_num_layers,
    check_sizes,
    params_of,
    tensors_of,
)

DESCRIPTION = "DeepSpec's of EAGLE-3 (Qwen3Eagle3Model; target_layer_ids, layers.0.hidden_norm...)"
DRAFTER, WEIGHTS_FILE = Eagle3, "model"
ARCHITECTURE = "Qwen3Eagle3Model"
STEP_LOSS_DECAY = 0.8  # of the authors' training; their code refuses a config without the key
READ = (  # beside the keys of the layer
    "draft_num_hidden_layers",
    "step_loss_decay",
    "target_layer_ids",
    "ttt_length",
    *TARGETS,
)
_FIRST = "layers.0."
_ABSENT = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")  # in their code


def matches(config: Mapping, names: set[str]) -> bool:
    return eagle3.is_deepspecs(config, names)


def load(config: Mapping, tensors: Mapping, target):
    for name in config.get("architectures") or [ARCHITECTURE]:
        if name != ARCHITECTURE:
            raise ValueError(
                f"architectures={config['architectures']}: of DeepSpec's EAGLE-3 heads only "
                f"{ARCHITECTURE} is supported"
            )
    said: dict[str, Any] = {key: config.get(key) for key in ("target_layer_ids", "ttt_length")}
    if lacking := [key for key, value in said.items() if value is None]:
        raise ValueError(f"the config.json of DeepSpec's EAGLE-3 heads lacks {', '.join(lacking)}")
    check_integers(ttt_length=said["ttt_length"])
    if said["ttt_length"] < 1:
        raise ValueError(f"ttt_length={said['ttt_length']}: it must be at least 1")
    for key in _ABSENT:
        if config.get(key):
            raise ValueError(f"{key}={config[key]!r}: heads of DeepSpec have no such setting")
    _check_counts(config, target)
    vocab = target.target.vocab_size
    layer = layer_config(config, tensors, model_type="qwen3", vocab_size=vocab)
    check_flat(config, (*READ, *_ABSENT))
    authors: dict[str, Any] = dict(window=None, local_layers=None, qk_norm=True)
    layer = dataclasses.replace(layer, **authors)  # whatever the target has
    check_sizes(target, hidden_size=layer.hidden_size, vocab_size=layer.vocab_size)
    layers = _target_layers(said["target_layer_ids"], target)
    shape = Eagle3Config(layer=layer, num_features=len(layers), draft_vocab_size=0)
    drafter = Eagle3(
        config=shape,
        target=target.target,
        layers=layers,
        topology=trees.chain(said["ttt_length"]),
        trained_depth=said["ttt_length"],
    )
    check_tables(tensors, target)
    named = eagle3.names(shape, _FIRST)
    return drafter, params_of(tensors, named, drafter.shapes, target.dtype, [*TABLES])


def save(drafter: Eagle3, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    wrong = {
        "layer.qk_norm": not shape.layer.qk_norm,
        "layer.window": shape.layer.window is not None,
        "layer.num_layers": shape.layer.num_layers != 1,
        "layer.qkv_bias": shape.layer.qkv_bias != shape.layer.o_bias,
        "layer.mlp_bias": shape.layer.mlp_bias,
        "feature_size": shape.feature_size != shape.hidden_size,
        "draft_vocab_size": shape.draft_vocab_size != 0,
        "own_embedding": shape.own_embedding,
        "norm_before_residual": shape.norm_before_residual,
        "fc_norm": shape.fc_norm is not None,
        "normed_output": shape.normed_output,
        "fc_bias": shape.fc_bias,
        "mask_token": shape.mask_token is not None,
    }
    if wrong := [name for name, is_so in wrong.items() if is_so]:
        raise ValueError(
            "format='eagle3-deepspec': its heads have one layer of Qwen3's, with norms of queries "
            f"and keys, and use the target's tables; this head has another {', '.join(wrong)}: "
            "take 'eagle3-speculators'"
        )
    ids, count = [i - 1 for i in drafter.features], drafter.target.num_layers
    if ids != sorted({*ids}) or ids[0] < 0 or ids[-1] > count - 2:
        raise ValueError(
            f"format='eagle3-deepspec': layers={drafter.features}: the layout counts layers in "
            f"ascending order, neither the embeddings (0) nor the last state ({count}) among them"
        )
    config = layer_hf(shape.layer) | {
        "architectures": [ARCHITECTURE],
        "target_layer_ids": ids,
        "ttt_length": drafter.trained_depth or drafter.depth,
        "step_loss_decay": STEP_LOSS_DECAY,
        "draft_num_hidden_layers": 1,
        "num_target_layers": count,
        "tie_word_embeddings": False,
    }
    config.setdefault("layer_types", ["full_attention"])
    tensors = tensors_of(params, eagle3.names(shape, _FIRST))
    if target is not None:
        tables = {name: table(target) for name, table in TABLES.items()}
        tensors |= {n: np.ascontiguousarray(x) for n, x in tables.items() if not is_quantized(x)}
    return config, tensors


def _check_counts(config: Mapping, target) -> None:
    """Raises ValueError for heads of several layers, or of a target with other layers."""
    for key in ("num_hidden_layers", "draft_num_hidden_layers"):
        value = config.get(key, 1)
        check_integers(**{key: value})
        if value != 1:
            raise ValueError(
                f"{key}={value}: each layer of such a head would read embeddings, and the authors' "
                "own code drafts with one layer alone; only 1 is supported"
            )
    check_num_layers(config, target)


def _target_layers(ids, target) -> tuple[int, ...]:
    """The hidden states that are read, as ``hidden_states[i]``, of the file's ``ids``.

    Raises:
      ValueError: they are no ascending layers of the target, or the last layer is among them.
    """
    count = target.target.num_layers
    wrong = not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids)
    if wrong or ids != sorted({*ids}) or ids[0] < 0 or ids[-1] >= count:
        raise ValueError(
            f"target_layer_ids={ids!r}: it must be an ascending list of layers of {target.name}, "
            f"which are numbered 0 to {count - 1}; load the target that the head belongs to"
        )
    if ids[-1] == count - 1:
        raise ValueError(
            f"target_layer_ids={ids}: {count - 1} is the last layer, whose output is trained upon "
            "before the last norm and read after it; the authors' code refuses such heads as well"
        )
    return tuple(i + 1 for i in ids)
