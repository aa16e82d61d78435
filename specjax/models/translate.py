"""Config files of Hugging Face into ``DecoderConfig`` and back, by the tables of ``families``.

Nothing here touches a weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping

from .._internal.file_keys import file_keys
from .config import DecoderConfig, RopeScaling, is_whole
from .config_json import check_expressed, ids_of
from .families import FAMILIES
from .family import Family, Windows
from .quantized_layouts import layout_of
from .seq2seq import families as encoder_decoders
from .tensors import Tensor

_ACTIVATIONS = {  # the first name of each is the one that is written
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# keys that transformers reads in every family -> the values that are implemented
_EVERYWHERE = {"is_causal": (True,), "per_layer_config": ({},)}
_NULL_MEANS_NONE = ("attn_logit_softcapping", "final_logit_softcapping")  # else: the default
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
_FURTHER_SIZES = (
    *("kv_rank", "nope_dim", "rope_dim", "value_dim"),
    *("num_experts", "experts_per_token", "expert_size"),
)
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_TAKES = {
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
}


def family_of(model_type: object) -> Family:
    """The entry of ``model_type``. Raises ValueError naming the known ones."""
    if model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, *encoder_decoders.FAMILIES))
        raise ValueError(
            f"model_type={model_type!r} is not supported; known: {known}. "
            "A model that is Llama in all but name can be loaded with that model_type in its "
            "config.json"
        )
    return FAMILIES[model_type]


def config_from_hf(hf: Mapping[str, object]) -> DecoderConfig:
    """Translates a ``config.json`` as transformers 4 or 5 writes it.

    Args:
      hf: the parsed file.

    Raises:
      ValueError: unknown ``model_type``, a missing or senseless size, an option that is not
        implemented (quantization, unknown activation or RoPE scaling).
    """
    hf = _text_part(hf)
    family = family_of(hf.get("model_type"))
    _refuse_unsupported(hf, family)
    given = {k: v for k, v in hf.items() if v is not None or k in _NULL_MEANS_NONE}
    given = {key: given[a] for a, key in family.aliases.items() if a in given} | given
    filled = {**family.defaults, **given}
    values = {f: filled.get(key) for f, key in family.keys.items()}
    if "num_key_value_heads" in hf and hf["num_key_value_heads"] is None:
        values["num_kv_heads"] = None  # as many as there are heads, whatever the family's default
    if values["intermediate_size"] is None and family.mlp_ratio and values["hidden_size"]:
        values["intermediate_size"] = family.mlp_ratio * values["hidden_size"]
    sizes = (*_SIZES, *(f for f in _FURTHER_SIZES if f in family.keys))
    wrong = [f"{family.keys[f]}={values[f]!r}" for f in sizes if not _is_size(values[f])]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}: sizes must be positive whole numbers")
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values["num_heads"]
    if values.get("kv_rank"):
        values["head_dim"] = values["kv_rank"] + values["rope_dim"]
    if values.get("head_dim") is None:
        values["head_dim"], rest = divmod(values["hidden_size"], values["num_heads"])
        if rest:
            raise ValueError(
                f"config.json: {values['num_heads']} heads do not divide a hidden size of "
                f"{values['hidden_size']}, and no head_dim is given"
            )
    values["activation"] = _activation(values["activation"])
    values["eos_ids"] = ids_of(values["eos_ids"])
    if family.fixed.get("positions", "rope") == "rope":
        values |= _rope_from_hf(filled, family)
    values |= windows_from_hf(hf, family.windows, values["num_layers"])
    if isinstance(values.get("plain_layers"), list):
        values["plain_layers"] = tuple(values["plain_layers"])
    keys = {key: name for name, key in family.keys.items()} | {"sliding_window": "window"}
    with file_keys(keys):
        config = DecoderConfig(model_type=hf["model_type"], **values | family.fixed)
    stretched = len(dict(config.rope_scaling or ()).get("short_factor", ()))
    if stretched and stretched != config.rotary_dim // 2:
        raise ValueError(
            f"config.json: short_factor has {stretched} numbers, one for each of "
            f"{config.rotary_dim // 2} frequencies is needed"
        )
    return config


def config_to_hf(config: DecoderConfig) -> dict[str, object]:
    """The ``config.json`` of ``config``, in the layout that transformers 4 and 5 both read.

    Raises:
      ValueError: the family cannot express a field of ``config``.
    """
    family = family_of(config.model_type)
    hf: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "pad_token_id": None,  # Phi-3's default is 32000, beyond smaller vocabularies
    }
    for field, key in family.keys.items():
        hf[key] = getattr(config, field)
    for key, value in family.writes.items():
        hf[key] = value(config) if callable(value) else value
    activation = family.keys["activation"]
    names = (family.defaults.get(activation, "silu"), *_ACTIVATIONS)  # its usual one, if it may be
    hf[activation] = next(k for k in names if _ACTIVATIONS[k] == config.activation)
    eos = list(config.eos_ids)
    hf["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    if config.positions == "rope":
        for field, key in family.rope_keys.items():
            hf[key] = getattr(config, field)
        hf |= _scaling_to_hf(config.rope_scaling)
    if family.windows is not None:
        hf |= _windows_to_hf(config, family.windows)

    check_expressed(config, config_from_hf(hf))
    return hf


def tensors_of(config: DecoderConfig, parameters, packed: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint of ``config``, by full name.

    Args:
      parameters: names of the parameters that the model has, such as ``blocks.0.mlp.up.weight``.
      packed: those of the other layout, which only some files have; see ``Family``.
    """
    family, parameters, found = family_of(config.model_type), set(parameters), {}
    for row in family.packed if packed else family.tensors:
        for i in range(config.num_layers) if "{i}" in row.name else (0,):
            parts = tuple(part.format(i=i) for part in row.parts)
            if not parameters.issuperset(parts):
                continue
            blocks = config.num_heads if row.by_heads else 1
            for e in range(config.num_experts) if "{e}" in row.name else (None,):
                name = row.name.format(i=i, e=e)
                found[name] = dataclasses.replace(
                    row, name=name, parts=parts, blocks=blocks, expert=e
                )
    return found


