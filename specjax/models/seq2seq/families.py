"""Encoder–decoder families: config files and tensor names of Hugging Face, translated by tables.

This module is the counterpart of ``families.py`` and ``translate.py``, function for function, for
``EncoderDecoderConfig``. In the names of tensors, ``{e}`` is the index of a layer of the encoder
and ``{i}`` that of a layer of the decoder.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator, Mapping

from ..._internal.file_keys import file_keys
from ..config_json import check_expressed, ids_of
from ..tensors import Tensor
from .config import EncoderDecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqFamily:
    """The config keys and tensor names of one ``model_type``; the fields are ``Family``'s."""

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, object]
    fixed: Mapping[str, object]
    only: Mapping[str, tuple]
    tensors: tuple[Tensor, ...]
    prefix: str
    harmless: str
    inside: str = ""


def _plain(*pairs: tuple[str, str]) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{name}.weight", (f"{part}.weight",)) for name, part in pairs)


def _affine(*pairs: tuple[str, str]) -> tuple[Tensor, ...]:
    biases = (Tensor(f"{name}.bias", (f"{part}.bias",)) for name, part in pairs)
    return (*_plain(*pairs), *biases)


def _t5_stack(theirs: str, ours: str, layer: str) -> Iterator[Tensor]:
    """The tensors of one half of a T5; the decoder has one more sublayer."""
    decodes = theirs == "decoder"
    block, here = f"{theirs}.block.{layer}.layer", f"{ours}blocks.{layer}"
    last = 2 if decodes else 1
    yield from _plain((f"{theirs}.final_layer_norm", f"{ours}norm"))
    yield Tensor(
        f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        (f"{ours}relative_bias",),
    )
    yield from _plain((f"{block}.0.layer_norm", f"{here}.attention_norm"))
    yield from _plain((f"{block}.{last}.layer_norm", f"{here}.mlp_norm"))
    for part in "qkvo":
        yield from _plain((f"{block}.0.SelfAttention.{part}", f"{here}.attention.{part}"))
    if decodes:
        yield from _plain((f"{block}.1.layer_norm", f"{here}.cross_norm"))
        for part in "qkvo":
            yield from _plain((f"{block}.1.EncDecAttention.{part}", f"{here}.cross.{part}"))
    dense = f"{block}.{last}.DenseReluDense"
    # a gated layer has wi_0 and wi_1, another one wi: ``tensors_of`` keeps those of the config
    yield from _plain((f"{dense}.wi", f"{here}.mlp.up"), (f"{dense}.wi_0", f"{here}.mlp.gate"))
    yield from _plain((f"{dense}.wi_1", f"{here}.mlp.up"), (f"{dense}.wo", f"{here}.mlp.down"))


def _whisper_stack(theirs: str, ours: str, layer: str) -> Iterator[Tensor]:
    """The tensors of one half of a Whisper."""
    block, here = f"{theirs}.layers.{layer}", f"{ours}blocks.{layer}"
    yield Tensor(f"{theirs}.embed_positions.weight", (f"{ours}position_embedding",))
    yield from _affine((f"{theirs}.layer_norm", f"{ours}norm"))
    layers = [("self_attn", "attention")]
    if theirs.endswith("decoder"):
        layers.append(("encoder_attn", "cross"))
    for name, part in layers:
        yield from _affine((f"{block}.{name}_layer_norm", f"{here}.{part}_norm"))
        for letter, long in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
            yield from _affine((f"{block}.{name}.{long}", f"{here}.{part}.{letter}"))
    yield from _affine((f"{block}.final_layer_norm", f"{here}.mlp_norm"))
    yield from _affine((f"{block}.fc1", f"{here}.mlp.up"), (f"{block}.fc2", f"{here}.mlp.down"))


