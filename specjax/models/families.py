"""Model families as tables: config files and tensor names of Hugging Face.

A family is an entry of ``FAMILIES``: which keys of its ``config.json`` fill which fields of
``DecoderConfig``, what transformers assumes where a key is missing, which options are not
implemented, and how its tensors are called. ``translate`` reads the tables.
"""

from __future__ import annotations

from .family import Family, Windows
from .tensors import (
    DEEPSEEK_TENSORS,
    GEMMA_TENSORS,
    GPT2_TENSORS,
    LLAMA_TENSORS,
    MIXTRAL_TENSORS,
    NEOX_TENSORS,
    OPT_TENSORS,
    PACKED_EXPERTS,
    PHI3_TENSORS,
    QWEN3_MOE_TENSORS,
    ROUTER,
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
_LLAMA_LIKE = dict(tensors=LLAMA_TENSORS, **_NAMED)
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
    # SGLang wants to be told the frequency
    writes={"num_key_value_heads": lambda config: config.num_heads, "moe_layer_freq": 1},
    tensors=DEEPSEEK_TENSORS,
    packed=PACKED_EXPERTS,
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
_GEMMA_LIKE = dict(tensors=GEMMA_TENSORS, **_NAMED)
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
    "mimo": Family(  # Qwen2's, with modules for multi-token prediction beside
        architecture="MiMoForCausalLM",
        keys=_LLAMA_KEYS,
        defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 32768},
        fixed={"qkv_bias": True},
        only=_WHOLE_HEADS,
        windows=_SWITCHED,
        writes={"attention_bias": True, "num_nextn_predict_layers": 0},
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
        windows=Windows(default=4096, typed=True),  # with layer_types: transformers' Ministral
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
        **_NAMED | dict(tensors=MIXTRAL_TENSORS, packed=(ROUTER, *PACKED_EXPERTS)),
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
        **_NAMED | dict(tensors=QWEN3_MOE_TENSORS, packed=PACKED_EXPERTS),
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
        tensors=PHI3_TENSORS,
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
        tensors=OPT_TENSORS,
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
        tensors=NEOX_TENSORS,
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
        tensors=GPT2_TENSORS,
        prefix="transformer.",
        harmless=r"h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask
    ),
}
