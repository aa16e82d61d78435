"""A model's scores of texts that were written before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from ..decoding import reference
from ..models.lm import LM

STEP = 32  # widths of passes are multiples of it, so that few programs serve all


def scores_of_new(
    lm: LM, rows: Sequence[tuple[Sequence[int], Sequence[int]]], batch: int = 16
) -> Iterator[np.ndarray]:
    """Yields the logits float32 ``[T, V]`` of each row's T new tokens, one pass over whole rows.

    Args:
      rows: prompt and new token ids of each; the prompt is not empty.
      batch: rows of a pass; all have one width.
    """
    width = max((len(prompt) + len(new) for prompt, new in rows), default=0)
    width = min(-(-width // STEP) * STEP, lm.target.max_positions or width + STEP)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        tokens = np.zeros((batch, width), np.int32)
        for i, (prompt, new) in enumerate(part):
            tokens[i, : len(prompt) + len(new)] = [*prompt, *new]
        logits = reference.logits(lm.target, lm.params, jnp.asarray(tokens))
        for i, (prompt, new) in enumerate(part):
            begin = len(prompt) - 1
            yield np.asarray(logits[i, begin : begin + len(new)])
