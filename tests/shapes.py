"""Tiny shapes of decoders, which tests complete."""

from specjax.models.config import DecoderConfig

TINY = DecoderConfig(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
# fields of a mixture of experts, as DeepSeek-V3 routes, and of latent attention
EXPERTS = dict(
    num_experts=8,
    experts_per_token=2,
    expert_size=12,
    shared_experts=1,
    routing="noaux_tc",
    expert_groups=4,
    groups_per_token=2,
)
LATENT = dict(
    num_kv_heads=1,
    head_dim=20,
    kv_rank=16,
    q_rank=12,
    nope_dim=8,
    rope_dim=4,
    value_dim=6,
    rope_interleaved=True,
)
