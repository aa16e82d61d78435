"""The shape of an encoder–decoder model."""

from __future__ import annotations

import dataclasses

from ..config import is_number, is_whole

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_encoder_layers",
    "num_layers",
    "num_heads",
    "head_dim",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Everything that distinguishes one encoder–decoder family from another; defaults are T5's.

    Attributes:
      reads: the input of the encoder: ``"tokens"``, or ``"features"`` (``num_features`` numbers at
        each of ``2 * max_source`` frames).
      num_buckets: the number of buckets of relative distances; 0 where positions are learned.
      max_source, max_positions: the longest input of the encoder and of the decoder; None: no
        limit.
      start_id: the first token of every text of the decoder.
      start_ids: the decoder's whole default prompt; empty where there is none.
      suppress_ids: tokens that are never generated.
      begin_suppress_ids: tokens that are not generated as the first token.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_layers: int
    num_heads: int
    head_dim: int
    model_type: str = "t5"
    reads: str = "tokens"
    num_features: int = 0
    max_source: int | None = None
    max_positions: int | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    activation: str = "relu"
    gated_mlp: bool = False
    mlp_bias: bool = False
    attention_bias: bool = False  # of queries, values and outputs; keys need none
    scale_attention: bool = False
    scale_logits: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    tie_embeddings: bool = True
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    start_id: int = 0
    start_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    begin_suppress_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if not is_number(self.norm_eps):
            raise ValueError(f"norm_eps={self.norm_eps!r}: it must be a number")
        if not all(map(is_whole, self.eos_ids)):
            raise ValueError(
                f"eos_ids={self.eos_ids!r}: it must hold whole numbers, and nothing else"
            )
        if self.num_buckets and (self.num_buckets < 4 or self.num_buckets % 4):
            raise ValueError(f"num_buckets={self.num_buckets} must be a multiple of 4")
        if self.num_buckets and self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} must exceed half of num_buckets="
                f"{self.num_buckets}: near distances have a bucket each"
            )
