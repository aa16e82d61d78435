"""The law of a token after all settings, and the token that a rule must say, in NumPy.

Written from the definitions of Hugging Face and OpenAI, for one row and one position at a time.
Each function also tells whether its answer is sure: not where float32 might decide otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

TIE = 1e-3  # logits this close may be swapped by another order of summation
EDGE = 1e-4  # probabilities this close to where top-k, top-p or min-p cut may fall on either side
NOISE = 2**32 - 1  # folded into a row's key for the noise that drafters and target share
POSITIONS, ROWS = 64, 8  # for which noise is computed at once, so that few programs serve all texts


@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The sampling settings of one row; None: not set. ``processor(logits, prompt, new)`` is the
    reference of a logits processor, in NumPy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    logit_bias: np.ndarray | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    processor: Callable | None = None


def adjusted(logits, settings: RowSettings, prompt, new):
    """float64 ``[V]``: raw ``logits`` after bias, penalties and logits processor.

    Args:
      prompt, new: the token ids before the position: the prompt's, and those generated since.
    """
    s, logits = settings, np.array(logits, np.float64)
    if s.logit_bias is not None:
        logits = logits + s.logit_bias
    if s.repetition_penalty is not None:
        present = [*{*prompt, *new}]
        old = logits[present]
        penalty = s.repetition_penalty
        logits[present] = np.where(old > 0, old / penalty, old * penalty)
    times = np.bincount(np.asarray(new, int), minlength=len(logits))
    if s.frequency_penalty is not None:
        logits = logits - s.frequency_penalty * times
    if s.presence_penalty is not None:
        logits = logits - s.presence_penalty * (times > 0)
    return logits if s.processor is None else s.processor(logits, prompt, new)


def law(logits, settings: RowSettings):
    """``(p float64 [V], sure)`` of adjusted ``logits``; zeros where no token has a probability."""
    s, top = settings, logits.max()
    if not np.isfinite(top):
        return np.zeros(len(logits)), True
    if s.temperature == 0:
        said, sure = greatest(logits)
        return np.eye(len(logits))[said], sure
    p, sure = np.exp((logits - top) / s.temperature), True
    if s.top_k:
        p, certain = cut(p, float(np.sort(p)[::-1][min(s.top_k, len(p)) - 1]))
        sure &= certain
    p = p / p.sum()
    if s.top_p is not None and s.top_p < 1:
        ordered = np.sort(p)[::-1]
        mass = np.cumsum(ordered)
        last = int(np.argmax(mass >= s.top_p))
        sure &= bool(np.abs(mass - s.top_p).min() > EDGE)
        p, certain = cut(p, float(ordered[last]))
        sure &= certain
    if s.min_p is not None:
        least = s.min_p * p.max()
        sure &= bool(np.abs(p[p > 0] - least).min() > EDGE * p.max()) or s.min_p == 0
        p = np.where(p >= least, p, 0.0)
    return p / p.sum(), sure


def cut(p, least: float):
    """``p`` where it is at least ``least``, and whether nothing comes close to that bound."""
    kept = p >= least
    below = p[~kept & (p > 0)]
    return np.where(kept, p, 0.0), not below.size or bool(below.max() < (1 - EDGE) * least)


def greatest(x):
    """``(index of the greatest number, whether no other comes close)``; -1: none is finite."""
    if not np.isfinite(x.max()):
        return -1, True
    order = np.argsort(-x, kind="stable")
    return int(order[0]), bool(len(x) < 2 or x[order[0]] - x[order[1]] > TIE)


def coupled(p, noise):
    """The token with the least noise over p, and whether no other comes close."""
    if not p.sum():
        return -1, True
    with np.errstate(divide="ignore"):
        return greatest(np.log(p) - np.log(noise))


@jax.jit
def _bits(keys, positions, like):
    def at(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, position), 0)
        return jax.random.bits(key, like.shape, np.uint32)

    keys = jax.vmap(lambda key: jax.random.fold_in(key, np.uint32(NOISE)))(keys)
    return jax.vmap(jax.vmap(at, in_axes=(None, 0)), in_axes=(0, None))(keys, positions)


def shared_noise(keys, size: int, vocab: int):
    """float64 ``[B, size, V]``: the exponential variables of each row, position and token.

    Args:
      keys: random keys ``[B]``, one for a row.
    """
    rows, wide = len(keys), -(-size // POSITIONS) * POSITIONS
    keys = keys[np.arange(-(-rows // ROWS) * ROWS) % rows]
    bits = _bits(keys, np.arange(wide, dtype=np.int32), np.zeros(vocab, np.int8))
    uniform = np.asarray(bits)[:rows, :size].astype(np.float32) + np.float32(0.5)
    uniform = uniform * np.float32(2.0**-32)
    return -np.log1p(-np.minimum(uniform.astype(np.float64), 1 - 2.0**-24))
