"""Tests whether a rule, or another engine, is lossless, by the exact law of a small model.

``audit_rule`` enumerates what a rule says on toys, and runs the rule with its own random numbers;
where enumeration is impossible, it draws many texts with the whole loop. ``audit_samples`` holds
texts that were drawn elsewhere against a model's law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, trees
from ..decoding import reference
from ..drafters import DraftModel
from ..models.lm import LM
from ..sampling.distribution import Sampling
from ..trees.ops import whole
from ..types import Rule, Scores, Target
from . import exact_law
from .audit_cases import FIXED, Case, cases
from .audit_report import AuditReport, Finding, sampled_finding
from .rescoring import scores_of_new
from .sampled_law import joint_counts, judge, round_counts
from .token_tests import LEAST_TOKENS, token_findings

EXACT = 1e-5  # the greatest total variation of an enumerated law that float32 explains
LEAST_SAMPLES = 1000
LEAST_NUM = 3  # tokens at least of a text that the loop draws, so that there are further rounds


@dataclasses.dataclass(frozen=True)
class BigramTarget(Target):
    """A toy whose logits depend on the last token alone; ``params`` are float32 ``[V, V]``."""

    vocab_size: int

    def init(self, params, batch, capacity, inputs=None):
        return jnp.zeros((batch, 1))

    def verify(
        self, params, cache, draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        return Scores(logits=params[draft.tokens[:, since:]], features=None, entries=cache)

    def commit(self, cache, entries, start, verdict):
        return cache


def audited_rule(rule: str | Rule) -> Rule:
    """Returns the rule that ``audit_rule`` audits. Raises ValueError as ``acceptance.named`` does,
    and for ``"auto"``."""
    found = acceptance.named(rule)
    if found is None:
        raise ValueError("rule='auto' stands for other rules: give the name of a rule or an object")
    return found


def audit_rule(
    rule: str | Rule,
    *,
    samples: int = 200_000,
    false_alarm: float = 1e-3,
    laws: int = 3,
    shapes: Sequence[str] = (),
) -> AuditReport:
    """Compares an acceptance rule with the exact law, for each shape of draft that it admits.

    The shapes are chains of 3 and 5, two siblings and a tree of 5 nodes; drafts are drawn in each
    way, are point masses, or have nodes that may not be accepted (passengers, unscored nodes). A
    bias that begins deeper, or needs more siblings, is found only if ``shapes`` adds such a draft.

    Where the rule tests each node at most once, by a uniform of ``sampling.drawing.uniforms`` and a
    threshold that the draft determines, all tokens of the drafts times all outcomes of its tests
    are enumerated, as if all random numbers were independent. Rounds with the rule's own random
    numbers, held against the law by chi-squared, then show whether a uniform is used twice. Other
    rules are only sampled. With noise shared with drafters the whole loop draws texts that are one
    token longer than the deepest path of the draft (the token after a draft that was accepted whole
    included), on drawn drafts; with uniforms of the rule's own it does so where it can, and single
    rounds are run on the other drafts.

    Args:
      rule: a name, or an object; its ``check`` says which drafts it admits.
      samples: texts drawn for each shape of draft.
      false_alarm: probability that a sound rule is called biased, over all shapes.
      laws: pairs of random laws that are enumerated for each shape.
      shapes: further trees of at most ten drafted tokens, such as ``"chain:8"`` and ``"3x1"``, on
        which the rule is sampled, with drafts that were drawn independently.

    Returns:
      an ``AuditReport`` with one finding for each comparison.

    Raises:
      ValueError: the rule is unknown, a number is out of range, or the rule admits none of the
        drafts.

    Example::

        print(specjax.audit_rule("rejection"))
    """
    found = audited_rule(rule)
    if samples < LEAST_SAMPLES:
        raise ValueError(
            f"samples={samples}: give at least {LEAST_SAMPLES} for each shape of draft; fewer "
            "texts say nothing of a law"
        )
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm={false_alarm}: it must be between 0 and 1, such as 0.001")
    if laws < 1:
        raise ValueError(f"laws={laws}: give at least 1")
    admitted, refused = [], []
    for case in cases(found, shapes):
        try:
            found.check(case.drafts(case.laws(0)[1])[0], False)
            admitted.append(case)
        except ValueError as error:
            refused.append(str(error))
    if not admitted:
        raise ValueError(f"rule={found.name!r} admits none of the drafts: {refused[0]}")
    share, findings, ran = false_alarm / len(admitted), [], set()
    for case in admitted:
        exact = None if case.further else _enumerated(found, case, laws)
        if exact is not None:
            findings.append(exact)
            like = (case.shape, case.kind == FIXED, case.masked)
            if exact.biased or like in ran:
                continue  # which uniforms a rule uses does not depend on how siblings were drawn
            ran.add(like)
        elif case.looped and (found.noise is not None or not case.further):
            findings.append(_sampled(found, case, samples, share))
            continue
        findings.append(_run(found, case, samples, share))
    return AuditReport(
        subject=f"rule {found.name}",
        findings=tuple(findings),
        false_alarm=false_alarm,
        refused=tuple(dict.fromkeys(refused)),
        beyond="larger drafts were not looked at",
    )


def _enumerated(rule, case: Case, laws: int) -> Finding | None:
    """The finding of an enumeration; None for a rule that cannot be enumerated."""
    if rule.noise is not None:
        return None
    worst = 0.0
    for seed in range(laws):
        p, q = case.laws(seed)
        draft, weights = case.drafts(q)
        law = None
        for enumerate_ in (exact_law.outcome, exact_law.saying):
            try:
                law = enumerate_(rule, draft, weights, p, case.depth)[0]
            except Exception:  # noqa: BLE001, a rule of another kind fails in any way
                continue
            if abs(law.sum() - 1) < EXACT:
                break
            law = None
        if law is None:
            return None
        worst = max(worst, exact_law.distance(law, p))
    return Finding(what=str(case), biased=worst > EXACT, variation=worst)


def _run(rule, case: Case, samples: int, false_alarm: float) -> Finding:
    """The finding of single rounds with the rule's own random numbers."""
    p, q = case.laws(0)
    draft, weights = case.drafts(q)
    counts = round_counts(rule, draft, weights, p, case.depth, rows=samples)
    law = np.append(exact_law.joint(p, case.depth + 1).reshape(-1), 0.0)
    return sampled_finding(f"{case}, with random keys", judge(counts, law), false_alarm)


