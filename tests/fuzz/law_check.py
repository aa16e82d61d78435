"""Are many texts drawn from the target's law? A test in two stages, whose false alarms are bounded.

First a batch of texts is held against the enumerated law by chi-squared. Only if it looks odd, the
same program draws ten times as many texts with other keys, and these decide: the first texts make
a hypothesis, another law q, and the evidence is how much better q predicts the later texts than the
law p does, the likelihood ratio Λ = prod q(text) / p(text). If the texts do have the law p, the
expectation of Λ is 1 whatever q is, so that Λ reaches 1/α with a probability of at most α. Case n
has α = ALARM / ((n + 1) (n + 2)), which sums to ALARM over all cases of a run. Nothing of this
bound is asymptotic, and how odd the first texts look does not enter into it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np
from scipy.special import chdtrc

from .cases import Batch, Case
from .reference_law import RowSettings, adjusted, law
from .runs import check, decode, invariants
from .targets import Model

ALARM = 1e-6  # probability that a sound package is called wrong, over all cases of a run
ODD = 0.03  # p-value of chi-squared below which the first texts are not trusted
REPEATS = 10  # batches of the second stage
FEW = 5.0  # expected texts of a cell of chi-squared; rarer ones are one cell
Texts = dict[tuple[int, ...], float]


def texts_have_the_targets_law(case: Case, tokens: int) -> str:
    """Raises ``Wrong`` unless texts of the first ``tokens`` tokens have the target's law.

    Returns:
      What was found, in words; ``"undecided"``: rounding decides what the law is.
    """
    batch = case.drawn(0)
    laws = [
        joint(case.model, p, tokens, batch.settings[0], batch.stops_of(0)) for p in batch.prompts
    ]
    if any(own is None for own in laws):
        return "undecided"
    first = counted(case, batch, tokens, 0)
    for own, counts in zip(laws, first, strict=True):
        possible(own, counts)
    if min(oddness(own, counts) for own, counts in zip(laws, first, strict=True)) > ODD:
        return "one stage"
    others = [hypothesis(own, counts) for own, counts in zip(laws, first, strict=True)]
    evidence = 0.0
    for repeat in range(1, REPEATS + 1):
        later = counted(case, batch, tokens, repeat)
        for own, other, counts in zip(laws, others, later, strict=True):
            possible(own, counts)
            evidence += sum(n * np.log(other[text] / own[text]) for text, n in counts.items())
    number = case.draws.number
    alarm = np.log((number + 1) * (number + 2) / ALARM)
    check(
        evidence < alarm,
        f"the texts do not have the target's law: log Λ is {evidence:.1f}, the bound {alarm:.1f};",
        *(f"\n  {worst(own, other)}" for own, other in zip(laws, others, strict=True)),
    )
    return f"two stages, log Λ {evidence:.1f} of {alarm:.1f}"


def counted(case: Case, batch: Batch, tokens: int, repeat: int) -> list[Counter]:
    """The texts of each prompt, cut after so many tokens, drawn with the keys of a repetition."""
    seed = int(case.draws.generator("repeats", repeat).integers(0, 2**31 - 1))
    keys = jax.random.split(jax.random.key(seed), case.rows)
    out = jax.device_get(decode(case, dataclasses.replace(batch, keys=keys)))
    begins = np.repeat(batch.lengths, case.num_samples)
    invariants(case, out, begins)
    where = np.minimum(begins[:, None] + np.arange(tokens), out.tokens.shape[1] - 1)
    new = np.take_along_axis(out.tokens, where, axis=1)
    new = np.where(np.arange(tokens) < (out.lengths - begins)[:, None], new, -1)
    found = []
    for part in np.split(new, len(batch.prompts)):
        texts, times = np.unique(part, axis=0, return_counts=True)
        rows = zip(texts.tolist(), times.tolist(), strict=True)
        found.append(Counter({tuple(t for t in text if t >= 0): n for text, n in rows}))
    return found


def joint(model: Model, prompt, tokens: int, settings: RowSettings, stops) -> Texts | None:
    """The probability of each text of so many tokens, or fewer where it ends; None: not sure."""
    texts: Texts = {(): 1.0}
    for depth in range(tokens):
        longer: Texts = {}
        for text, share in texts.items():
            if len(text) < depth or (text and text[-1] in stops):
                longer[text] = share
                continue
            logits, certain = model.logits([*prompt, *text])
            p, sure = law(adjusted(logits[-1], settings, prompt, text), settings)
            if not (sure and certain[-1]):
                return None
            if not p.any():
                longer[text] = share
            longer |= {(*text, int(x)): share * p[x] for x in np.flatnonzero(p)}
        texts = longer
    return texts


def possible(own: Texts, counts: Counter) -> None:
    wrong = {text: n for text, n in counts.items() if text not in own}
    check(not wrong, f"texts that have no probability were drawn: {wrong}")


def oddness(own: Texts, counts: Counter) -> float:
    """The p-value of chi-squared."""
    total = counts.total()
    expected = np.asarray([*own.values()]) * total
    found = np.asarray([counts[text] for text in own])
    some = expected > FEW
    left = expected[~some].sum()
    value = ((found[some] - expected[some]) ** 2 / expected[some]).sum()
    value += (found[~some].sum() - left) ** 2 / max(left, FEW)
    return float(chdtrc(max(1, int(some.sum())), value))


def hypothesis(own: Texts, counts: Counter) -> Texts:
    """Another law: between p and the shares of the first texts, nearer to these the odder they are
    (the shrinkage of James and Stein)."""
    total, cells = counts.total(), len(own)
    p = np.asarray([*own.values()])
    shares = np.asarray([counts[text] for text in own]) / total
    excess = total * ((shares - p) ** 2 / p).sum()
    weight = np.clip(1 - cells / max(excess, 1e-9), 0.1, 0.9)
    return dict(zip(own, (1 - weight) * p + weight * shares, strict=True))


def worst(own: Texts, other: Texts) -> str:
    """The texts whose share is furthest from its probability."""
    order = sorted(own, key=lambda text: -abs(other[text] - own[text]))[:4]
    return ", ".join(f"{text} {own[text]:.4f} became {other[text]:.4f}" for text in order)
