"""Holds texts that any callable draws against the exact law of a small model.

``transformers_audit`` is an adapter that is built on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .audit_report import AuditReport, sampled_finding
from .sampled_law import judge
from .token_tests import LEAST_TOKENS, token_findings

MOST_TEXTS = 4096  # the most texts whose probabilities are enumerated
SUM = 1e-3  # how far the sum of probabilities may be from 1


def audit_callable(
    draw: Callable[[int], Iterable[Sequence[int]]],
    law: Callable[[np.ndarray], np.ndarray],
    *,
    vocab_size: int,
    num_tokens: int = 10,
    enumerated: int = 3,
    samples: int = 4000,
    false_alarm: float = 1e-3,
    seed: int = 0,
    subject: str = "a callable",
) -> AuditReport:
    """Compares texts that an engine draws after one prompt with the exact law of its model.

    The probabilities of all texts of ``enumerated`` tokens are computed, and the frequencies of the
    drawn beginnings are held against them. All ``num_tokens`` tokens are tested by their ranks, by
    pairs of ranks, and by the frequencies after equal prefixes, as ``audit_samples`` tests them.
    Each test is a chi-squared test with an equal share of the false-alarm rate.

    Args:
      draw: number of texts -> that many texts, each at least ``num_tokens`` token ids that follow
        the prompt; independent draws of an engine without stops. Later tokens are ignored, so an
        engine that drafts less at the end of its budget may be asked for more.
      law: int ``[R, T]``, texts that follow the prompt -> float ``[R, T, V]``, the probabilities
        of each token given the prompt and the tokens before it, which sum to 1.
      vocab_size: V, small enough that all texts of ``enumerated`` tokens can be listed.
      num_tokens: the tokens of a text that are tested.
      enumerated: the tokens of a text whose joint law is enumerated.
      samples: the number of texts.
      false_alarm: the probability that a lossless engine is reported as biased.
      seed: the seed of the draws within the tokens' own shares.
      subject: the name of the engine in the report.

    Returns:
      an ``AuditReport`` with one finding for each test.

    Raises:
      ValueError: a number is out of range, a text is too short or of another vocabulary, or what
        ``law`` returns are no probabilities.
    """
    if not 0 < false_alarm < 1 or not 1 <= enumerated <= num_tokens or samples < 1:
        raise ValueError(
            f"false_alarm={false_alarm}, enumerated={enumerated}, num_tokens={num_tokens}, "
            f"samples={samples}: false_alarm must be in (0, 1), enumerated from 1 to num_tokens, "
            "samples at least 1"
        )
    if samples * num_tokens < LEAST_TOKENS or vocab_size**enumerated > MOST_TEXTS:
        raise ValueError(
            f"samples={samples}, num_tokens={num_tokens}, vocab_size={vocab_size}, "
            f"enumerated={enumerated}: give at least {LEAST_TOKENS} tokens in all, and at most "
            f"{MOST_TEXTS} texts to enumerate"
        )
    drawn = itertools.islice(draw(samples), samples + 1)
    texts = np.asarray([_checked(text, num_tokens, vocab_size) for text in drawn])
    if len(texts) != samples:
        many = f"{len(texts)} texts" if len(texts) < samples else "more texts"
        raise ValueError(f"draw({samples}) returned {many}: return as many as asked")
    every = np.asarray(list(itertools.product(range(vocab_size), repeat=enumerated)))
    joint = np.take_along_axis(_law(law, every, vocab_size), every[:, :, None], axis=2)[
        :, :, 0
    ].prod(axis=1)
    powers = vocab_size ** np.arange(enumerated - 1, -1, -1)
    counts = np.bincount(texts[:, :enumerated] @ powers, minlength=len(every))
    share = false_alarm / 4
    findings = [sampled_finding(f"texts of {enumerated} tokens", judge(counts, joint), share)]
    rows = [((), text.tolist()) for text in texts]
    findings += token_findings(
        rows, _law(law, texts, vocab_size), np.random.default_rng(seed), share
    )
    return AuditReport(subject=subject, findings=tuple(findings), false_alarm=false_alarm)


def _checked(text: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Returns the first ``num_tokens`` tokens of a text that is long enough and of ``vocab_size``
    tokens."""
    found = [int(token) for token in text]
    if len(found) < num_tokens or not 0 <= min(found) <= max(found) < vocab_size:
        raise ValueError(
            f"draw returned {found}: each text must have at least {num_tokens} tokens, and each "
            f"token must be from 0 to {vocab_size - 1}; turn stops and end-of-text tokens off"
        )
    return found[:num_tokens]


def _law(law, texts: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the law of each token of ``texts``, float64 ``[R, T, V]``."""
    found = np.asarray(law(texts), np.float64)
    if found.shape != (*texts.shape, vocab_size):
        raise ValueError(
            f"law returned {list(found.shape)} for texts {list(texts.shape)}: return probabilities "
            f"{[*texts.shape, vocab_size]}"
        )
    total = found.sum(axis=2, keepdims=True)
    if not (np.all(found >= 0) and np.all(np.abs(total - 1) < SUM)):  # NaN fails, too
        raise ValueError(
            "law returned numbers that are no probabilities: they must be finite, not negative, "
            "and sum to 1 over the vocabulary"
        )
    return found / total
