"""Makes the golden files (needs torch and transformers): all, or those of the cases named.

    python tests/golden/make.py [CASE ...]

One folder a case: a tiny random checkpoint as transformers writes it (bfloat16, so that reading
that type is tested too) and ``expected.npz`` with token ids and the logits that PyTorch computes
from it in float32. Biases and norms are random as well: at their usual zeros and ones a mistake
in them would not show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = SMALL | dict(num_key_value_heads=2)
ORIGINAL = dict(original_max_position_embeddings=16)  # the 40 tokens below go well beyond it
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
DEEPSEEK = SMALL | EXPERTS | LATENT | dict(n_routed_experts=8, num_key_value_heads=4)
YARN = dict(rope_type="yarn", factor=4.0)
STRETCH = dict(short_factor=[1.0, 1.1, 1.3, 1.6, 1.8, 2.2], long_factor=[1.0, 2, 3, 5, 8, 13])
WINDOW = dict(sliding_window=8)  # the 40 tokens go well beyond it, too
KINDS = ["full_attention", "sliding_attention"]

# name -> (model class, config)
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", SMALL),
    "llama_scaled": (
        "Llama",
        GROUPED
        | dict(
            head_dim=16,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            eos_token_id=[2, 3],
            rope_parameters=LLAMA3 | ORIGINAL | dict(rope_theta=500.0),
        ),
    ),
    "llama_linear": (
        "Llama",
        GROUPED | dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1000.0)),
    ),
    "llama_yarn": (
        "Llama",
        GROUPED | dict(head_dim=16, rope_parameters=YARN | ORIGINAL | dict(rope_theta=300.0)),
    ),
    "qwen2": (
        "Qwen2",
        GROUPED | dict(use_sliding_window=False, sliding_window=8, max_window_layers=1),
    ),
    "qwen2_yarn": (
        "Qwen2",
        GROUPED
        | dict(
            tie_word_embeddings=True,
            rope_parameters=YARN
            | ORIGINAL
            | dict(rope_theta=1e6, beta_fast=8.0, beta_slow=0.5, attention_factor=1.2),
        ),
    ),
    "qwen3": ("Qwen3", GROUPED | dict(head_dim=16)),
    "qwen3_tied": ("Qwen3", GROUPED | dict(attention_bias=True, tie_word_embeddings=True)),
    "gpt2": (
        "GPT2LMHead",
        dict(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        | dict(bos_token_id=1, eos_token_id=2),
    ),
    "gpt2_untied": (
        "GPT2LMHead",
        dict(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=48)
        | dict(bos_token_id=1, eos_token_id=2, activation_function="relu")
        | dict(tie_word_embeddings=False),
    ),
    "qwen2_window": (
        "Qwen2",
        GROUPED | WINDOW | dict(use_sliding_window=True, max_window_layers=1),
    ),
    "qwen3_window": (
        "Qwen3",
        GROUPED | WINDOW | dict(head_dim=16, use_sliding_window=True, layer_types=KINDS),
    ),
    "mistral": ("Mistral", GROUPED | WINDOW | dict(head_dim=16)),
    "gemma2": (
        "Gemma2",
        GROUPED
        | WINDOW
        | dict(head_dim=16, query_pre_attn_scalar=24, pad_token_id=0)
        | dict(attn_logit_softcapping=5.0, final_logit_softcapping=8.0),
    ),
    "gemma3": (
        "Gemma3",
        GROUPED
        | WINDOW
        | dict(head_dim=16, query_pre_attn_scalar=24, pad_token_id=0, layer_types=KINDS)
        | dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=4.0, rope_theta=1e5),
                sliding_attention=dict(rope_type="default", rope_theta=500.0),
            )
        ),
    ),
    "phi3": ("Phi3", GROUPED | WINDOW | dict(pad_token_id=0)),
    "phi3_longrope": (
        "Phi3",
        SMALL
        | dict(hidden_size=64, pad_token_id=0, original_max_position_embeddings=48)
        | dict(rope_parameters=dict(rope_type="longrope", partial_rotary_factor=0.75) | STRETCH),
    ),
    "opt": (
        "OPT",
        {k: v for k, v in SMALL.items() if k != "intermediate_size"}
        | dict(ffn_dim=40, word_embed_proj_dim=32),
    ),
    "gpt_neox": ("GPTNeoX", SMALL | dict(rope_parameters=dict(partial_rotary_factor=0.5))),
    "gpt_neox_sequential": (
        "GPTNeoX",
        SMALL | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    ),
    "mixtral": (
        "Mixtral",
        GROUPED
        | WINDOW
        | dict(num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        GROUPED
        | EXPERTS
        | dict(head_dim=16, num_experts=8, norm_topk_prob=True)
        | dict(num_hidden_layers=3, mlp_only_layers=[2], decoder_sparse_step=2),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        DEEPSEEK
        | dict(q_lora_rank=20, n_shared_experts=2, first_k_dense_replace=1, attention_bias=True)
        | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
        | dict(routed_scaling_factor=3.0),
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        DEEPSEEK
        | dict(q_lora_rank=None, n_shared_experts=1, num_hidden_layers=1)
        | dict(rope_parameters=YARN | ORIGINAL | dict(mscale=0.707, mscale_all_dim=0.7)),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        DEEPSEEK
        | dict(q_lora_rank=20, n_shared_experts=1, first_k_dense_replace=1)
        | dict(n_group=4, topk_group=2)
        | dict(rope_parameters=YARN | ORIGINAL | dict(mscale=1.0, mscale_all_dim=1.0)),
    ),
}


def random_model(case: str, seed: int):
    """A transformers model of ``case`` in float32, every parameter random, values in bfloat16."""
    import torch
    import transformers

    kind, options = CASES[case]
    name = "GPT2LMHeadModel" if kind == "GPT2LMHead" else f"{kind}ForCausalLM"
    suffix = "TextConfig" if kind == "Gemma3" else "Config"
    config = getattr(transformers, kind.removesuffix("LMHead") + suffix)(**options)
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim > 1:
                value.copy_(noise * (0.5 if "emb" in key or "wte" in key else 0.2))
            else:
                scale = "norm" in key or "ln_" in key
                value.copy_(noise * 0.2 + float(scale and "Gemma" not in kind))  # theirs is 1 + w
            value.copy_(value.bfloat16().float())
        for key, value in model.named_buffers():
            if "e_score_correction_bias" in key:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


def logits_of(model, tokens: np.ndarray) -> np.ndarray:
    """Float32 ``[B, T, V]`` of a transformers model."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def main(folder: Path, wanted: list[str]) -> None:
    import torch

    for seed, case in enumerate(CASES):
        if wanted and case not in wanted:
            continue
        model = random_model(case, seed)
        tokens = np.random.default_rng(seed).integers(64, size=(2, 40))
        expected = logits_of(model, tokens)
        kept = {k: v.clone() for k, v in model.named_buffers() if "e_score_correction_bias" in k}
        model.to(torch.bfloat16)
        for key, value in kept.items():  # DeepSeek's files have them in float32
            model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = value
        model.save_pretrained(folder / case)
        np.savez_compressed(
            folder / case / "expected.npz", tokens=tokens.astype(np.int32), logits=expected
        )
        print(f"{case}: logits within ±{np.abs(expected).max():.1f}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(__file__).parent, sys.argv[1:])
