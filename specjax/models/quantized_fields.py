"""Fields of a ``quantization_config``: what is accepted, and how all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

WAY_OUT = "use the unquantized checkpoint"

# Of each method the fields of ``quantization_config`` that are read, and the fields that say how
# the weights were found, or what another program runs them with, and leave the law as it is. All
# others might change it.
READ = {
    "compressed-tensors": (
        *("config_groups", "format", "kv_cache_scheme", "sparsity_config", "transform_config"),
    ),
    "gptq": (
        *("bits", "checkpoint_format", "desc_act", "dynamic", "format", "group_size"),
        *("is_marlin_format", "pack_dtype"),
    ),
    "awq": ("bits", "format", "group_size", "pack_dtype", "version", "zero_point"),
    "fp8": ("activation_scheme", "fmt", "weight_block_size"),
}
# which weights are floats is seen from the tensors: those have no scales
FLOATS = ("ignore", "ignored_layers", "lm_head", "modules_to_not_convert")
HARMLESS = {
    "compressed-tensors": (
        *("dequantize", "global_compression_ratio", "quantization_status", "run_compressed"),
        "version",  # of the program that wrote the file
    ),
    "gptq": (
        *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent"),
        *(
            "damp_auto_increment",
            "dataset",
            "disable_exllama",
            "exllama_config",
            "max_input_length",
        ),
        *("meta", "model_file_base_name", "model_name_or_path", "model_seqlen"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "mse"),
        *("pad_token_id", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16"),
        *("use_exllama", "sym"),  # zeros are stored in either case
    ),
    "awq": (
        *("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "meta", "modules_to_fuse"),
        *("desc_act", "sym"),  # of AWQ there is one order and one symmetry
    ),
    "fp8": ("dequantize", "scale_fmt"),  # scale_fmt rounds scales of activations
}


def refuse_unknown(config: Mapping, method: str, path: str) -> None:
    """Raises ``ValueError`` for a field that is neither read nor known to be harmless, and set."""
    known = {"quant_method", *READ[method], *HARMLESS[method], *FLOATS}
    for field, value in config.items():
        if field not in known and value not in ({}, []):
            accept(config, method, path, field, None)


def accept(config: Mapping, method: str, path: str, field: str, *accepted) -> None:
    """Raises ``ValueError`` unless ``config[field]`` (None: it has none) is one of ``accepted``."""
    value = config.get(field)
    if value not in accepted:
        known = ", ".join(map(repr, accepted))
        raise ValueError(
            f"config.json: quantized checkpoint (quant_method={method!r}): {path}{field}={value!r} "
            f"is not supported; accepted: {known}; {WAY_OUT}"
        )


def group_size(config: Mapping, method: str, path: str) -> int | None:
    """``group_size`` of a config; None: -1, one group of all inputs.

    Raises:
      ValueError: it is neither a positive integer nor -1.
    """
    size = config.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or not (size > 0 or size == -1):
        accept({"group_size": size}, method, path, "group_size", "a positive integer", -1)
    return None if size == -1 else size