def _sampled(rule, case: Case, samples: int, false_alarm: float) -> Finding:
    """The finding of texts that the whole loop draws on a toy of four tokens, or of two where the
    draft is long; they reach the token after a draft that was accepted whole."""
    vocab, prompt, sampling = 2 if case.vocab == 2 else 4, (1,), Sampling(temperature=1.0)
    num = max(LEAST_NUM, case.depth + 1)
    p, q = (jnp.asarray(_bigrams(seed, vocab)) for seed in (0, 100))
    target = BigramTarget(vocab)
    topology = trees.as_topology(case.topology)
    drafter = DraftModel(model=target, topology=topology, sibling_sampling=case.kind)
    params = {"target": p, "drafter": q}
    counts, _ = joint_counts(target, drafter, rule, params, prompt, num, sampling, rows=samples)
    law = reference.joint_law(target, p, prompt, num, sampling).reshape(-1)
    return sampled_finding(str(case), judge(counts, law), false_alarm)


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
    """Compares texts that another engine drew with the law of a model.

    The place of a token is the cumulative probability at which it lies when the vocabulary is
    sorted by probability, a uniform draw within the token's own share. If the engine is lossless,
    the places are uniform (finding ``ranks``), the place of a token is independent of the place of
    the token before it (``pairs``), and after equal prefixes tokens occur with the frequencies of
    the law (``tokens``). Each property is tested by chi-squared at a third of the false-alarm rate.

    Args:
      lm: the model, with the weights that the engine had.
      samples: for each sample the prompt (text or token ids) and the token ids that the engine
        appended. Texts that were cut at a stop or a budget can be used; selected texts (the best of
        several) cannot.
      sampling: the engine's settings, the same for all samples, without penalties and logits
        processors.
      false_alarm: the probability that a lossless engine is reported as biased.
      seed: the seed of the draws within the tokens' shares.
      batch: the number of rows in a pass of the model.

    Returns:
      an ``AuditReport`` with one finding for each comparison.

    Raises:
      ValueError: there are too few tokens, a prompt is empty, a token id is no whole number or not
        in the vocabulary, a sample is longer than the model's context, the settings depend on
        earlier tokens, or the false-alarm rate is out of range.
    """
    if not 0 < false_alarm < 1:
        raise ValueError(f"false_alarm={false_alarm} must be in (0, 1)")
    if sampling.needs_prefix:
        raise ValueError(
            "sampling: penalties and logits processors depend on earlier tokens; audit samples "
            "that were drawn without them"
        )
    rows = [_row(lm, number, *sample) for number, sample in enumerate(samples, start=1)]
    rows = [(prompt, new) for prompt, new in rows if new]
    total = sum(len(new) for _, new in rows)
    least = 1 if sampling.greedy else LEAST_TOKENS
    if total < least:
        raise ValueError(
            f"samples: {total} tokens are too few; give at least {least}, and 20,000 or more to "
            "find a small bias"
        )
    subject = f"{len(rows)} samples, {total:,} tokens, against the law of {lm.name}"
    laws = _laws(lm, rows, sampling, batch)
    if sampling.greedy:
        return AuditReport(subject, (_greedy(rows, laws),), false_alarm)
    findings = token_findings(rows, laws, np.random.default_rng(seed), false_alarm / 3)
    return AuditReport(subject=subject, findings=tuple(findings), false_alarm=false_alarm)


