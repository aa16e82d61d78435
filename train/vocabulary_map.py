"""The vocabulary of a drafter with a small LM head: the tokens that the text has most of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .config import ConfigError


def frequencies(texts: Sequence[np.ndarray], shares: Sequence[float], size: int) -> np.ndarray:
    """float64 ``[size]``, the share of each token in a mixture of texts (int arrays of any shape),
    of which each makes up its share."""
    found = np.zeros(size)
    for text, share in zip(texts, shares, strict=True):
        counts = np.bincount(np.ravel(text), minlength=size)
        found += share * counts / counts.sum()
    return found


def vocab_map(frequencies: np.ndarray, size: int) -> np.ndarray:
    """int32 ``[size]``, in increasing order: the most frequent tokens; of equal ones the first.

    ``vocab_map(...)[i] - i`` is the ``d2t`` of published EAGLE-3 heads, ``isin(arange(V), ...)``
    their ``t2d``.

    Raises:
      ConfigError: more tokens than there are.
    """
    if not 1 <= size <= len(frequencies):
        raise ConfigError(
            f"draft_vocab_size={size}, but the target's vocabulary has {len(frequencies)} tokens; "
            f"accepted: 1 to {len(frequencies)}, or 0 for all tokens (the default)"
        )
    most = np.argsort(-frequencies, kind="stable")[:size]
    return np.sort(most).astype(np.int32)
