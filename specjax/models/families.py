"""Model families as tables: config files and tensor names of Hugging Face.

A family is an entry of ``FAMILIES``: which keys of its ``config.json`` fill which fields of
``DecoderConfig``, what transformers assumes where a key is missing, which options are not
implemented, and how its tensors are called. ``translate`` reads the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """Which layers of a family attend to a sliding window (the key ``sliding_window``).

    Attributes:
      default: the window where the key is missing; where it is null there is none.
      every: each ``every``-th layer is global, the others are local; None: all are local.
      switch: key without whose truth there is no window; it then begins at the layer
        ``max_window_layers``.
      typed: ``layer_types`` says it layer by layer, if it is there.
    """

    default: int | None = None
    every: int | None = None
    switch: str | None = None
    typed: bool = False


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
      aliases: key -> the one that it stands for, where that is missing.
      writes: what files need besides: key -> its value, or a function of the config.
      equal: key -> another one that must have the same value; else it is refused.
      rope_keys: field -> key of the rotary embedding's numbers, as transformers 4 writes them.
      rope_types: scalings that the family has.
      windows: of its layers; None: it has none.
      tensors: every tensor that a member of the family may have.
      packed: other tensors of the same parameters, which are read where a file has them (experts
        as ``save_pretrained`` of transformers 5 writes them with ``save_original_format=False``).
      further_layers: files may hold the layer behind the last one (multi-token prediction), which
        is left alone.
      prefix: of the tensor names; checkpoints of the bare trunk leave it out.
      inside: what stands before the names in the checkpoint of a larger model, of which this is
        the text part.
      harmless: pattern of buffers that some files hold and that no one needs.
    """

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    mlp_ratio: int | None = None
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope_keys: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"rope_theta": "rope_theta"}
    )
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    windows: Windows | None = None
    inside: str = ""
    tensors: tuple[Tensor, ...]
    packed: tuple[Tensor, ...] = ()
    further_layers: bool = False
    prefix: str
    harmless: str


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
_LLAMA_TENSORS = (*_LLAMA_OUTER, *_LLAMA_ATTENTION, *_LLAMA_MLP_NORM, *_LLAMA_MLP)