def _row(lm: LM, number: int, prompt, new) -> tuple[list[int], list[int]]:
    """Returns the token ids of a sample's prompt and its new ones.

    Args:
      lm: the model.
      number: of the sample, counted from 1, for the error.
      prompt, new: see ``audit_samples``.

    Raises:
      ValueError: the model cannot have written the sample.
    """
    which, vocab, context = f"samples: sample {number}", lm.target.vocab_size, lm.max_positions
    if isinstance(prompt, str):
        if lm.tokenizer is None:
            raise ValueError(f"{which}: {lm.name} has no tokenizer; give prompts as token ids")
        prompt = lm.tokenizer.encode(prompt)
    prompt, new = ([whole(token, which) for token in tokens] for tokens in (prompt, new))
    if not prompt:
        raise ValueError(
            f"{which}: its prompt is empty, and the model's first law is that after a token; give "
            "at least the token with which the engine began"
        )
    for what, tokens in (("prompt", prompt), ("tokens", new)):
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong:
            raise ValueError(
                f"{which}: {what} has the token id {wrong[0]}, and {lm.name} has the token ids 0 "
                f"to {vocab - 1}: the sample is of another tokenizer; give the engine's model"
            )
    size = len(prompt) + len(new)
    if context is not None and size > context:
        raise ValueError(
            f"{which}: its prompt and its tokens are {size} tokens, and the context of {lm.name} "
            f"has {context}; leave the sample out, or cut its tokens"
        )
    return prompt, new


def _laws(lm: LM, rows, sampling: Sampling, batch: int):
    """Yields for each row float64 ``[T, V]``, the law of each of its T tokens."""
    law = jax.jit(lambda logits: sampling.rows(len(logits)).probabilities(logits))
    longest = max(len(new) for _, new in rows)
    for logits in scores_of_new(lm, rows, batch):
        size = len(logits)
        padded = np.pad(logits, ((0, longest - size), (0, 0)))
        yield np.asarray(law(padded))[:size].astype(np.float64)


def _greedy(rows, laws) -> Finding:
    """Returns the finding on the share of tokens that are not the most probable one."""
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
