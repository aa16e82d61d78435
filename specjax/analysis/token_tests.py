"""Tests of drawn tokens against the law of each: their ranks, pairs of ranks, equal prefixes.

The place of a token is the cumulative probability at which it lies when the vocabulary is sorted by
probability, a uniform draw within the token's own share. Tokens that follow their laws have places
that are uniform and independent of each other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np

from .audit_report import sampled_finding
from .sampled_law import Evidence, judge

BINS, PAIRED = 20, 5  # of ranks, and of the ranks of two tokens in a row
LEAST_TOKENS = 200


def token_findings(rows, laws, random: np.random.Generator, false_alarm: float):
    """Yields the findings ``ranks``, ``pairs`` and ``tokens after N beginnings``.

    The last two are left out where there are too few samples for them.

    Args:
      rows: pairs of a prompt and the token ids that were drawn after it.
      laws: for each row float64 ``[T, V]``, the law of each of its T tokens.
      random: draws the places within the tokens' own shares.
      false_alarm: the false-alarm rate of each test.
    """
    places, pairs, after = [], Counter(), {}
    impossible = 0
    for (prompt, new), law in zip(rows, laws, strict=True):
        law /= np.maximum(law.sum(axis=1, keepdims=True), 1e-30)
        own = law[np.arange(len(new)), new]
        impossible += int((own == 0).sum())
        # equal probabilities are sorted by the ids of their tokens
        index = np.arange(law.shape[1])
        before = (law > own[:, None]) | ((law == own[:, None]) & (index < np.asarray(new)[:, None]))
        place = (law * before).sum(axis=1) + random.random(len(new)) * own
        places.append(np.clip(place, 0, 1 - 1e-12))
        cells = (places[-1] * PAIRED).astype(int)
        pairs.update(zip(cells[:-1], cells[1:], strict=True))
        for i, token in enumerate(new[:3]):
            seen = after.setdefault((*prompt, *new[:i]), (law[i], Counter()))
            seen[1][token] += 1
    ranks = np.bincount((np.concatenate(places) * BINS).astype(int), minlength=BINS)
    evidence = judge(ranks, np.full(BINS, 1 / BINS))
    if impossible:
        evidence = dataclasses.replace(evidence, p_value=0.0, impossible=impossible)
    yield sampled_finding("ranks", evidence, false_alarm)
    if sum(pairs.values()) >= LEAST_TOKENS:
        table = np.asarray([pairs[i, j] for i in range(PAIRED) for j in range(PAIRED)])
        evidence = judge(table, np.full(PAIRED**2, PAIRED**-2))
        yield sampled_finding("pairs", evidence, false_alarm)
    if many := [seen for seen in after.values() if seen[1].total() >= LEAST_TOKENS]:
        yield sampled_finding(f"tokens after {len(many)} beginnings", _joined(many), false_alarm)


def _joined(many) -> Evidence:
    """Returns one test over several laws, each weighted by the number of its samples."""
    total = sum(counts.total() for _, counts in many)
    shares = np.concatenate([[counts[x] for x in range(len(law))] for law, counts in many])
    laws = np.concatenate([law * counts.total() / total for law, counts in many])
    return judge(shares, laws)
