"""A model's logits for texts that were written before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from .. import sharding
from ..decoding import reference
from ..models.lm import LM

STEP = 32  # the width of a pass is a multiple of this number, so that few programs are compiled


def scores_of_new(
    lm: LM, rows: Sequence[tuple[Sequence[int], Sequence[int]]], batch: int = 16
) -> Iterator[np.ndarray]:
    """Yields the logits for the new tokens of each row, by one pass over whole rows.

    Args:
      lm: the model.
      rows: the prompt's and the new token ids of each row; the prompt is not empty.
      batch: the number of rows in a pass.

    Yields:
      float32 ``[T, V]``: the logits before each of the row's T new tokens.
    """
    width = max((len(prompt) + len(new) for prompt, new in rows), default=0)
    width = min(-(-width // STEP) * STEP, lm.target.max_positions or width + STEP)
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        tokens = np.zeros((batch, width), np.int32)
        for i, (prompt, new) in enumerate(part):
            tokens[i, : len(prompt) + len(new)] = [*prompt, *new]
        with sharding.using(lm.mesh, lm.params):
            logits = reference.logits(lm.target, lm.params, jnp.asarray(tokens))
        for i, (prompt, new) in enumerate(part):
            begin = len(prompt) - 1
            yield np.asarray(logits[i, begin : begin + len(new)])


def rated(lm: LM, prompts, texts) -> tuple[np.ndarray, np.ndarray]:
    """Rates new tokens by the target's own law at temperature 1, without settings.

    Args:
      lm: the target.
      prompts: the token ids of each prompt.
      texts: the new token ids of each row.

    Returns:
      ``log p`` (nats) of all new tokens, row by row, and the number of tokens that are more
      probable than each.
    """
    rows = [(list(map(int, p)), list(map(int, t))) for p, t in zip(prompts, texts, strict=True)]
    rows, logp, rank = [row for row in rows if row[1]], [], []
    if not rows:
        raise ValueError("every text is empty: there is no token that could be rated")
    for (_, new), logits in zip(rows, scores_of_new(lm, rows), strict=True):
        own = np.take_along_axis(logits, np.asarray(new)[:, None], axis=1)
        top = logits.max(axis=1, keepdims=True)
        logp.append((own - top)[:, 0] - np.log(np.exp(logits - top).sum(axis=1)))
        rank.append((logits > own).sum(axis=1))
    return np.concatenate(logp), np.concatenate(rank)
