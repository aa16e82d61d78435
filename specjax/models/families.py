"""Model families: config files and tensor names of Hugging Face, translated by tables.

A family is an entry of ``FAMILIES``: which keys of its ``config.json`` fill which fields of
``DecoderConfig``, what transformers assumes where a key is missing, which options are not
implemented, and how its tensors are called. Nothing here touches a weight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from .config import DecoderConfig, RopeScaling


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its name in the file; ``{i}`` is the index of the layer.
      parts: the parameters of ``Decoder`` that it holds, stacked along the output axis (the
        first, once transposed). A row whose parameters a config does not have is left out.
      transposed: stored ``[in, out]`` (the ``Conv1D`` of GPT-2).
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one ``model_type`` writes its config and its tensors.

    Attributes:
      architecture: the class in transformers.
      keys: field of ``DecoderConfig`` -> key of ``config.json``.
      defaults: key -> what transformers assumes where a file leaves it out.
      fixed: fields that are the same in the whole family.
      mlp_ratio: intermediate over hidden size where a file leaves the former out.
      only: key -> the values that are implemented; others are refused.
      tensors: every tensor that a member of the family may have.
      prefix: of the tensor names; checkpoints of the bare trunk leave it out.
      harmless: pattern of buffers that some files hold and that no one needs.
    """

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    mlp_ratio: int | None = None
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    tensors: tuple[Tensor, ...]
    prefix: str
    harmless: str


def _affine(name: str, *parts: str, transposed: bool = False) -> tuple[Tensor, Tensor]:
    weights, biases = (tuple(f"{p}.{kind}" for p in parts) for kind in ("weight", "bias"))
    return Tensor(f"{name}.weight", weights, transposed), Tensor(f"{name}.bias", biases)


_LLAMA_TENSORS = (
    Tensor("model.embed_tokens.weight", ("embedding",)),
    *_affine("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.q"),
    *_affine("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.k"),
    *_affine("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.v"),
    *_affine("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o"),
    *_affine("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attention.q_norm"),
    *_affine("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attention.k_norm"),
    *_affine("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
    *_affine("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
    *_affine("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
    *_affine("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
    *_affine("model.norm", "norm"),
    *_affine("lm_head", "lm_head"),
)

_GPT2_TENSORS = (
    Tensor("transformer.wte.weight", ("embedding",)),
    Tensor("transformer.wpe.weight", ("position_embedding",)),
    *_affine("transformer.h.{i}.ln_1", "blocks.{i}.attention_norm"),
    *_affine(
        "transformer.h.{i}.attn.c_attn",
        *(f"blocks.{{i}}.attention.{part}" for part in "qkv"),
        transposed=True,
    ),
    *_affine("transformer.h.{i}.attn.c_proj", "blocks.{i}.attention.o", transposed=True),
    *_affine("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm"),
    *_affine("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", transposed=True),
    *_affine("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", transposed=True),
    *_affine("transformer.ln_f", "norm"),
    *_affine("lm_head", "lm_head"),
)

_LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
    "eos_ids": "eos_token_id",
    "bos_id": "bos_token_id",
}
_LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA_LIKE = dict(
    tensors=_LLAMA_TENSORS, prefix="model.", harmless=r".*rotary_emb\.(inv_freq|(cos|sin)_cached)"
)
_WHOLE_HEADS = {"partial_rotary_factor": (1.0,)}  # every feature of a head is rotated

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        keys=_LLAMA_KEYS
        | {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        defaults=_LLAMA_DEFAULTS,
        only=_WHOLE_HEADS,
        **_LLAMA_LIKE,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        keys=_LLAMA_KEYS,
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 32768},
        fixed={"qkv_bias": True},
        only=_WHOLE_HEADS,
        **_LLAMA_LIKE,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        keys=_LLAMA_KEYS | {"qkv_bias": "attention_bias", "o_bias": "attention_bias"},
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 32768, "head_dim": 128},
        fixed={"qk_norm": True},
        only=_WHOLE_HEADS,
        **_LLAMA_LIKE,
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie_embeddings": "tie_word_embeddings",
            "eos_ids": "eos_token_id",
            "bos_id": "bos_token_id",
        },
        defaults={
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        fixed={
            "norm": "layer",
            "positions": "learned",
            "gated_mlp": False,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
        },
        mlp_ratio=4,
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        tensors=_GPT2_TENSORS,
        prefix="transformer.",
        harmless=r"h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask
    ),
}

_ACTIVATIONS = {  # the first name of each is the one that is written
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
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
}