def is_harmless(config: DecoderConfig, name: str, names: Container[str]) -> bool:
    """Whether a tensor that the model does not have may be ignored, of a file with those ``names``:
    buffers, a tied head, and what ``specjax.load_drafter`` reads: modules for multi-token
    prediction, Medusa heads."""
    if name.startswith(("medusa_head.", "mtp.", "model.mtp_layers.")):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= config.num_layers and f"{layer[0]}eh_proj.weight" in names:
        return True
    family = family_of(config.model_type)
    if any(row.name == name and row.parts == ("lm_head.weight",) for row in family.tensors):
        return config.tie_embeddings
    return bool(re.fullmatch(family.harmless, name.removeprefix(family.prefix)))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _text_part(hf: Mapping[str, object]) -> Mapping[str, object]:
    """The config of the text model within one that also sees images (the larger Gemma 3)."""
    inner = hf.get("text_config")
    if hf.get("model_type") != "gemma3" or not isinstance(inner, Mapping):
        return hf
    outer = ("eos_token_id", "bos_token_id", "quantization_config", "tie_word_embeddings")
    kept = {key: hf[key] for key in outer if hf.get(key) is not None}
    return {**inner, **kept, "model_type": "gemma3_text"}


def _refuse_unsupported(hf: Mapping[str, object], family: Family) -> None:
    layout_of(hf)
    for key, accepted in {**_EVERYWHERE, **family.only}.items():
        value = hf.get(key)
        if value is not None and value not in accepted:
            raise ValueError(
                f"config.json: {key}={value!r} is not supported; accepted: {accepted[0]!r}"
            )
    for key, other in family.equal.items():
        if hf.get(key) is not None and hf[key] != hf.get(other):
            raise ValueError(
                f"config.json: {key}={hf[key]!r} with {other}={hf.get(other)!r} is not supported; "
                "they must be equal"
            )


def windows_from_hf(
    hf: Mapping[str, object], windows: Windows | None, num_layers: int
) -> dict[str, object]:
    """``window`` and ``local_layers``, as transformers fills them."""
    none = {"window": None, "local_layers": None}
    if windows is None:
        return none
    if windows.switch:
        on = hf.get(windows.switch)
        if on not in (None, True, False):
            raise ValueError(f"config.json: {windows.switch}={on!r} must be true or false")
        if not on:
            return none
    window, kinds = hf.get("sliding_window", windows.default), hf.get("layer_types")
    if windows.typed and kinds:
        known = {"sliding_attention": True, "full_attention": False}
        whole = isinstance(kinds, list | tuple) and len(kinds) == num_layers
        if not whole or not all(kind in [*known] for kind in kinds):
            raise ValueError(
                f"config.json: layer_types={kinds!r} is not supported; give each of {num_layers} "
                f"layers one of {', '.join(known)}"
            )
        local = tuple(known[kind] for kind in kinds)
    elif windows.switch:
        first = hf.get("max_window_layers", 28)
        if not is_whole(first):
            raise ValueError(f"config.json: max_window_layers={first!r} must be a whole number")
        local = tuple(i >= first for i in range(num_layers))
    else:
        every = windows.every and (hf.get("sliding_window_pattern") or windows.every)
        if every is not None and not _is_size(every):
            raise ValueError(
                f"config.json: sliding_window_pattern={every!r} must be a positive whole number"
            )
        local = tuple(every is None or (i + 1) % every > 0 for i in range(num_layers))
    if not any(local) or window is None and windows.every is None:
        return none
    if window is None:
        raise ValueError("config.json: sliding_window=None, but layers of it are local: give both")
    return {"window": window, "local_layers": None if all(local) else local}


