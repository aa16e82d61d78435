"""Is a rule, or another engine, lossless? Held against the exact law of a small model.

``audit_rule`` enumerates what a rule says on toys, and where that is impossible draws many texts
with the whole loop. ``audit_samples`` holds texts that were drawn elsewhere against a model's law.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, trees
from ..decoding import reference
from ..drafters import DraftModel
from ..models.lm import LM
from ..sampling.distribution import Sampling
from ..types import Rule, Scores, Target
from . import exact_law
from .audit_report import AuditReport, Finding, sampled_finding
from .rescoring import scores_of_new
from .sampled_law import Evidence, joint_counts, judge

EXACT = 1e-5  # total variation that float32 may leave of an enumerated law
SHAPES = {
    "a chain of 3": (-1, 0, 1, 2),
    "2 siblings": (-1, 0, 0),
    "a tree of 5": (-1, 0, 0, 1, 1, 2),
}
WAYS = ("iid", "distinct", "hub")
BINS, PAIRED = 20, 5  # of ranks, and of the ranks of two tokens in a row
LEAST_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Bigram(Target):
    """A toy: logits by the last token alone, ``params`` float32 ``[V, V]``."""

    vocab_size: int

    def init(self, params, batch, capacity, inputs=None):
        return jnp.zeros((batch, 1))

    def verify(
        self, params, cache, draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        return Scores(logits=params[draft.tokens[:, since:]], features=None, entries=cache)

    def commit(self, cache, entries, start, verdict):
        return cache


def audit_rule(
    rule: str | Rule, *, samples: int = 200_000, false_alarm: float = 1e-3, laws: int = 3
) -> AuditReport:
    """Holds an acceptance rule against the exact law, for each shape of draft that it admits.

    Where the rule tests each node at most once, by a uniform of ``sampling.drawing.uniforms`` and a
    threshold that the draft determines, all drafts times all outcomes of its tests are enumerated.
    Otherwise (noise shared with drafters, uniforms of its own) the whole loop draws texts of three
    tokens, held against the law by chi-squared.

    Args:
      rule: a name, or an object; its ``check`` says which drafts it admits.
      samples: texts drawn for each shape of draft that cannot be enumerated.
      false_alarm: probability that a sound rule is called biased, over all shapes.
      laws: pairs of random laws that are enumerated for each shape.

    Returns:
      ``AuditReport``: one finding for each comparison, and ``biased``.

    Raises:
      ValueError: an unknown rule, a number out of range, or a rule that admits no draft at all.

    Example::

        print(specjax.audit_rule("rejection"))
    """
    found = acceptance.named(rule)
    if found is None:
        raise ValueError("rule='auto' stands for other rules: name one, or give an object")
    if samples < 1000 or not 0 < false_alarm < 1 or laws < 1:
        raise ValueError(
            f"samples={samples}, false_alarm={false_alarm}, laws={laws}: samples must be at least "
            "1000, false_alarm in (0, 1), laws at least 1"
        )
    admitted, refused = [], []
    for shape, topology in SHAPES.items():
        for way in WAYS:
            if way == "hub" and max(map(topology.count, topology)) > 2:
                continue
            if way != "iid" and (topology == SHAPES["a chain of 3"] or found.noise is not None):
                continue  # without siblings, or with shared noise, all ways are one
            draft, weights = exact_law.drafts(exact_law.Table(100), topology, way)
            try:
                found.check(draft, False)
                admitted.append((f"{shape}, drawn {way}", topology, way))
            except ValueError as error:
                refused.append(str(error))
    if not admitted:
        raise ValueError(f"rule={found.name!r} admits none of the drafts: {refused[0]}")
    share = false_alarm / len(admitted)
    findings = [
        _enumerated(found, *case, laws) or _sampled(found, *case, samples, share)
        for case in admitted
    ]
    return AuditReport(
        subject=f"rule {found.name}",
        findings=tuple(findings),
        false_alarm=false_alarm,
        refused=tuple(dict.fromkeys(refused)),
    )


def _enumerated(rule, what, topology, way, laws) -> Finding | None:
    """The finding of an enumeration; None for a rule that cannot be enumerated."""
    if rule.noise is not None:
        return None
    worst = 0.0
    for seed in range(laws):
        p = exact_law.Table(seed)
        draft, weights = exact_law.drafts(exact_law.Table(seed + 100), topology, way)
        depth = trees.max_depth(draft)
        law = None
        for enumerate_ in (exact_law.outcome, exact_law.saying):
            try:
                law = enumerate_(rule, draft, weights, p, depth)[0]
            except Exception:  # noqa: BLE001, a rule of another kind fails in any way
                continue
            if abs(law.sum() - 1) < EXACT:
                break
            law = None
        if law is None:
            return None
        worst = max(worst, exact_law.distance(law, p))
    return Finding(what=what, biased=worst > EXACT, variation=worst)


def _sampled(rule, what, topology, way, samples, false_alarm) -> Finding:
    """The finding of texts of three tokens, which the whole loop draws on a toy of four tokens."""
    vocab, prompt, sampling = 4, (1,), Sampling(temperature=1.0)
    p, q = (jnp.asarray(_bigrams(seed, vocab)) for seed in (0, 100))
    target = Bigram(vocab)
    drafter = DraftModel(model=target, topology=trees.as_topology(topology), sibling_sampling=way)
    params = {"target": p, "drafter": q}
    counts, _ = joint_counts(target, drafter, rule, params, prompt, 3, sampling, rows=samples)
    law = reference.joint_law(target, p, prompt, 3, sampling).reshape(-1)
    return sampled_finding(what, judge(counts, law), false_alarm)


def _bigrams(seed, vocab):
    return 1.5 * np.random.default_rng(seed).standard_normal((vocab, vocab)).astype(np.float32)


# ----------------------------------------------------------------- samples of another engine


def audit_samples(
    lm: LM,
    samples: Sequence[tuple[str | Sequence[int], Sequence[int]]],
    *,
    sampling: Sampling = Sampling(temperature=1.0),
    false_alarm: float = 1e-3,
    seed: int = 0,
    batch: int = 16,
) -> AuditReport:
    """Holds texts that were drawn elsewhere against the law of a model.

    Under the model's law three things are known of each token, given those before it: its place in
    the law, counted from the most probable token on, is uniform (``ranks``); it is independent of
    the place of the token before (``pairs``); and after equal beginnings tokens have the law's
    shares (``tokens``). Each is tested by chi-squared, at a third of the false-alarm rate.

    Args:
      lm: a model, small enough to be run here; its weights are those that the engine had.
      samples: prompts (text or token ids) and the token ids that the engine appended to each. Texts
        cut at a stop or a budget are welcome; chosen ones (the best of several) are not.
      sampling: the engine's settings, the same for all samples; none that look at earlier tokens.
      false_alarm: probability that a sound engine is called biased.
      seed: of the places within a token's probability, which are drawn.
      batch: rows scored at once.

    Returns:
      ``AuditReport``: one finding for each comparison, and ``biased``.

    Raises:
      ValueError: too few tokens to say anything, token ids that the model does not have, settings
        that look at earlier tokens, or a false-alarm rate out of range.
    """
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm={false_alarm} must be in (0, 1)")
    if sampling.needs_prefix:
        raise ValueError(
            "sampling: penalties and logits processors look at earlier tokens; audit samples that "
            "were drawn without them"
        )
    rows = [(_ids(lm, prompt), [int(t) for t in new]) for prompt, new in samples]
    rows = [(prompt, new) for prompt, new in rows if new]
    total, vocab = sum(len(new) for _, new in rows), lm.target.vocab_size
    least = 1 if sampling.greedy else LEAST_TOKENS
    if total < least:
        raise ValueError(
            f"samples: {total} tokens say nothing; give at least {least}, and 20,000 or more to "
            "find a small bias"
        )
    worst = max(max(new) for _, new in rows)
    if worst >= vocab or min(min(new) for _, new in rows) < 0:
        raise ValueError(
            f"samples: token ids up to {worst}, and {lm.name} has {vocab} tokens: the samples are "
            "of another tokenizer"
        )
    subject = f"{len(rows)} samples, {total:,} tokens, against the law of {lm.name}"
    laws = _laws(lm, rows, sampling, batch)
    if sampling.greedy:
        return AuditReport(subject, (_greedy(rows, laws),), false_alarm)
    findings = _tests(rows, laws, np.random.default_rng(seed), false_alarm / 3)
    return AuditReport(subject=subject, findings=tuple(findings), false_alarm=false_alarm)


def _ids(lm: LM, prompt) -> list[int]:
    if not isinstance(prompt, str):
        return [int(t) for t in prompt]
    if lm.tokenizer is None:
        raise ValueError(f"samples: {lm.name} has no tokenizer; give prompts as token ids")
    return [int(t) for t in lm.tokenizer.encode(prompt)]


def _laws(lm: LM, rows, sampling: Sampling, batch: int):
    """Yields for each row float64 ``[T, V]``, the law of each of its T tokens."""
    law = jax.jit(lambda logits: sampling.rows(len(logits)).probabilities(logits))
    longest = max(len(new) for _, new in rows)
    for logits in scores_of_new(lm, rows, batch):
        size = len(logits)
        padded = np.pad(logits, ((0, longest - size), (0, 0)))
        yield np.asarray(law(padded))[:size].astype(np.float64)


def _greedy(rows, laws) -> Finding:
    """The share of tokens that are not the most probable one."""
    wrong = total = 0
    for (_, new), law in zip(rows, laws, strict=True):
        wrong, total = wrong + int((law.argmax(axis=1) != new).sum()), total + len(new)
    share = wrong / total
    return Finding(
        what=f"{wrong} of {total:,} tokens are not the model's most probable one",
        biased=wrong > 0,
        variation=share,
        samples=total,
        p_value=float(wrong == 0),
    )


def _tests(rows, laws, random, false_alarm):
    places, pairs, after = [], Counter(), {}
    impossible = 0
    for (prompt, new), law in zip(rows, laws, strict=True):
        law /= np.maximum(law.sum(axis=1, keepdims=True), 1e-30)
        own = law[np.arange(len(new)), new]
        impossible += int((own == 0).sum())
        # equal probabilities stand in the order of their tokens
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
    """One judgement over several laws, each weighted by its samples."""
    total = sum(counts.total() for _, counts in many)
    shares = np.concatenate([[counts[x] for x in range(len(law))] for law, counts in many])
    laws = np.concatenate([law * counts.total() / total for law, counts in many])
    return judge(shares, laws)
