"""Builds a decoder from a configuration."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx

from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.hf import load_weights
from specjax.models.model_folder import EMBEDDED
from specjax.models.quantize import FLOAT

from .config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a small Llama."""

    hidden_size: int  # features of the residual stream
    intermediate_size: int  # features within a feed-forward layer
    num_layers: int  # decoder layers
    num_heads: int  # query heads of a layer
    num_kv_heads: int  # key/value heads, a divisor of num_heads
    head_dim: int  # features of a head, an even number
    max_positions: int = 1024  # may exceed data.length, but no longer text is trained on
    tie_embeddings: bool = True  # the LM head is the embedding
    rope_theta: float = 10_000.0  # the base of the frequencies of rotary positions

    def check_length(self, length: int) -> None:
        """Raises ConfigError where rows to train on are longer than the model's context."""
        if length > self.max_positions:
            raise ConfigError(
                f"data.length={length}: the model reads up to model.max_positions="
                f"{self.max_positions} tokens; give no more, or raise model.max_positions"
            )

    def decoder(self, vocab_size: int, end_of_text: int) -> DecoderConfig:
        """The decoder of this shape over a tokenizer's vocabulary."""
        shape = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return DecoderConfig(
            vocab_size=vocab_size, eos_ids=(end_of_text,), bos_id=end_of_text, **shape
        )


def words(config: DecoderConfig) -> str:
    """A decoder's shape in one line."""
    return (
        f"{config.model_type}, {config.num_layers} layers of width {config.hidden_size}, "
        f"{config.num_heads} heads ({config.num_kv_heads} of keys), "
        f"a vocabulary of {config.vocab_size:,} tokens"
    )


def starting_params(config: DecoderConfig, seed: int, init: str):
    """Returns the weights from which a run starts, float32.

    Args:
      config: the shape of the decoder.
      seed: of random weights.
      init: the folder of a model of this shape, or the name of one that ships with the package,
        whose weights may be held in few bits: the run starts from the floats for which they stand.
        "": random weights.

    Raises:
      FileNotFoundError, ValueError: the folder holds no such model.
    """
    if not init:
        return create(config, seed)[1]
    folder = EMBEDDED.get(init, init)
    return nnx.to_pure_dict(load_weights(folder, config, jnp.float32, FLOAT))


def create(config: DecoderConfig, seed: int):
    """Returns ``(graphdef, params)`` of a decoder with initial weights, a plain dictionary."""
    graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))
    return graphdef, nnx.to_pure_dict(params)