def family_of(model_type: object) -> Family:
    """The entry of ``model_type``. Raises ValueError naming the known ones."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model_type!r} is not supported; known: {', '.join(FAMILIES)}. "
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
        implemented (sliding windows, quantization, unknown activation or RoPE scaling).
    """
    family = family_of(hf.get("model_type"))
    _refuse_unsupported(hf, family)
    filled = {k: hf[k] if hf.get(k) is not None else v for k, v in family.defaults.items()}
    values = {f: filled.get(key, hf.get(key)) for f, key in family.keys.items()}
    if values["intermediate_size"] is None and family.mlp_ratio and values["hidden_size"]:
        values["intermediate_size"] = family.mlp_ratio * values["hidden_size"]
    wrong = [f"{family.keys[f]}={values[f]!r}" for f in _SIZES if not _is_size(values[f])]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}: sizes must be positive whole numbers")
    if values.get("num_kv_heads") is None:
        values["num_kv_heads"] = values["num_heads"]
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
        values["rope_theta"], values["rope_scaling"] = _rope_from_hf(hf, values["max_positions"])
    return DecoderConfig(model_type=hf["model_type"], **family.fixed, **values)


def config_to_hf(config: DecoderConfig) -> dict[str, object]:
    """The ``config.json`` of ``config``, in the layout that transformers 4 and 5 both read.

    Raises:
      ValueError: the family cannot express a field of ``config``.
    """
    family = family_of(config.model_type)
    hf: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
    }
    for field, key in family.keys.items():
        hf[key] = getattr(config, field)
    activation = family.keys["activation"]
    hf[activation] = next(k for k, v in _ACTIVATIONS.items() if v == config.activation)
    eos = list(config.eos_ids)
    hf["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    if config.positions == "rope":
        hf["rope_theta"] = config.rope_theta
        hf["rope_scaling"] = dict(config.rope_scaling) if config.rope_scaling else None

    again = config_from_hf(hf)
    lost = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(again, f.name)
    ]
    if lost:
        raise ValueError(
            f"a config.json of model_type={config.model_type!r} cannot express "
            f"{', '.join(lost)}: choose the model_type of a family that has it"
        )
    return hf


def tensors_of(config: DecoderConfig, parameters) -> dict[str, Tensor]:
    """The tensors of a checkpoint of ``config``, by full name.

    Args:
      parameters: names of the parameters that the model has, such as ``blocks.0.mlp.up.weight``.
    """
    parameters, found = set(parameters), {}
    for row in family_of(config.model_type).tensors:
        for i in range(config.num_layers) if "{i}" in row.name else (0,):
            parts = tuple(part.format(i=i) for part in row.parts)
            if parameters.issuperset(parts):
                found[row.name.format(i=i)] = Tensor(row.name.format(i=i), parts, row.transposed)
    return found


def is_harmless(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor that the model does not have may be ignored: buffers, a tied head."""
    family = family_of(config.model_type)
    if name == "lm_head.weight":
        return config.tie_embeddings
    return bool(re.fullmatch(family.harmless, name.removeprefix(family.prefix)))


def ids_of(value: object) -> tuple[int, ...]:
    """Token ids as config files hold them: one, a list, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _activation(name: object) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: activation {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _refuse_unsupported(hf: Mapping[str, object], family: Family) -> None:
    if hf.get("quantization_config"):
        method = dict(hf["quantization_config"]).get("quant_method", "unknown")
        raise ValueError(
            f"config.json: quantized checkpoints (quant_method={method!r}) are not supported; "
            "use the unquantized checkpoint"
        )
    for key, accepted in family.only.items():
        value = hf.get(key)
        if value is not None and value not in accepted:
            raise ValueError(
                f"config.json: {key}={value!r} is not supported; accepted: {accepted[0]!r}"
            )
    # As transformers: a window counts only if it is switched on, and then from one layer on
    layers = hf.get("num_hidden_layers") or 0
    first = hf.get("max_window_layers", 28)
    slides = bool(hf.get("use_sliding_window")) and hf.get("sliding_window") is not None
    kinds = set(hf.get("layer_types") or (["sliding_attention"] if first < layers else []))
    if slides and kinds - {"full_attention"}:
        raise ValueError(
            f"config.json: sliding-window attention (sliding_window={hf['sliding_window']}) is "
            "not supported; with use_sliding_window=false the model attends to everything"
        )


def _rope_from_hf(hf: Mapping[str, object], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4)."""
    given = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    theta = given.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0
    legacy = given.pop("type", None)
    kind = given.pop("rope_type", None) or legacy or "default"
    if kind not in _ROPE_NEEDS:
        raise ValueError(
            f"config.json: rope_type={kind!r} is not supported; known: {', '.join(_ROPE_NEEDS)}"
        )
    if given.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError("config.json: partial_rotary_factor below 1 is not supported")
    missing = [key for key in _ROPE_NEEDS[kind] if given.get(key) is None]
    if missing:
        raise ValueError(f"config.json: rope_type={kind!r} lacks {', '.join(missing)}")
    if kind == "default":
        return float(theta), None
    original = "original_max_position_embeddings"
    given[original] = hf.get(original) or given.get(original) or max_positions
    keys = (*_ROPE_NEEDS[kind], *_ROPE_TAKES.get(kind, ()))
    kept = {key: given[key] for key in keys if given.get(key) is not None}
    return float(theta), tuple(sorted({"rope_type": kind, **kept}.items()))
