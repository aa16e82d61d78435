"""The names of the tensors in the checkpoints of each family, and which parameters they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its name in the file; ``{i}`` is the index of the layer, ``{e}`` that of an expert.
      parts: the parameters of ``Decoder`` that it holds, stacked along the output axis (the
        first, once transposed). A row whose parameters a config does not have is left out.
      transposed: stored ``[in, out]`` (the ``Conv1D`` of GPT-2).
      by_heads: the parts are stacked head by head (the ``query_key_value`` of GPT-NeoX), not whole.
      blocks: into how many pieces each part is cut before they are stacked in turn; in the tables
        1, and once ``by_heads`` has met a config the number of its heads.
      axis: along which the parts are stacked, 1 in stacks of experts.
      expert: it is this entry of its only part, a stack; None: it is the whole.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    by_heads: bool = False
    blocks: int = 1
    axis: int = 0
    expert: int | None = None


def _affine(
    name: str, *parts: str, transposed: bool = False, by_heads: bool = False
) -> tuple[Tensor, Tensor]:
    weights, biases = (tuple(f"{p}.{kind}" for p in parts) for kind in ("weight", "bias"))
    return (
        Tensor(f"{name}.weight", weights, transposed, by_heads),
        Tensor(f"{name}.bias", biases, by_heads=by_heads),
    )


_QKV = tuple(f"blocks.{{i}}.attention.{part}" for part in "qkv")
_LLAMA_OUTER = (
    Tensor("model.embed_tokens.weight", ("embedding",)),
    *_affine("model.norm", "norm"),
    *_affine("lm_head", "lm_head"),
)
_LLAMA_ATTENTION = (
    *_affine("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.q"),
    *_affine("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.k"),
    *_affine("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.v"),
    *_affine("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o"),
    *_affine("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attention.q_norm"),
    *_affine("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attention.k_norm"),
)
_LLAMA_MLP = (
    *_affine("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
    *_affine("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
    *_affine("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
)
_LLAMA_MLP_NORM = _affine("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm")
LLAMA_TENSORS = (*_LLAMA_OUTER, *_LLAMA_ATTENTION, *_LLAMA_MLP_NORM, *_LLAMA_MLP)

ROUTER = Tensor("model.layers.{i}.mlp.gate.weight", ("blocks.{i}.mlp.router.weight",))
_EXPERTS = tuple(
    Tensor(
        f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight",
        (f"blocks.{{i}}.mlp.experts.{part}",),
    )
    for part in ("gate", "up", "down")
)
PACKED_EXPERTS = (
    Tensor(
        "model.layers.{i}.mlp.experts.gate_up_proj",
        ("blocks.{i}.mlp.experts.gate", "blocks.{i}.mlp.experts.up"),
        axis=1,
    ),
    Tensor("model.layers.{i}.mlp.experts.down_proj", ("blocks.{i}.mlp.experts.down",)),
)
QWEN3_MOE_TENSORS = (*LLAMA_TENSORS, ROUTER, *_EXPERTS)
MIXTRAL_TENSORS = (
    *LLAMA_TENSORS,
    Tensor("model.layers.{i}.block_sparse_moe.gate.weight", ROUTER.parts),
    *(
        Tensor(f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{name}.weight", row.parts)
        for name, row in zip(("w1", "w3", "w2"), _EXPERTS, strict=True)
    ),
)
DEEPSEEK_TENSORS = (
    *_LLAMA_OUTER,
    *_affine("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.q"),
    *_affine("model.layers.{i}.self_attn.q_a_proj", "blocks.{i}.attention.q_a"),
    *_affine("model.layers.{i}.self_attn.q_a_layernorm", "blocks.{i}.attention.q_a_norm"),
    *_affine("model.layers.{i}.self_attn.q_b_proj", "blocks.{i}.attention.q_b"),
    *_affine("model.layers.{i}.self_attn.kv_a_proj_with_mqa", "blocks.{i}.attention.kv_a"),
    *_affine("model.layers.{i}.self_attn.kv_a_layernorm", "blocks.{i}.attention.kv_a_norm"),
    *_affine("model.layers.{i}.self_attn.kv_b_proj", "blocks.{i}.attention.kv_b"),
    *_affine("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o"),
    *_LLAMA_MLP_NORM,
    *_LLAMA_MLP,
    ROUTER,
    Tensor("model.layers.{i}.mlp.gate.e_score_correction_bias", ("blocks.{i}.mlp.router.bias",)),
    *_EXPERTS,
    *_affine("model.layers.{i}.mlp.shared_experts.gate_proj", "blocks.{i}.mlp.shared.gate"),
    *_affine("model.layers.{i}.mlp.shared_experts.up_proj", "blocks.{i}.mlp.shared.up"),
    *_affine("model.layers.{i}.mlp.shared_experts.down_proj", "blocks.{i}.mlp.shared.down"),
)

GEMMA_TENSORS = (
    *_LLAMA_OUTER,
    *_LLAMA_ATTENTION,
    *_affine("model.layers.{i}.post_attention_layernorm", "blocks.{i}.attention_post_norm"),
    *_affine("model.layers.{i}.pre_feedforward_layernorm", "blocks.{i}.mlp_norm"),
    *_LLAMA_MLP,
    *_affine("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.mlp_post_norm"),
)

PHI3_TENSORS = (
    *_LLAMA_OUTER,
    *_affine("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("model.layers.{i}.self_attn.qkv_proj", *_QKV),
    *_affine("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o"),
    *_LLAMA_MLP_NORM,
    *_affine("model.layers.{i}.mlp.gate_up_proj", "blocks.{i}.mlp.gate", "blocks.{i}.mlp.up"),
    *_affine("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
)

OPT_TENSORS = (
    Tensor("model.decoder.embed_tokens.weight", ("embedding",)),
    Tensor("model.decoder.embed_positions.weight", ("position_embedding",)),
    *_affine("model.decoder.layers.{i}.self_attn_layer_norm", "blocks.{i}.attention_norm"),
    *_affine("model.decoder.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.q"),
    *_affine("model.decoder.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.k"),
    *_affine("model.decoder.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.v"),
    *_affine("model.decoder.layers.{i}.self_attn.out_proj", "blocks.{i}.attention.o"),
    *_affine("model.decoder.layers.{i}.final_layer_norm", "blocks.{i}.mlp_norm"),
    *_affine("model.decoder.layers.{i}.fc1", "blocks.{i}.mlp.up"),
    *_affine("model.decoder.layers.{i}.fc2", "blocks.{i}.mlp.down"),
    *_affine("model.decoder.final_layer_norm", "norm"),
    *_affine("lm_head", "lm_head"),
)

NEOX_TENSORS = (
    Tensor("gpt_neox.embed_in.weight", ("embedding",)),
    *_affine("gpt_neox.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("gpt_neox.layers.{i}.attention.query_key_value", *_QKV, by_heads=True),
    *_affine("gpt_neox.layers.{i}.attention.dense", "blocks.{i}.attention.o"),
    *_affine("gpt_neox.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
    *_affine("gpt_neox.layers.{i}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up"),
    *_affine("gpt_neox.layers.{i}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down"),
    *_affine("gpt_neox.final_layer_norm", "norm"),
    *_affine("embed_out", "lm_head"),
)

GPT2_TENSORS = (
    Tensor("transformer.wte.weight", ("embedding",)),
    Tensor("transformer.wpe.weight", ("position_embedding",)),
    *_affine("transformer.h.{i}.ln_1", "blocks.{i}.attention_norm"),
    *_affine("transformer.h.{i}.attn.c_attn", *_QKV, transposed=True),
    *_affine("transformer.h.{i}.attn.c_proj", "blocks.{i}.attention.o", transposed=True),
    *_affine("transformer.h.{i}.ln_2", "blocks.{i}.mlp_norm"),
    *_affine("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", transposed=True),
    *_affine("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", transposed=True),
    *_affine("transformer.ln_f", "norm"),
    *_affine("lm_head", "lm_head"),
)


def gathered(tensor: Tensor, params: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
    """A tensor as files hold it, of the parameters by name."""
    if tensor.expert is not None:
        return np.ascontiguousarray(params[tensor.parts[0]][tensor.expert], dtype=dtype)
    parts = [np.asarray(params[part]) for part in tensor.parts]
    pieces = [p.reshape(tensor.blocks, -1, *p.shape[1:]) for p in parts]
    array = np.concatenate(pieces, axis=1).reshape(-1, *parts[0].shape[1:])
    return np.ascontiguousarray(array.T if tensor.transposed else array, dtype=dtype)


def shape_of(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a tensor in the file: its parts stacked, perhaps transposed, or one expert."""
    parts = [shapes[part] for part in tensor.parts]
    if tensor.expert is not None:
        return parts[0][1:]
    shape = list(parts[0])
    shape[tensor.axis] = sum(part[tensor.axis] for part in parts)
    return tuple(shape[::-1] if tensor.transposed else shape)
