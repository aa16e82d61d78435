"""Decoder layers inside of a drafter's file: their shape, their tensors' names, their config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ..models.causal_lm import CausalLM
from ..models.config import DecoderConfig
from ..models.families import FAMILIES
from ..models.translate import config_from_hf, config_to_hf, windows_from_hf
from ..types import HeadTarget
from .weights import check_integers

_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_KINDS = ("llama", "qwen2", "qwen3")  # families whose tensors have the names of ``block_names``
_HEAD_NORMS = ("q_norm", "k_norm")
_WITHOUT_EFFECT = ("max_positions", "model_type", "tie_embeddings", "eos_ids", "bos_id")
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def layer_config(
    hf: Mapping, names: Iterable[str], *, typed: bool = False, **usual
) -> DecoderConfig:
    """The shape of the layers that a file has.

    Rotary settings are read from ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``.
    Which projections have biases, and whether queries and keys are normed, is read from the names
    of the tensors rather than from the config, since programs disagree about the keys. Programs
    disagree about windows, too: transformers has none unless ``use_sliding_window`` is true (in
    Llama never), and servers go by ``layer_types``.

    Args:
      hf: the config, with the keys of Hugging Face.
      names: names of the file's tensors.
      typed: whether ``layer_types`` alone says which of Llama's layers have a window, as in the
        code of the layout's authors; otherwise layers for which the two keys disagree are refused.
      usual: values for keys that the config lacks.

    Raises:
      ValueError: the layers are of another family, the two places for rotary settings contradict
        each other, ``layer_types`` names windows that ``use_sliding_window`` does not, or
        ``config_from_hf`` does not support them.
    """
    hf = usual | {key: value for key, value in hf.items() if value is not None}
    if hf.get("model_type") not in _KINDS:
        raise ValueError(
            f"config.json: layers of model_type={hf.get('model_type')!r} are not supported; known: "
            f"{', '.join(_KINDS)}. A layer that is Llama's in all but name can be loaded with "
            "model_type 'llama'"
        )
    inside = hf.get("rope_parameters") or {}
    beside = {"rope_theta": hf.get("rope_theta")} | (hf.get("rope_scaling") or {})
    wrong = [key for key in inside if beside.get(key, inside[key]) not in (None, inside[key])]
    if wrong:
        raise ValueError(
            f"config.json: rope_parameters has {wrong[0]}={inside[wrong[0]]!r}, and outside of it "
            f"is {beside[wrong[0]]!r}: delete the value with which the drafter was not trained"
        )
    if "rope_theta" not in hf and "rope_theta" in inside:
        hf["rope_theta"] = inside["rope_theta"]  # read even if there is a rope_scaling as well
    local = "sliding_attention" in (hf.get("layer_types") or ())
    if local:
        typed = typed and hf["model_type"] == "llama"
        if not typed and hf.get("use_sliding_window") is not True:
            raise ValueError(
                "config.json: layer_types has sliding_attention, and use_sliding_window is "
                f"{hf.get('use_sliding_window')!r}: some programs give such layers a window and "
                "others none; if the drafter was trained with windows, write "
                '"use_sliding_window": true, else "full_attention" in layer_types'
            )
        if "sliding_window" not in hf:
            raise ValueError(
                "config.json: layer_types has sliding_attention, and there is no sliding_window: "
                'give its number of tokens, or write "full_attention" in layer_types'
            )
        hf["use_sliding_window"] = True
    names = set(names)

    def has(*ends):
        return any(name.endswith(ends) for name in names)

    config = config_from_hf(hf)
    if local:  # of Llama's too
        windows = windows_from_hf(hf, FAMILIES["qwen3"].windows, config.num_layers)
        config = dataclasses.replace(config, **windows)
    window = (hf.get("specjax") or {}).get("window", config.window)  # the key of older files
    if window is not None:
        check_integers(window=window)
    return dataclasses.replace(
        config,
        window=window,
        qkv_bias=has(".q_proj.bias", ".k_proj.bias", ".v_proj.bias"),
        o_bias=has(".o_proj.bias"),
        mlp_bias=has(".gate_proj.bias", ".up_proj.bias", ".down_proj.bias"),
        qk_norm=has(*(f".{norm}.weight" for norm in _HEAD_NORMS)),
        tie_embeddings=False,
    )


def rope_of(hf: Mapping) -> dict:
    """The rotary settings of a config, in either of their two places."""
    return {key: hf[key] for key in _ROPE if hf.get(key) is not None}


def layer_hf(config: DecoderConfig) -> dict:
    """The config of layers, with rotary settings where transformers 4 and 5 look for them.

    ``attention_bias`` means biases of queries, keys, values and the output; where only the first
    three have them (Qwen2), ``qkv_bias`` is written. Transformers knows no window of Llama's
    layers; theirs are written by the keys of Qwen3's, of which servers and speculators read
    ``layer_types`` and ``sliding_window``.
    """
    plain: dict[str, Any] = dict(qkv_bias=False, o_bias=False, mlp_bias=False)
    hf = config_to_hf(dataclasses.replace(config, model_type="qwen3", qk_norm=True, **plain))
    if not config.qk_norm:
        windows = {key: hf[key] for key in _WINDOWS if config.window is not None}
        plain |= dict(window=None, local_layers=None)
        hf = config_to_hf(dataclasses.replace(config, model_type="llama", **plain)) | windows
    hf["attention_bias"] = config.qkv_bias and config.o_bias
    if config.qkv_bias != config.o_bias:
        hf["qkv_bias"] = config.qkv_bias
    hf["mlp_bias"] = config.mlp_bias
    return hf


def block_names(config: DecoderConfig, layer: int, before: str, path: tuple) -> dict[str, tuple]:
    """The names of one layer's tensors, with the path of the parameter of each in a ``Decoder``.

    Args:
      config: the shape of the layer.
      layer: its index among the blocks of the ``Decoder``.
      before: the prefix of all names, as ``"layers.0."``.
      path: the path of the ``Decoder`` in the parameters.
    """
    at = (*path, "blocks", layer)
    parts: dict[str, tuple] = {name: (*at, norm) for name, norm in _NORMS.items()}
    for key in "qkvo":
        parts[f"self_attn.{key}_proj"] = (*at, "attention", key)
    for key in ("gate", "up", "down"):
        parts[f"mlp.{key}_proj"] = (*at, "mlp", key)
    if config.qk_norm:
        parts |= {f"self_attn.{norm}": (*at, "attention", norm) for norm in _HEAD_NORMS}
    biased = {f"self_attn.{key}_proj": config.qkv_bias for key in "qkv"}
    biased |= {"self_attn.o_proj": config.o_bias}
    biased |= {f"mlp.{key}_proj": config.mlp_bias for key in ("gate", "up", "down")}
    named = {f"{before}{name}.weight": (*own, "weight") for name, own in parts.items()}
    return named | {
        f"{before}{name}.bias": (*parts[name], "bias") for name, is_so in biased.items() if is_so
    }


def config_of(target: HeadTarget) -> DecoderConfig:
    """Returns the shape of a target, for layouts whose files leave it to the target.

    Raises:
      ValueError: the target is one of your own, which has no config.
    """
    if not isinstance(target, CausalLM):
        raise ValueError(
            f"the layout takes the shape of its layers from the target, and {type(target).__name__}"
            " has no config: take heads in another layout, or a target from specjax.load"
        )
    return dataclasses.replace(target.config, cache_bits=None)


def check_layer(name: str, layer: DecoderConfig, wanted: DecoderConfig, way_out: str) -> None:
    """Refuses a layer whose shape a layout does not write, since it is that of the target.

    Args:
      name: how the error names the layer, with the format.
      layer: the shape that the drafter has.
      wanted: the shape with which the layout is read again.
      way_out: the end of the error's sentence.

    Raises:
      ValueError: the shapes differ in a field that changes what the layer computes.
    """
    fields = [field.name for field in dataclasses.fields(DecoderConfig)]
    wrong = [
        f"{field}={getattr(layer, field)!r}, and the target makes it {getattr(wanted, field)!r}"
        for field in fields
        if field not in _WITHOUT_EFFECT and getattr(layer, field) != getattr(wanted, field)
    ]
    if wrong:
        raise ValueError(
            f"{name} has {'; '.join(wrong)}. The file does not hold its shape, which is that of "
            f"the target when it is read: {way_out}"
        )
