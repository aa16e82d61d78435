"""The findings of an audit, as data and as text."""

from __future__ import annotations

import dataclasses

from .sampled_law import Evidence

POWER = 0.99  # the probability with which a deviation above the stated resolution is found


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison with an exact law.

    Attributes:
      what: the name of the compared quantity.
      biased: whether it deviates from its law.
      variation: total variation to the law. After an enumeration it is exact. From samples it is a
        lower bound, which is wrong with at most the false-alarm rate; if no deviation was found, it
        is the deviation that would have been found with probability ``POWER``.
      samples: the number of samples; 0 after an enumeration.
      p_value: the p-value of the chi-squared test; None after an enumeration.
    """

    what: str
    biased: bool
    variation: float
    samples: int = 0
    p_value: float | None = None

    def __str__(self) -> str:
        if not self.samples:
            said = f"BIASED: TV {self.variation:.3g}" if self.biased else "exact: TV below 1e-5"
            return f"{self.what}: {said} (enumerated)"
        count = f"{self.samples:,} samples, p = {self.p_value:.2g}"
        if self.biased:
            least = f"TV at least {self.variation:.3g}" if self.variation > 0 else "TV above 0"
            return f"{self.what}: BIASED: {least} ({count})"
        return f"{self.what}: no deviation above TV {self.variation:.3g} was found ({count})"


def sampled_finding(what: str, evidence: Evidence, false_alarm: float) -> Finding:
    """Returns the finding of a chi-squared test.

    Args:
      what: the name of the compared quantity.
      evidence: the result of the test.
      false_alarm: the false-alarm rate.
    """
    biased = not evidence.fits(false_alarm)
    return Finding(
        what=what,
        biased=biased,
        variation=evidence.least(false_alarm)
        if biased
        else evidence.resolution(false_alarm, POWER),
        samples=evidence.samples,
        p_value=evidence.p_value,
    )


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The findings of an audit; prints as a list with a verdict.

    Attributes:
      subject: the name of the audited rule or samples.
      findings: one finding for each comparison.
      refused: the errors with which the rule refused shapes of drafts.
      false_alarm: the probability that a lossless subject is reported as biased, over all findings.
      beyond: what the audit did not look at, in words; empty: nothing.
    """

    subject: str
    findings: tuple[Finding, ...]
    false_alarm: float
    refused: tuple[str, ...] = ()
    beyond: str = ""

    @property
    def biased(self) -> bool:
        """Whether any finding deviates from its law."""
        return any(finding.biased for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.subject}", *(f"  {finding}" for finding in self.findings)]
        lines += [f"  refused: {words}" for words in self.refused]
        sampled = any(finding.samples for finding in self.findings)
        odds = f" (false-alarm rate {self.false_alarm:g}, power {POWER:g})" if sampled else ""
        worst = max((f.variation for f in self.findings if f.biased), default=0.0)
        if self.biased:
            lines.append(f"verdict: biased: TV at least {worst:.3g}{odds}")
        else:
            exact = dict.fromkeys(f.what.partition(",")[0] for f in self.findings if not f.samples)
            words = [f"exact on {', '.join(exact)} if all draws are independent"] if exact else []
            if sampled:
                most = max(f.variation for f in self.findings if f.samples)
                words.append(f"no deviation above TV {most:.3g} was found{odds}")
            beyond = f"; {self.beyond}" if self.beyond else ""
            lines.append(f"verdict: {'; sampled: '.join(words)}{beyond}")
        return "\n".join(lines)