_ROUTER = Tensor("model.layers.{i}.mlp.gate.weight", ("blocks.{i}.mlp.router.weight",))
_EXPERTS = tuple(
    Tensor(
        f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj.weight",
        (f"blocks.{{i}}.mlp.experts.{part}",),
    )
    for part in ("gate", "up", "down")
)
_PACKED_EXPERTS = (
    Tensor(
        "model.layers.{i}.mlp.experts.gate_up_proj",
        ("blocks.{i}.mlp.experts.gate", "blocks.{i}.mlp.experts.up"),
        axis=1,
    ),
    Tensor("model.layers.{i}.mlp.experts.down_proj", ("blocks.{i}.mlp.experts.down",)),
)
_QWEN3_MOE_TENSORS = (*_LLAMA_TENSORS, _ROUTER, *_EXPERTS)
_MIXTRAL_TENSORS = (
    *_LLAMA_TENSORS,
    Tensor("model.layers.{i}.block_sparse_moe.gate.weight", _ROUTER.parts),
    *(
        Tensor(f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{name}.weight", row.parts)
        for name, row in zip(("w1", "w3", "w2"), _EXPERTS, strict=True)
    ),
)
_DEEPSEEK_TENSORS = (
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
    _ROUTER,
    Tensor("model.layers.{i}.mlp.gate.e_score_correction_bias", ("blocks.{i}.mlp.router.bias",)),
    *_EXPERTS,
    *_affine("model.layers.{i}.mlp.shared_experts.gate_proj", "blocks.{i}.mlp.shared.gate"),
    *_affine("model.layers.{i}.mlp.shared_experts.up_proj", "blocks.{i}.mlp.shared.up"),
    *_affine("model.layers.{i}.mlp.shared_experts.down_proj", "blocks.{i}.mlp.shared.down"),
)

_GEMMA_TENSORS = (
    *_LLAMA_OUTER,
    *_LLAMA_ATTENTION,
    *_affine("model.layers.{i}.post_attention_layernorm", "blocks.{i}.attention_post_norm"),
    *_affine("model.layers.{i}.pre_feedforward_layernorm", "blocks.{i}.mlp_norm"),
    *_LLAMA_MLP,
    *_affine("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.mlp_post_norm"),
)

_PHI3_TENSORS = (
    *_LLAMA_OUTER,
    *_affine("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *_affine("model.layers.{i}.self_attn.qkv_proj", *_QKV),
    *_affine("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.o"),
    *_LLAMA_MLP_NORM,
    *_affine("model.layers.{i}.mlp.gate_up_proj", "blocks.{i}.mlp.gate", "blocks.{i}.mlp.up"),
    *_affine("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
)

_OPT_TENSORS = (
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

_NEOX_TENSORS = (
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

_GPT2_TENSORS = (
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
_NAMED = dict(prefix="model.", harmless=r".*rotary_emb\.(inv_freq|(cos|sin)_cached)")
_LLAMA_LIKE = dict(tensors=_LLAMA_TENSORS, **_NAMED)
_WHOLE_HEADS = {"partial_rotary_factor": (1.0,)}  # every feature of a head is rotated
_SWITCHED = Windows(default=4096, switch="use_sliding_window", typed=True)

_DEEPSEEK_KEYS = {k: v for k, v in _LLAMA_KEYS.items() if k not in ("num_kv_heads", "head_dim")} | {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "routing": "topk_method",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
    "expert_scale": "routed_scaling_factor",
    "plain_first": "first_k_dense_replace",
}
_DEEPSEEK_LIKE = dict(
    rope_types=("default", "linear", "yarn"),
    # all heads have keys of their own, made of the one that is kept
    writes={"num_key_value_heads": lambda config: config.num_heads},
    tensors=_DEEPSEEK_TENSORS,
    packed=_PACKED_EXPERTS,
    **_NAMED,
)

_GEMMA_KEYS = _LLAMA_KEYS | {
    "activation": "hidden_activation",
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "query_scalar": "query_pre_attn_scalar",
    "logit_softcap": "final_logit_softcapping",
}
_GEMMA_DEFAULTS = {
    "vocab_size": 256_000,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
}
_GEMMA_FIXED = {"norm_plus_one": True, "sandwich_norms": True, "scale_embeddings": True}
_GEMMA_LIKE = dict(tensors=_GEMMA_TENSORS, **_NAMED)
_EYES = r"vision_tower\..*|multi_modal_projector\..*"
_CAUSAL = {"use_bidirectional_attention": (False,)}

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
        windows=_SWITCHED,
        **_LLAMA_LIKE,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        keys=_LLAMA_KEYS | {"qkv_bias": "attention_bias", "o_bias": "attention_bias"},
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 32768, "head_dim": 128},
        fixed={"qk_norm": True},
        only=_WHOLE_HEADS,
        windows=_SWITCHED,
        **_LLAMA_LIKE,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        keys=_LLAMA_KEYS,
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
        only=_WHOLE_HEADS,
        windows=Windows(default=4096),
        **_LLAMA_LIKE,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        keys=_LLAMA_KEYS
        | {"expert_size": "intermediate_size"}
        | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        fixed={"norm_expert_weights": True},
        only=_WHOLE_HEADS,
        windows=Windows(),
        **_NAMED | dict(tensors=_MIXTRAL_TENSORS, packed=(_ROUTER, *_PACKED_EXPERTS)),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        keys=_LLAMA_KEYS
        | {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
        | {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"}
        | {"expert_size": "moe_intermediate_size", "norm_expert_weights": "norm_topk_prob"}
        | {"plain_layers": "mlp_only_layers", "sparse_step": "decoder_sparse_step"},
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": False, "mlp_only_layers": (), "decoder_sparse_step": 1},
        fixed={"qk_norm": True},
        only=_WHOLE_HEADS | {"use_sliding_window": (False,)},
        aliases={"num_local_experts": "num_experts"},
        **_NAMED | dict(tensors=_QWEN3_MOE_TENSORS, packed=_PACKED_EXPERTS),
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        keys=_DEEPSEEK_KEYS | {"mlp_bias": "mlp_bias"},
        defaults=_LLAMA_DEFAULTS
        | {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2}
        | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        fixed={"num_kv_heads": 1, "rope_interleaved": True},
        only={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),  # transformers leaves it out, DeepSeek's own code does not
            "moe_layer_freq": (1,),
        },
        **_DEEPSEEK_LIKE,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        keys=_DEEPSEEK_KEYS
        | {"norm_expert_weights": "norm_topk_prob", "rope_interleaved": "rope_interleave"},
        defaults=_LLAMA_DEFAULTS
        | {"max_position_embeddings": 4096, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1}
        | {"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        | {"norm_topk_prob": True, "rope_interleave": True},
        fixed={"num_kv_heads": 1},
        only={
            "topk_method": ("noaux_tc",),
            "scoring_func": ("sigmoid",),
            "moe_layer_freq": (1,),
        },
        further_layers=True,
        **_DEEPSEEK_LIKE | {"writes": _DEEPSEEK_LIKE["writes"] | {"num_nextn_predict_layers": 0}},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        keys=_GEMMA_KEYS | {"score_softcap": "attn_logit_softcapping"},
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed=_GEMMA_FIXED,
        only=_WHOLE_HEADS | _CAUSAL,
        windows=Windows(default=4096, every=2, typed=True),
        **_GEMMA_LIKE,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        keys=_GEMMA_KEYS,
        defaults=_GEMMA_DEFAULTS
        | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
        | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
        fixed=_GEMMA_FIXED | {"qk_norm": True},
        only=_WHOLE_HEADS | _CAUSAL | {"attn_logit_softcapping": (None,)},
        rope_keys={"rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
        windows=Windows(default=4096, every=6, typed=True),
        inside="language_model.",
        **_GEMMA_LIKE | {"harmless": f"{_NAMED['harmless']}|{_EYES}"},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        keys=_LLAMA_KEYS,
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        rope_keys={"rope_theta": "rope_theta", "rotary_fraction": "partial_rotary_factor"},
        rope_types=("default", "longrope"),
        windows=Windows(),
        tensors=_PHI3_TENSORS,
        **_NAMED,
    ),
    "opt": Family(
        architecture="OPTForCausalLM",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "ffn_dim",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "max_positions": "max_position_embeddings",
            "activation": "activation_function",
            "qkv_bias": "enable_bias",
            "o_bias": "enable_bias",
            "mlp_bias": "enable_bias",
            "tie_embeddings": "tie_word_embeddings",
            "eos_ids": "eos_token_id",
            "bos_id": "bos_token_id",
        },
        defaults={
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "enable_bias": True,
            "tie_word_embeddings": True,
        },
        fixed={"norm": "layer", "positions": "learned", "position_offset": 2, "gated_mlp": False},
        only={
            "do_layer_norm_before": (True,),  # OPT-350m
            "layer_norm_elementwise_affine": (True,),
            "_remove_final_layer_norm": (False,),
        },
        equal={"word_embed_proj_dim": "hidden_size"},  # OPT-350m
        tensors=_OPT_TENSORS,
        prefix="model.",
        harmless=r"(?!)",  # none
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        keys={
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "max_positions": "max_position_embeddings",
            "norm_eps": "layer_norm_eps",
            "activation": "hidden_act",
            "parallel_residual": "use_parallel_residual",
            "qkv_bias": "attention_bias",
            "o_bias": "attention_bias",
            "tie_embeddings": "tie_word_embeddings",
            "eos_ids": "eos_token_id",
            "bos_id": "bos_token_id",
        },
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "use_parallel_residual": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rotary_pct": 0.25,
        },
        fixed={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        rope_keys={"rope_theta": "rotary_emb_base", "rotary_fraction": "rotary_pct"},
        tensors=_NEOX_TENSORS,
        prefix="gpt_neox.",
        harmless=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
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