FAMILIES: dict[str, Seq2SeqFamily] = {
    "t5": Seq2SeqFamily(
        architecture="T5ForConditionalGeneration",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "intermediate_size": "d_ff",
            "num_encoder_layers": "num_layers",
            "num_layers": "num_decoder_layers",
            "num_heads": "num_heads",
            "head_dim": "d_kv",
            "norm_eps": "layer_norm_epsilon",
            "num_buckets": "relative_attention_num_buckets",
            "max_distance": "relative_attention_max_distance",
            "start_id": "decoder_start_token_id",
            "eos_ids": "eos_token_id",
        },
        defaults={
            "layer_norm_epsilon": 1e-6,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "eos_token_id": 1,
        },
        fixed={},
        only={},
        tensors=(
            Tensor("shared.weight", ("embedding",)),
            *_t5_stack("encoder", "encoder.", "{e}"),
            *_t5_stack("decoder", "", "{i}"),
            *_plain(("lm_head", "lm_head")),
        ),
        prefix="",
        harmless=r"(en|de)coder\.embed_tokens\.weight"  # the shared one, and one that is not used
        r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    "whisper": Seq2SeqFamily(
        architecture="WhisperForConditionalGeneration",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "d_model",
            "intermediate_size": "decoder_ffn_dim",
            "num_encoder_layers": "encoder_layers",
            "num_layers": "decoder_layers",
            "num_heads": "decoder_attention_heads",
            "num_features": "num_mel_bins",
            "max_source": "max_source_positions",
            "max_positions": "max_target_positions",
            "activation": "activation_function",
            "start_id": "decoder_start_token_id",
            "eos_ids": "eos_token_id",
            "bos_id": "bos_token_id",
        },
        defaults={
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "activation_function": "gelu",
        },
        fixed={
            "reads": "features",
            "norm": "layer",
            "norm_eps": 1e-5,
            "mlp_bias": True,
            "attention_bias": True,
            "scale_attention": True,
            "num_buckets": 0,
        },
        only={"scale_embedding": (False,), "tie_word_embeddings": (True,)},
        tensors=(
            Tensor("model.decoder.embed_tokens.weight", ("embedding",)),
            *_affine(("model.encoder.conv1", "encoder.conv1")),
            *_affine(("model.encoder.conv2", "encoder.conv2")),
            *_whisper_stack("model.encoder", "encoder.", "{e}"),
            *_whisper_stack("model.decoder", "", "{i}"),
        ),
        prefix="model.",
        harmless=r"proj_out\.weight",  # the embedding
    ),
}

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
_T5_LAYERS = {  # feed_forward_proj -> (activation, gated)
    "relu": ("relu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}


def family_of(model_type: object) -> Seq2SeqFamily:
    """The entry of ``model_type``."""
    return FAMILIES[model_type]


def config_from_hf(
    hf: Mapping[str, object], generation: Mapping[str, object] | None = None
) -> EncoderDecoderConfig:
    """Translates a ``config.json``; keys of ``generation_config.json`` have precedence.

    Raises:
      ValueError: a size is missing or not valid, or an option is not implemented.
    """
    family = family_of(hf.get("model_type"))
    if hf.get("quantization_config"):
        raise ValueError(
            "config.json: quantized checkpoints are not supported; use the unquantized checkpoint"
        )
    for key, accepted in family.only.items():
        if hf.get(key) is not None and hf[key] not in accepted:
            raise ValueError(
                f"config.json: {key}={hf[key]!r} is not supported; accepted: {accepted[0]!r}"
            )
    said = dict(family.defaults)
    for source in (hf, generation or {}):
        said |= {key: value for key, value in source.items() if value is not None}
    values = {field: said.get(key) for field, key in family.keys.items()}
    read = _t5_values if hf["model_type"] == "t5" else _whisper_values
    values |= read(said, values)
    sizes = {f: k for f, k in family.keys.items() if f.startswith(("num_", "max_"))}
    sizes |= {f: family.keys[f] for f in ("vocab_size", "hidden_size", "intermediate_size")}
    wrong = [f"{key}={values[f]!r}" for f, key in sizes.items() if not _is_size(values[f])]
    if wrong or not _is_size(values["head_dim"]):
        raise ValueError(
            f"config.json: {', '.join(wrong) or 'd_kv'}: sizes must be positive whole numbers"
        )
    values["eos_ids"] = ids_of(values["eos_ids"])
    with file_keys({key: name for name, key in family.keys.items()}):
        return EncoderDecoderConfig(model_type=hf["model_type"], **family.fixed, **values)


def _t5_values(said: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    kind = said.get("feed_forward_proj", "relu")
    if kind not in _T5_LAYERS:
        raise ValueError(
            f"config.json: feed_forward_proj={kind!r} is not supported; known: "
            f"{', '.join(_T5_LAYERS)}"
        )
    activation, gated = _T5_LAYERS[kind]
    # version 1.0 ties its embeddings and scales its logits, 1.1 does neither; transformers 5
    # writes tie_word_embeddings=true for both
    first = said.get("tie_word_embeddings") is not False
    first = first and said.get("scale_decoder_outputs") is not False
    start = values["start_id"]
    start = said.get("pad_token_id", 0) if start is None else start
    return dict(
        activation=activation,
        gated_mlp=gated,
        tie_embeddings=first,
        scale_logits=first,
        num_layers=values["num_layers"] or values["num_encoder_layers"],
        start_id=start,
        start_ids=(start,),
    )


def _whisper_values(said: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    activation = values["activation"]
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"config.json: activation_function={activation!r} is not supported; known: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    for one, other in (
        ("encoder_ffn_dim", "decoder_ffn_dim"),
        ("encoder_attention_heads", "decoder_attention_heads"),
    ):
        if said.get(one) is not None and said[one] != said.get(other):
            raise ValueError(
                f"config.json: {one}={said[one]} differs from {other}={said.get(other)}, which is "
                "not supported"
            )
    hidden, heads = values["hidden_size"], values["num_heads"]
    whole = _is_size(hidden) and _is_size(heads) and hidden % heads == 0
    if _is_size(hidden) and _is_size(heads) and not whole:
        raise ValueError(f"config.json: {heads} heads do not divide d_model={hidden}")
    return dict(
        activation=_ACTIVATIONS[activation],
        head_dim=hidden // heads if whole else 1,
        start_ids=_whisper_prompt(said),
        suppress_ids=tuple(i for i in ids_of(said.get("suppress_tokens")) if i >= 0),
        begin_suppress_ids=ids_of(said.get("begin_suppress_tokens")),
    )


def _whisper_prompt(said: Mapping[str, object]) -> tuple[int, ...]:
    """The decoder's default prompt as transformers makes it; empty if a language must be chosen."""
    ids = [said.get("decoder_start_token_id")]
    languages, tasks = said.get("lang_to_id") or {}, said.get("task_to_id") or {}
    language, task = said.get("language"), said.get("task")
    if language is None and task is None:
        forced = sorted(said.get("forced_decoder_ids") or ())
        ids += [token for place, token in forced]
    elif language is not None:
        ids += [languages.get(f"<|{str(language).strip('<|>')}|>"), tasks.get(task or "transcribe")]
    last = said.get("no_timestamps_token_id")
    if last is not None and ids[-1] != last:
        ids.append(last)
    unknown = None in ids or (languages and not set(ids) & set(languages.values()))
    return () if unknown else tuple(ids)


def config_to_hf(config: EncoderDecoderConfig) -> dict[str, object]:
    """The ``config.json`` of ``config``. Raises ValueError if the family cannot express it."""
    family = family_of(config.model_type)
    hf: dict[str, object] = {"architectures": [family.architecture], "is_encoder_decoder": True}
    hf["model_type"] = config.model_type
    for field, key in family.keys.items():
        hf[key] = getattr(config, field)
    eos = list(config.eos_ids)
    hf["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    hf["tie_word_embeddings"] = config.tie_embeddings
    if config.model_type == "t5":
        layers = {v: k for k, v in _T5_LAYERS.items()}
        hf["feed_forward_proj"] = layers.get((config.activation, config.gated_mlp))
        hf["pad_token_id"] = config.start_id
    else:
        hf["activation_function"] = {v: k for k, v in _ACTIVATIONS.items()}[config.activation]
        hf["encoder_ffn_dim"] = config.intermediate_size
        hf["encoder_attention_heads"] = config.num_heads
        hf["suppress_tokens"] = list(config.suppress_ids) or None
        hf["begin_suppress_tokens"] = list(config.begin_suppress_ids) or None
        hf["forced_decoder_ids"] = [list(x) for x in enumerate(config.start_ids)][1:] or None
        hf["pad_token_id"] = eos[0] if eos else None
    check_expressed(config, config_from_hf(hf))
    return hf


def tensors_of(config: EncoderDecoderConfig, parameters, packed: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint of ``config``, by full name.

    Args:
      parameters: names of the parameters that the model has.
      packed: whether to return the tensors that hold several parameters; there are none.
    """
    if packed:
        return {}
    parameters, found = set(parameters), {}
    single = r"\.wi\.weight" if config.gated_mlp else r"\.wi_[01]\.weight"
    for row in family_of(config.model_type).tensors:
        if re.search(single, row.name):
            continue
        layers = config.num_encoder_layers if "{e}" in row.name else config.num_layers
        for i in range(layers) if re.search(r"\{[ei]\}", row.name) else (0,):
            name, part = row.name.format(i=i, e=i), row.parts[0].format(i=i, e=i)
            if part in parameters:
                found[name] = Tensor(name, (part,))
    return found


def is_harmless(config: EncoderDecoderConfig, name: str, names: Container[str]) -> bool:
    """Whether a tensor that the model does not have may be ignored, as a copy of a tied one."""
    if name == "lm_head.weight":
        return config.tie_embeddings
    return bool(re.fullmatch(family_of(config.model_type).harmless, name))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
