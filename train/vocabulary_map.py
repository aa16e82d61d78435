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
