"""What an approximate rule costs in quality, beside what it gains in tokens a pass."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from .. import acceptance
from ..models.lm import LM
from ..text.generation import generate
from ..text.options import Drafting, Options, Prompts, options_from, takes
from ..text.prepare import with_bias
from ..text.session import Session
from ..types import Rule
from .rescoring import scores_of_new

REPEATS = 40  # draws from the target's own law, from which the part of noise is known


@dataclasses.dataclass(frozen=True)
class RuleQuality:
    """What one rule wrote, by the target's own scores.

    Attributes:
      rule: its name; ``plain`` for plain decoding, which all are to be compared with.
      approximate: why the law is not the target's, empty where it is.
      tau: tokens emitted by a pass of the target.
      loglik: mean ``log p`` (nats) of the written tokens, by the target at temperature 1.
      best: share of written tokens that are the target's most probable one.
      rank: mean number of tokens that are more probable than the written one.
      same: at temperature 0, share of texts that are those of plain decoding; else None.
      variation: mean total variation of the emitted law to the target's, over the probes, with what
        noise alone makes of it; at temperature 0 the share of tokens that are not the best one.
      divergence: mean KL of the emitted law to the target's (nats), with the part of noise; None at
        temperature 0, and where a token was emitted to which the target gives no probability.
    """

    rule: str
    approximate: str
    tau: float
    loglik: float
    best: float
    rank: float
    same: float | None
    variation: tuple[float, float]
    divergence: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class Quality:
    """Rules beside plain decoding, from ``quality``; prints as a table."""

    model: str
    drafting: str
    num_probes: int
    probe_samples: int
    rules: tuple[RuleQuality, ...]

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.drafting}"]
        lines.append(
            f"{'rule':42} {'τ':>5} {'log p':>7} {'best':>5} {'rank':>6} {'same':>5} "
            f"{'TV':>6} {'(noise)':>7} {'KL':>7} {'(noise)':>7}"
        )
        for one in self.rules:
            same = "-" if one.same is None else f"{one.same:.0%}"
            kl, floor = ("-", "-")
            if one.divergence is not None:
                kl, floor = (f"{x:.4f}" for x in one.divergence)
            lines.append(
                f"{one.rule:42} {one.tau:5.2f} {one.loglik:7.3f} {one.best:5.0%} {one.rank:6.2f} "
                f"{same:>5} {one.variation[0]:6.3f} {one.variation[1]:7.3f} {kl:>7} {floor:>7}"
            )
        if self.num_probes:
            lines.append(
                f"TV and KL of the next token's law at {self.num_probes} places, "
                f"{self.probe_samples} draws each; (noise): of as many draws from the target itself"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityOptions(Options):
    """The options of ``quality``."""

    rules: Sequence[str | Rule] = ("auto", "approximate-typical", "approximate-lenience")
    probes: int = 2
    probe_samples: int = 256


@takes(QualityOptions)
def quality(lm: LM, prompts: Prompts, *, options: QualityOptions) -> Quality:
    """Decodes the same prompts with each rule and plainly, and scores the texts by the target.

    Above temperature 0 the law that a rule emits is compared with the target's where it can be
    counted: after each prompt, and at further places of its plain text, the next token is drawn
    ``probe_samples`` times. This is the law of the first token of a round.

    Args:
      lm, prompts, drafter, drafting, sampling, ...: as ``generate`` takes them; ``drafting.rule``
        is replaced by each of ``rules``.
      rules: names, with settings after a colon (``approximate-lenience:scale=0.3``), or objects.
      probes: places in each text at which the emitted law is counted; 0: none.
      probe_samples: draws at each place.

    Returns:
      ``Quality``, plain decoding first.

    Raises:
      ValueError: before anything is compiled: no rules, a number out of range, settings that look
        at earlier tokens, a seed or setting for each prompt, or a session.

    Example::

        print(specjax.quality(lm, "def f(x):", rules=["approximate-top-k:k=3"]))
    """
    sampling = options.sampling
    if not options.rules or options.probes < 0 or options.probe_samples < 2:
        raise ValueError(
            f"rules={options.rules!r}, probes={options.probes}, probe_samples="
            f"{options.probe_samples}: give at least one rule, no negative number of probes, and "
            "at least 2 samples"
        )
    if sampling.needs_prefix or options.num_samples != 1 or options.inputs is not None:
        raise ValueError(
            "quality scores texts by the target's own law: give no penalties, no logits processor, "
            "no inputs, and num_samples=1"
        )
    _refuse_unfair(options)
    plain = dataclasses.replace(options, drafter="none", drafter_params=None, drafting=Drafting())
    runs = [("plain", plain)]
    for rule in options.rules:
        acceptance.named(rule)
        drafting = dataclasses.replace(options.drafting, rule=rule)
        name = rule if isinstance(rule, str) else repr(rule)
        runs.append((name, dataclasses.replace(options, drafting=drafting)))
    written = {name: generate(lm, prompts, **_given(one)) for name, one in runs}
    first = written["plain"]
    places = [] if sampling.greedy else _places(first, options.probes)
    laws = _target_laws(lm, places, with_bias(lm, sampling))
    found = []
    for name, one in runs:
        out = written[name]
        logp, rank = _scored(lm, out)
        same = None
        if sampling.greedy:
            pairs = zip(out.tokens, first.tokens, strict=True)
            same = float(np.mean([np.array_equal(a, b) for a, b in pairs]))
            variation, divergence = (float((rank > 0).mean()), 0.0), None
        else:
            variation, divergence = _probed(lm, places, laws, one)
        found.append(
            RuleQuality(
                rule=name,
                approximate=out.stats.approximate,
                tau=out.stats.tau,
                loglik=float(logp.mean()),
                best=float((rank == 0).mean()),
                rank=float(rank.mean()),
                same=same,
                variation=variation,
                divergence=divergence,
            )
        )
    return Quality(
        model=lm.name,
        drafting=f"{written[runs[-1][0]].stats.drafter} drafts",
        num_probes=len(places),
        probe_samples=options.probe_samples,
        rules=tuple(found),
    )


def _refuse_unfair(options: QualityOptions) -> None:
    """Raises ``ValueError`` for a law of each prompt and for a drafter that learns."""
    ranks = {name: 0 for name in ("temperature", "top_k", "top_p", "min_p")} | {"logit_bias": 1}
    wrong = [n for n, rank in ranks.items() if np.ndim(getattr(options.sampling, n)) > rank]
    wrong += ["seed"] if np.ndim(options.seed) else []
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: quality compares one law over all prompts; give one value "
            "instead of one for each prompt"
        )
    if isinstance(options.drafter, Session) and not options.drafter.asks:
        raise ValueError(
            "drafter: a session takes in what one rule writes and drafts it for the next; give "
            "its drafter alone, such as 'suffix'"
        )


def _given(options: QualityOptions) -> dict:
    """``options`` as ``generate`` takes them."""
    shared = options_from(options)
    return {field.name: getattr(shared, field.name) for field in dataclasses.fields(shared)}


def _scored(lm: LM, out) -> tuple[np.ndarray, np.ndarray]:
    """``log p`` of all written tokens at temperature 1, and how many tokens are more probable."""
    rows = [(p.tolist(), t.tolist()) for p, t in zip(out.prompts, out.tokens, strict=True)]
    rows, logp, rank = [row for row in rows if row[1]], [], []
    for (_, new), logits in zip(rows, scores_of_new(lm, rows), strict=True):
        own = np.take_along_axis(logits, np.asarray(new)[:, None], axis=1)
        top = logits.max(axis=1, keepdims=True)
        logp.append((own - top)[:, 0] - np.log(np.exp(logits - top).sum(axis=1)))
        rank.append((logits > own).sum(axis=1))
    return np.concatenate(logp), np.concatenate(rank)


def _places(out, probes: int) -> list[list[int]]:
    """Token ids of prompts with beginnings of their texts, evenly spread."""
    places = []
    for prompt, new in zip(out.prompts, out.tokens, strict=True):
        ends = {len(new) * i // max(probes, 1) for i in range(probes)}
        places += [[*prompt.tolist(), *new[:end].tolist()] for end in sorted(ends)]
    return places


def _target_laws(lm: LM, places, sampling) -> list[np.ndarray]:
    """float64 ``[V]``, the law of the token after each of ``places``."""
    law = jax.jit(lambda logits: sampling.rows(1).probabilities(logits))
    scores = scores_of_new(lm, [(place, [0]) for place in places])
    laws = [np.asarray(law(logits), np.float64)[0] for logits in scores]
    return [p / p.sum() for p in laws]


def _probed(lm: LM, places, laws, options: QualityOptions):
    """``(TV, its noise)`` and ``(KL, its noise)`` of the emitted law, means over the places."""
    if not places:
        return (float("nan"), float("nan")), None
    count, random = options.probe_samples, np.random.default_rng(0)
    one = dict(num_samples=count, max_new_tokens=1, stop=(), stop_strings=None)
    once = dataclasses.replace(options, **one)
    out = generate(lm, places, **_given(once))
    tokens = [int(row[0]) if len(row) else -1 for row in out.tokens]
    found, noise = [], []
    for i, p in enumerate(laws):
        seen = Counter(tokens[i * count : (i + 1) * count])
        shares = np.bincount(list(seen.elements()), minlength=len(p)) / count
        found.append(_distances(shares, p))
        drawn = random.multinomial(count, p, REPEATS) / count
        noise.append(np.mean([_distances(x, p) for x in drawn], axis=0))
    (tv, kl), (tv_noise, kl_noise) = np.mean(found, axis=0), np.mean(noise, axis=0)
    finite = np.isfinite(kl)
    return (float(tv), float(tv_noise)), (float(kl), float(kl_noise)) if finite else None


def _distances(shares: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Total variation, and KL of ``shares`` to ``p`` (nats)."""
    some = shares > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(shares[some]) - np.log(p[some])
    return 0.5 * float(np.abs(shares - p).sum()), float((shares[some] * ratio).sum())
