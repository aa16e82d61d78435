"""The shape of a decoder: one frozen, hashable record for every family."""

from __future__ import annotations

import dataclasses

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
RopeScaling = tuple[tuple[str, object], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that distinguishes one decoder-only family from another.

    The defaults are Llama's. A family is a point in these fields, never a copy of the model;
    ``specjax.models.families`` translates the configuration files of Hugging Face into them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    model_type: str = "llama"
    norm: str = "rms"  # "rms" | "layer"
    norm_eps: float = 1e-5
    activation: str = "silu"  # a key of layers.ACTIVATIONS
    gated_mlp: bool = True
    positions: str = "rope"  # "rope" | "learned"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None  # sorted items of the scaling dictionary
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every head's query and key (Qwen3)
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self):
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: "
                "grouped-query attention needs equal groups"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd: rotary embedding turns pairs")

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def context_length(self) -> int:
        """Positions that the model is made for: RoPE scalings that files leave out of
        ``max_positions`` (Qwen2.5 with yarn, older linear ones) are counted."""
        scaling = dict(self.rope_scaling or ())
        if scaling.get("rope_type") not in ("yarn", "linear"):
            return self.max_positions
        original = scaling.get("original_max_position_embeddings", self.max_positions)
        return max(self.max_positions, int(original * scaling["factor"]))
