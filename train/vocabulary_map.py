"""The vocabulary of a drafter with a small LM head: the most frequent tokens of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import ConfigError


def frequencies(texts: Sequence[np.ndarray], shares: Sequence[float], size: int) -> np.ndarray:
    """Returns the share of each token in a mixture of texts, float64 ``[size]``.

    Args:
      texts: int arrays of any shape.
      shares: the share of each text in the mixture.
      size: the number of tokens in the vocabulary.
    """
    found = np.zeros(size)
    for text, share in zip(texts, shares, strict=True):
        counts = np.bincount(np.ravel(text), minlength=size)
        found += share * counts / counts.sum()
    return found


def vocab_map(frequencies: np.ndarray, size: int) -> np.ndarray:
    """Returns the most frequent tokens, int32 ``[size]``, in increasing order; ties: the lower ids.

    ``vocab_map(...)[i] - i`` is the ``d2t`` of published EAGLE-3 heads, ``isin(arange(V), ...)``
    their ``t2d``.

    Raises:
      ConfigError: ``size`` exceeds the vocabulary.
    """
    if not 1 <= size <= len(frequencies):
        raise ConfigError(
            f"draft_vocab_size={size}, but the target's vocabulary has {len(frequencies)} tokens; "
            f"accepted: 1 to {len(frequencies)}, or 0 for all tokens (the default)"
        )
    most = np.argsort(-frequencies, kind="stable")[:size]
    return np.sort(most).astype(np.int32)


def widened(lm_head: np.ndarray, own: np.ndarray, vocab: np.ndarray, table: np.ndarray):
    """Gives an LM head rows for a larger vocabulary, float32 ``[Vd, H]``.

    Its own tokens keep their rows. Each other token gets the image of the target's row under the
    linear map that, by least squares, comes closest to taking the target's rows to the head's own.

    Args:
      lm_head: float32 ``[n, H]``, the rows of the head.
      own: int ``[n]``, the target's ids of these rows.
      vocab: int ``[Vd]``, the ids of the larger vocabulary, ``own`` among them.
      table: float32 ``[V, F]``, the LM head of the target.
    """
    rows = table @ np.linalg.lstsq(table[own], lm_head, rcond=None)[0]
    rows[own] = lm_head
    return np.float32(rows[vocab])