def _windows_to_hf(config: DecoderConfig, windows: Windows) -> dict[str, object]:
    hf: dict[str, object] = {}
    if config.window or windows.every is None:  # a Gemma needs one even where no layer uses it
        hf["sliding_window"] = config.window
    if windows.switch:
        hf[windows.switch] = config.window is not None
    # all layers of a Mistral are alike: with layer_types it is a Ministral to transformers
    alike = config.local_layers is None and windows.switch is None and windows.every is None
    if windows.typed and not alike:
        local = map(config.is_local, range(config.num_layers))
        hf["layer_types"] = ["sliding_attention" if x else "full_attention" for x in local]
    return hf


def _rope_from_hf(hf: Mapping[str, object], family: Family) -> dict[str, object]:
    """Fields of the rotary embedding, from ``rope_parameters`` (transformers 5) or
    ``rope_scaling`` (4), and from keys beside them. ``hf`` has the family's defaults."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key) or {}, Mapping):
            raise ValueError(f"config.json: {key}={hf[key]!r} is no object of settings")
    given = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    local: dict[str, object] = {}
    if {"full_attention", "sliding_attention"} & given.keys():  # one for each kind of layer
        local = dict(given.get("sliding_attention") or {})
        given = dict(given.get("full_attention") or {})
    inside = {
        "rope_theta": given.pop("rope_theta", None),
        "rotary_fraction": given.pop("partial_rotary_factor", None),
        "local_rope_theta": local.get("rope_theta"),
    }
    if "rotary_fraction" not in family.rope_keys and inside["rotary_fraction"] not in (None, 1.0):
        raise ValueError("config.json: partial_rotary_factor below 1 is not supported")
    theta = inside["rope_theta"] or hf.get(family.rope_keys.get("rope_theta"))
    if "local_rope_theta" not in family.rope_keys and local.get("rope_theta") not in (None, theta):
        raise ValueError(
            f"config.json: rope_theta={local['rope_theta']!r} of sliding_attention is another than "
            f"{theta!r} of full_attention, which is not supported: the layers of this family have "
            "one for all"
        )
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json: rope_type={local['rope_type']!r} of local layers is not supported"
        )
    usual = {"rope_theta": 10_000.0, "rotary_fraction": 1.0}
    fields: dict[str, object] = {
        field: float(inside[field] or hf.get(key) or usual[field])
        for field, key in family.rope_keys.items()
    }
    legacy = given.pop("type", None)
    kind = given.pop("rope_type", None) or legacy or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in family.rope_types:
        known = ", ".join(family.rope_types)
        raise ValueError(f"config.json: rope_type={kind!r} is not supported; known: {known}")
    if local and kind != "default" and "local_rope_theta" not in family.rope_keys:
        raise ValueError(
            f"config.json: rope_type={kind!r} of full_attention, and none of sliding_attention, is "
            "not supported: the layers of this family have one for all"
        )
    missing = [key for key in _ROPE_NEEDS[kind] if given.get(key) is None]
    if missing:
        raise ValueError(f"config.json: rope_type={kind!r} lacks {', '.join(missing)}")
    return fields | {"rope_scaling": _scaling_from_hf(kind, given, hf, family)}


def _scaling_from_hf(kind: str, given, hf, family: Family) -> RopeScaling | None:
    if kind == "default":
        return None
    original = "original_max_position_embeddings"
    given[original] = hf.get(original) or given.get(original) or hf[family.keys["max_positions"]]
    keys = (*_ROPE_NEEDS[kind], *_ROPE_TAKES.get(kind, ()))
    kept = {key: given[key] for key in keys if given.get(key) is not None}
    kept = {key: tuple(v) if isinstance(v, list) else v for key, v in kept.items()}
    for key, value in kept.items():
        every = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(number, int | float) for number in every):
            raise ValueError(f"config.json: {key}={value!r} of rope_type={kind!r} is no number")
    return tuple(sorted({"rope_type": kind, **kept}.items()))


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, object]:
    if scaling is None:
        return {"rope_scaling": None}
    found = {key: list(v) if isinstance(v, tuple) else v for key, v in scaling}
    if found["rope_type"] != "longrope":
        return {"rope_scaling": found}
    # transformers 4 wants "type" and nothing but the factors beside it, and this key outside
    original = "original_max_position_embeddings"
    return {
        original: found.pop(original),
        "rope_scaling": {"type": found.pop("rope_type"), **found},
    }
