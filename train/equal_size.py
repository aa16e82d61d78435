"""Shapes of draft models that have the same number of parameters and different depths."""

from __future__ import annotations

import dataclasses
import math

from .config import ConfigError
from .model import ModelConfig

STEP = 8  # widths are multiples of this number


def num_weights(shape: ModelConfig, vocab_size: int) -> int:
    """Returns the number of parameters of a decoder, the embeddings and norms included."""
    h = shape.hidden_size
    heads = 2 * shape.num_heads + 2 * shape.num_kv_heads  # of queries, output, keys, values
    layer = h * heads * shape.head_dim + 3 * h * shape.intermediate_size + 2 * h
    tables = 1 if shape.tie_embeddings else 2
    return tables * vocab_size * h + shape.num_layers * layer + h


def of_depth(
    like: ModelConfig, num_layers: int, size: int, vocab_size: int, tolerance: float = 0.01
) -> ModelConfig:
    """Returns the shape with a number of layers and a given number of parameters.

    Heads have about the width that they have in ``like``. As many of them share their keys as in
    ``like``, or, where that number does not divide the heads, the largest divisor that both have in
    common. The width of the feed-forward layers follows from the size that is asked for; among the
    widths of the residual stream for which it does, the one is taken for which both widths have
    about the ratio that they have in ``like``.

    Args:
      like: the shape that gives all other sizes.
      num_layers: the number of layers.
      size: the number of parameters, embeddings and norms included.
      vocab_size: the size of the vocabulary.
      tolerance: the greatest relative difference from ``size``.

    Raises:
      ConfigError: no width fits.
    """
    ratio, found = like.intermediate_size / like.hidden_size, []
    for hidden in range(STEP, size // vocab_size + 1, STEP):
        heads = max(1, round(hidden / like.head_dim))
        if hidden % (2 * heads):
            continue  # a head has an even number of features
        shared = max(1, like.num_heads // like.num_kv_heads)
        shape = dataclasses.replace(
            like,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=heads // math.gcd(heads, shared),
            head_dim=hidden // heads,
            intermediate_size=STEP,
        )
        room = size - num_weights(shape, vocab_size)
        inner = STEP + STEP * round(room / (3 * hidden * num_layers * STEP))
        if inner < STEP:
            continue
        shape = dataclasses.replace(shape, intermediate_size=inner)
        if abs(num_weights(shape, vocab_size) / size - 1) <= tolerance:
            found.append((abs(math.log(inner / hidden / ratio)), shape))
    if not found:
        raise ConfigError(
            f"depths: no decoder of {num_layers} layers has {size:,} parameters to within "
            f"{tolerance:.0%}; leave this depth out, or give a larger tolerance or distill.model"
        )
    return min(found, key=lambda one: one[0])[1]
