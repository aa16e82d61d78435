"""Compares plain with speculative decoding of one request, both timed in turn in one process."""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from .. import acceptance
from .._internal.optional import required
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..text.generation import Generation, TextStream
from ..text.options import Drafting, Options, Prompts, takes
from ..text.prepare import prepare_fastest
from ..text.retrieval import Retrieval
from ..text.task import GenerationTask
from ..trees.ops import whole
from .rescoring import rated, scores_of_new
from .timing import median_interval

LEAST_REPETITIONS = 6  # with fewer runs, no interval for a median reaches 95 %


@dataclasses.dataclass(frozen=True)
class RulePrice:
    """What an approximate rule changed, by the target's own probabilities at temperature 1.

    Attributes:
      loglik: mean ``log p`` (nats) of the tokens of the speculative text.
      plain_loglik: the same of the text of plain decoding.
      best: share of the tokens of the speculative text that are the target's most probable one.
      rank: mean number of tokens that are more probable than the emitted one.
    """

    loglik: float
    plain_loglik: float
    best: float
    rank: float

    def __str__(self) -> str:
        return (
            f"log p {self.loglik:.3f} a token, plain {self.plain_loglik:.3f}; {self.best:.0%} of "
            f"the tokens are the target's most probable one, mean rank {self.rank:.2f}"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Plain beside speculative decoding of one request, from ``compare``; prints as a table.

    Attributes:
      model: name of the target.
      rule: name of the acceptance rule.
      drafting: the drafter, the size of its draft and the rule, as a text.
      plain: the text of plain decoding, from its first run.
      speculative: the text of speculative decoding, from its first run.
      plain_rate: emitted tokens per second of plain decoding, including the time to read the
        prompts, in the pair of runs with the median ratio.
      speculative_rate: emitted tokens per second of speculative decoding, in the same pair.
      ratio: speculative rate divided by plain rate, the median over the pairs of runs; above 1,
        speculation is faster.
      interval: lower and upper bound of the median ratio, by order statistics, which hold for any
        distribution of the noise.
      confidence: the probability that the interval contains the median, at least 0.95.
      identical: whether all tokens are the same; None where tokens are drawn at random, unless by
        the rule ``coupled``.
      repetitions: the number of pairs of runs.
      differing: the number of rows whose texts differ, divided by the number of tokens up to and
        including the first differing one of each row: the rate of tokens that flip, in [0, 1]. 0
        where ``identical`` is True or None.
      margins: for each of these rows the difference between the target's two greatest logits at
        the first differing token (raw logits, by one pass over the whole text); empty where the
        target has an encoder, or the settings depend on earlier tokens.
      price: what the rule changed, if it is approximate; None where it is lossless, where the
        target has an encoder, and where settings depend on earlier tokens.
    """

    model: str
    rule: str
    drafting: str
    plain: Generation
    speculative: Generation
    plain_rate: float
    speculative_rate: float
    ratio: float
    interval: tuple[float, float]
    confidence: float
    identical: bool | None
    repetitions: int
    differing: float = 0.0
    margins: tuple[float, ...] = ()
    price: RulePrice | None = None

    @property
    def repeated(self) -> float:
        """Share of repeated 4-grams in the speculative text. Text that repeats itself is easy to
        draft, so that a large share overstates the gain."""
        return repeated_ngrams(self.speculative.tokens)

    def __str__(self) -> str:
        low, high = self.interval
        verdict = "speculation wins" if low > 1 else "speculation loses: use plain decoding"
        if low <= 1 <= high:
            verdict = "these runs show no difference"
        lines = [
            f"{self.model}: plain decoding beside {self.drafting}",
            f"plain            {self.plain_rate:8,.1f} tokens/s",
            f"speculative      {self.speculative_rate:8,.1f} tokens/s",
            f"ratio            {self.ratio:8.2f}  [{low:.2f}, {high:.2f}] "
            f"(median of {self.repetitions} pairs of runs, {self.confidence:.0%} interval): "
            f"{verdict}",
            "                 (the rates above are those of the pair with the median ratio)",
            f"speculation      {self.speculative.stats}",
            f"repeated 4-grams {self.repeated:8.0%}",
            f"same text        {self._sameness()}",
        ]
        lines += [f"price            {self.price}"] * (self.price is not None)
        return "\n".join(lines)

    def _sameness(self) -> str:
        if self.identical is None:
            return "not expected: tokens are drawn at random from the same law"
        count = sum(map(len, self.plain.tokens))
        if self.identical:
            return f"yes, all {count} tokens"
        flips = f"NO, {self.differing:.2%} of the tokens flip"
        if self.margins:
            flips += (
                ", where the target's two greatest logits are "
                f"{min(self.margins):.2g} to {max(self.margins):.2g} apart"
            )
        if "approximate" in self.rule:
            return f"{flips}: the rule {self.rule} keeps other tokens than the target's"
        return (
            f"{flips}: a pass over several tokens is rounded differently from a pass over one "
            "token, which decides between two tokens that are nearly tied; in float32 this should "
            "not happen (--dtype float32)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """The options of ``compare``; its docstring explains them."""

    repetitions: int = 9


@takes(CompareOptions)
def compare(lm: LM, prompts: Prompts, *, options: CompareOptions) -> Comparison:
    """Decodes a request plainly and speculatively, in turn, ``repetitions`` times after a warm-up.

    Args:
      lm, prompts, drafter, drafting, sampling, ...: see ``generate``.
      repetitions: the number of pairs of runs, at least 6; which run of a pair is first alternates.
        Where tokens are drawn at random, each pair has a seed of its own.

    Returns:
      a ``Comparison`` with both texts, both rates in tokens per second, and the ratio of the rates
      with its interval.

    Raises:
      ValueError: before anything is compiled: there are too few repetitions, stop strings or a
        ``Retrieval`` with a session are given, or ``generate`` refuses an option.
      KeyboardInterrupt: after Ctrl-C, because incomplete texts cannot be compared.

    Example::

        print(specjax.compare(lm, "def f(x):", drafter="ngram"))
    """
    repetitions = whole(options.repetitions, "repetitions")
    if repetitions < LEAST_REPETITIONS:
        raise ValueError(
            f"repetitions={repetitions}: give at least {LEAST_REPETITIONS}; with fewer, no "
            "interval reaches 95 %"
        )
    if options.stop_strings:
        raise ValueError(
            "stop_strings: stop strings are found on the host, so the rates would count tokens "
            "after them; compare without stop strings, or in Python with the ids in stop="
        )
    if isinstance(options.drafter, Retrieval) and options.drafter.session is not None:
        raise ValueError(
            "drafter: this Retrieval has a session, which learns the answer in the first run and "
            "copies it in the others; compare with a Retrieval without a session"
        )
    rule = acceptance.named(options.drafting.rule)
    drafting, coupled = Drafting(), False
    if rule is not None and rule.noise == "position":  # one text with every drafter
        drafting, coupled = Drafting(rule=rule), True
    plain = dataclasses.replace(options, drafter=None, drafter_params=None, drafting=drafting)
    jobs = [prepare_fastest(lm, prompts, plain), prepare_fastest(lm, prompts, options)]
    texts = [TextStream(work).finish() for work in jobs]
    if not all(text.finished for text in texts):  # Ctrl-C: incomplete texts cannot be compared
        raise KeyboardInterrupt
    check_texts(texts[0])
    sampled = not jobs[0].request.sampling.greedy
    for work in jobs:
        whole_rate(work)
    rates = np.empty((repetitions, 2))
    for pair in range(repetitions):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            rates[pair, which] = whole_rate(jobs[which], pair if sampled else 0)
    ratios = rates[:, 1] / rates[:, 0]
    ratio, interval, confidence = median_interval(ratios)
    middle = np.argsort(ratios)[(repetitions - 1) // 2]  # the pair with the median ratio
    same = [np.array_equal(a, b) for a, b in zip(*(t.tokens for t in texts), strict=True)]
    identical = None if sampled and not coupled else all(same)
    rate, margins = _flips(lm, options, *texts) if identical is False else (0.0, ())
    return Comparison(
        model=lm.name,
        rule=jobs[1].rule_name,
        drafting=jobs[1].words,
        plain=texts[0],
        speculative=texts[1],
        plain_rate=float(rates[middle, 0]),
        speculative_rate=float(rates[middle, 1]),
        ratio=ratio,
        interval=interval,
        confidence=confidence,
        identical=identical,
        repetitions=repetitions,
        differing=rate,
        margins=margins,
        price=_price(lm, options, *texts),
    )


def _price(
    lm: LM, options: Options, plain: Generation, speculative: Generation
) -> RulePrice | None:
    """Returns ``Comparison.price``."""
    found = acceptance.named(options.drafting.rule)
    if found is None or acceptance.exact(found, options.sampling.greedy):
        return None
    if encoder_inputs.encodes(lm) or options.sampling.needs_prefix:
        return None
    (logp, rank), (own, _) = (rated(lm, text.prompts, text.tokens) for text in (speculative, plain))
    return RulePrice(
        float(logp.mean()), float(own.mean()), float((rank == 0).mean()), float(rank.mean())
    )


def _flips(
    lm: LM, options: Options, plain: Generation, speculative: Generation
) -> tuple[float, tuple[float, ...]]:
    """Returns ``Comparison.differing`` and ``Comparison.margins``."""
    compared, parted = 0, []
    rows = zip(plain.prompts, plain.tokens, speculative.tokens, strict=True)
    for prompt, one, other in rows:
        size = min(len(one), len(other))
        where = np.flatnonzero(one[:size] != other[:size])
        if len(where) or len(one) != len(other):
            first = int(where[0]) if len(where) else size
            parted.append(([*prompt.tolist(), *one[:first].tolist()], [0]))
            size = first + 1
        compared += size
    if encoder_inputs.encodes(lm) or options.sampling.needs_prefix:
        return len(parted) / compared, ()
    best = [np.sort(logits[0])[-2:] for logits in scores_of_new(lm, parted, batch=1)]
    return len(parted) / compared, tuple(float(two[1] - two[0]) for two in best)


def repeated_ngrams(rows: list[np.ndarray], length: int = 4) -> float:
    """Returns the share of n-grams that occurred in the same row before, over all rows.

    Args:
      rows: token ids int32 ``[n]`` of each row.
      length: the number of tokens in an n-gram.

    Returns:
      a number in [0, 1]; 0 if there are no n-grams.
    """
    total = distinct = 0
    for row in rows:
        grams = [tuple(row[i : i + length]) for i in range(len(row) - length + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total if total else 0.0


def check_texts(plain: Generation) -> None:
    """Raises ``ValueError`` if all texts of plain decoding are empty."""
    if not any(map(len, plain.tokens)):
        raise ValueError(
            "prompts: every text of plain decoding is empty, since no token is allowed after the "
            "prompt or the text ends at once; give other settings or prompts"
        )


def whole_rate(work: GenerationTask, seed: int = 0) -> float:
    """Returns the emitted tokens per second of one whole run."""
    keys = work.request.key
    if seed:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, seed)
    work = dataclasses.replace(work, request=dataclasses.replace(work.request, key=keys))
    jax.block_until_ready(keys)
    begin = time.perf_counter()
    if work.session is not None and work.session.asks:  # a search before each burst
        stream = TextStream(work)
        stream.finish()
        state = required(stream.state, "state")
    else:
        state = work.burst(work.capacity, work.start())
    jax.block_until_ready(state.length)
    seconds = time.perf_counter() - begin
    return float(np.sum(np.asarray(state.length) - np.asarray(state.begin))) / seconds
