"""GGUF files of a Llama's weights, for llama.cpp.

========  ===================================================================================
float32   F32
bfloat16  BF16
int8      Q8_0: groups of 32 with a float16 scale, by the format's own rounding
int4      Q4_0 of the integers that specjax computes with, their scales rounded to float16; the
          embedding and the LM head Q8_0, as specjax holds them in eight bits
========  ===================================================================================

A matrix whose rows are no multiple of 32 stays BF16 at eight and four bits. There is no tokenizer:
the suite works with token ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.kernels.quantized import Quantized
from specjax.models import LM

from .weights import check_llama, integers, tensors

GROUP = 32


def write(lm: LM, precision: str, file: Path) -> None:
    """Writes ``file``.

    Raises:
      UnsupportedError: the model is no plain Llama.
    """
    import gguf

    config = lm.config
    check_llama(config)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    four = tensors(lm, "int4") if precision == "int4" else {}
    for name, weight in tensors(lm).items():
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        if _is_in_four_bits(four.get(name)):
            weight = four[name]
        rows = _rows_of_rope(name, config)
        if rows is not None:
            weight = weight[rows]
        data, kind = _stored(weight, precision, gguf)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rows_of_rope(name: str, config) -> np.ndarray | None:
    """The order of rows in which the two features of a rotated pair are neighbours."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part not in heads:
        return None
    count = heads[part] * config.head_dim
    return np.arange(count).reshape(heads[part], 2, -1).swapaxes(1, 2).reshape(-1)


def _is_in_four_bits(weight) -> bool:
    return isinstance(weight, Quantized) and weight.bits == 4


def _stored(weight, precision: str, gguf):
    """The bytes of a tensor, and their kind."""
    kinds = gguf.GGMLQuantizationType
    if isinstance(weight, Quantized):
        return four_bits(weight), kinds.Q4_0
    if weight.ndim == 1 or precision == "float32":
        return weight, kinds.F32
    kind = kinds.BF16 if precision == "bfloat16" or weight.shape[1] % GROUP else kinds.Q8_0
    return gguf.quants.quantize(weight, kind), kind


def four_bits(weight: Quantized) -> np.ndarray:
    """Blocks of Q4_0, uint8 ``[out, in / 32 * 18]``: a float16 scale, and 16 bytes of which byte
    ``j`` holds input ``j`` in its low and ``j + 16`` in its high bits."""
    values, scale = integers(weight)
    groups = (values + 8).astype(np.uint8).reshape(*scale.shape, 2, GROUP // 2)
    packed = groups[..., 0, :] | groups[..., 1, :] << 4
    heads = scale.astype(np.float16)[..., None].view(np.uint8)
    return np.concatenate([heads, packed], axis=-1).reshape(len(values), -1)
