"""Plain and speculative decoding of the embedded models on held-out prompts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.analysis.comparison import repeated_ngrams
from specjax.decoding.state import result
from specjax.text.drafter_names import named
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_fastest
from specjax.text.task import GenerationTask

from .grown import grown_drafter, grown_embedded

COUNTS = ("rounds", "emitted", "drafted", "accepted")
SEARCHED = 2  # rounds for which what a datastore said is used
SLOTS = 512  # of the buffers, where all programs of a drafter are to be the same
REPETITIONS = 3  # of each batch, the fastest of which counts
RESAMPLES = 2000  # bootstrap samples of the prompts for an interval


def prompts(count: int, before: int = 0) -> list[str]:
    """Returns the last ``count`` of the shipped held-out prompts before the last ``before``.

    Settings were tuned on others than the last ones, unless a script leaves out what it says.
    """
    file = Path(specjax.__file__).parent / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    lines = lines[: max(0, len(lines) - before)]
    if count > len(lines):
        words = f" before the last {before}" * bool(before)
        raise ValueError(
            f"prompts={count}: {len(lines)} held-out prompts ship with the package{words}"
        )
    return [json.loads(line)["text"] for line in lines[-count:]]


def measure_ways(
    bench,
    *,
    ways: list[dict],
    temperature: float,
    prompts: int,
    batch: int = 1,
    new: int = 64,
    grown: bool = False,
    quantize: str | None = None,
    workload: str = "completion",
    given: bool = False,
    planned: int = 0,
    repetitions: int = REPETITIONS,
) -> dict:
    """Measures ratios over many prompts, ``batch`` at a time, with an interval over the batches.

    Each batch is decoded plainly and by each drafter in turn, and the fastest of its
    ``repetitions`` counts. All buffers have ``SLOTS`` slots, so that the programs of a drafter are
    compiled once for all workloads.

    Args:
      bench: see ``rows.Bench``.
      ways: for each drafter ``{"drafter": name}``, as ``specjax.generate`` takes it, and
        ``num_draft`` or ``tree``, see ``specjax.Drafting``; the name ``rest`` is ``suffix`` with a
        datastore of the files on which the target was trained.
      temperature: 0 is greedy.
      prompts: the number of prompts.
      batch: the prompts that are decoded together.
      new: the tokens that are emitted for each prompt.
      grown: whether to measure the models of ``grown.py`` instead of the embedded ones.
      quantize: in what the embedded models are computed, as ``specjax.load`` takes it; None: the
        default.
      workload: see ``workloads.prompts``.
      given: whether the true answers are emitted (``workloads.answered``), at temperature 0.
      planned: the number of prompts, the first ones, on which ``specjax.plan`` predicts the
        speed of each drafter; 0: it does not. The grown target alone has it.
      repetitions: how often each batch is decoded.

    Returns:
      ``{"ways": [figures]}``: for each drafter the ratio of whole runs (which read the prompts),
      that of rounds, and others; with ``planned`` what the planner says.
    """
    from . import planner, workloads

    del bench
    lm = grown_embedded() if grown else specjax.load("embedded", quantize=quantize)
    count = prompts // batch
    sampling = [specjax.Sampling(temperature=temperature)] * count
    if given:
        texts, said = workloads.answered(lm, workload, prompts, new)
        sampling = [
            dataclasses.replace(one, logits_processor=workloads.GivenText(jnp.asarray(rows)))
            for one, rows in zip(sampling, said.reshape(count, batch, new), strict=True)
        ]
    else:
        texts = workloads.prompts(workload, prompts)
    named = [grown_drafter(way["drafter"]) if grown else way["drafter"] for way in ways]
    named = [workloads.rest(lm, batch) if name == "rest" else name for name in named]
    drafting = [Drafting(num=way.get("num_draft"), tree=way.get("tree")) for way in ways]
    pairs = list(zip(named, drafting, strict=True))
    found = measure_model(lm, pairs, texts, sampling, new, repetitions)
    if planned:
        said = planner.predicted(lm, ways, texts[:planned], new)
        found = [one | {"planned": plan} for one, plan in zip(found, said, strict=True)]
    return {"ways": found}


def one_by_one(works: list[GenerationTask], order) -> tuple[np.ndarray, list[specjax.Decoded]]:
    """Runs requests in an order: their seconds ``[requests, 2]`` as ``run`` has them, and their
    results."""
    spent, outs = np.empty((len(works), 2)), [None] * len(works)
    for which in order:
        *spent[which], outs[which] = run(works[which])
    return spent, outs


def measure_model(
    lm, ways, texts, samplings, new, repetitions, *, average=np.min, runs=one_by_one, parts=1
) -> list[dict]:
    """The figures of each of ``ways``, a drafter and a ``Drafting``, for one model.

    The tokens of batch i are drawn by ``samplings[i]``. ``average`` makes one time of those of the
    repetitions of a batch, and ``runs`` times one repetition, of plain decoding and of each way in
    an order that rotates. A repetition of all batches comes before the next, so that a machine that
    slows down for a while slows all of them alike. See ``measure_ways``. With ``parts`` above 1 the
    figures also hold those of every ``parts``-th batch, from the first, the second and so on
    (``parts``).
    """
    batch = len(texts) // len(samplings)
    ways = [(named(lm, d) if isinstance(d, str | os.PathLike) else d, how) for d, how in ways]
    batches = []
    for index, sampling in enumerate(samplings):
        text = texts[index * batch : (index + 1) * batch]
        plain = Options(drafter=None, sampling=sampling, max_new_tokens=new, seed=index)
        fast = [
            dataclasses.replace(plain, drafter=drafter, drafting=drafting)
            for drafter, drafting in ways
        ]
        batches.append(
            [
                prepare_fastest(lm, text, options, least_width=SLOTS, least_buffer=SLOTS)
                for options in (plain, *fast)
            ]
        )
    for work in batches[0]:
        run(work)
    found = [_Counts([], [], [], [], []) for _ in ways]
    spent = np.empty((repetitions, len(batches), 1 + len(ways), 2))
    for repetition, (index, works) in itertools.product(range(repetitions), enumerate(batches)):
        order = np.roll(range(len(works)), -(index + repetition + 1))
        spent[repetition, index], outs = runs(works, order)
        if repetition == repetitions - 1:
            for one, work, out in zip(found, works[1:], outs[1:], strict=True):
                one.add(work.prompts, outs[0], out)
    spent = average(spent, axis=0)  # [batches, 1 + ways, 2]
    greedy = samplings[0].greedy
    figures = []
    for way, one in enumerate(found, start=1):
        mine = spent[:, [0, way]]
        figures.append(one.figures(mine, greedy))
        if parts > 1:
            some = [range(first, len(mine), parts) for first in range(parts)]
            figures[-1]["parts"] = [one.of(at).figures(mine[at], greedy) for at in some]
    return figures


@dataclasses.dataclass(frozen=True)
class _Counts:
    """The counts of one drafter: a list for each kind of count, with one entry for each batch.

    Attributes:
      stats: the sums of ``COUNTS`` over the rows, the tokens that plain decoding emitted, and the
        rounds of the slowest row.
      sizes: the number of rows.
      accepted_at: the rounds in which each draft position was accepted.
      same: for each row whether its text is that of plain decoding.
      rows: the new tokens of each row.
    """

    stats: list
    sizes: list
    accepted_at: list
    same: list
    rows: list

    def of(self, batches: Sequence[int]) -> _Counts:
        """The counts of some of the batches."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return _Counts(*([field[at] for at in batches] for field in fields))

    def add(self, prompts: list[np.ndarray], plain, fast) -> None:
        """Adds the results of a batch."""
        self.stats.append([int(np.sum(getattr(fast.stats, k))) for k in COUNTS])
        self.stats[-1].append(int(np.sum(plain.stats.emitted)))
        self.stats[-1].append(int(np.max(fast.stats.rounds)))
        self.sizes.append(len(prompts))
        self.accepted_at.append(np.sum(np.asarray(fast.stats.accepted_at), axis=0))
        self.same.append([])
        self.rows.append([])
        for row, prompt in enumerate(prompts):
            said = [np.asarray(o.tokens)[row, : int(o.lengths[row])] for o in (plain, fast)]
            self.same[-1].append(np.array_equal(*said))
            self.rows[-1].append(said[1][len(prompt) :])

    def figures(self, seconds: np.ndarray, greedy: bool) -> dict:
        """The figures, for seconds ``[batches, 2, 2]``: plain, speculative; reading, rounds."""
        stats, same = np.asarray(self.stats, float), [one for rows in self.same for one in rows]
        rounds, emitted, drafted, accepted, plain_emitted, longest = stats.T
        result, read = {}, np.asarray(self.sizes, float)  # reading emits a token of each row
        for name, spent, first in (
            ("whole", seconds.sum(axis=2), read),
            ("rounds", seconds[:, :, 1], 0 * read),
        ):
            plain, fast = plain_emitted + first, emitted + first
            result[f"ratio_{name}"] = _ratio(spent, fast, plain)
            result[f"plain_tokens_per_second_{name}"] = plain.sum() / spent[:, 0].sum()
            result[f"tokens_per_second_{name}"] = fast.sum() / spent[:, 1].sum()
        return result | {
            "tau": emitted.sum() / rounds.sum(),
            "slowest": (longest * read).sum() / rounds.sum(),  # rounds: slowest row by mean row
            "acceptance": accepted.sum() / max(1.0, drafted.sum()),
            "acceptance_by_position": (_sum(self.accepted_at) / rounds.sum()).tolist(),
            "repeated_4grams": repeated_ngrams([one for rows in self.rows for one in rows]),
            "identical": f"{sum(same)} of {len(same)}" if greedy else None,
            "seconds_per_round": seconds[:, 1, 1].sum() / rounds.sum(),
            "seconds_per_plain_step": seconds[:, 0, 1].sum() / plain_emitted.sum(),
        }


def run(work: GenerationTask) -> tuple[float, float, specjax.Decoded]:
    """Returns the seconds of reading the prompt, the seconds of the rounds, and the result.

    A datastore is searched before every ``SEARCHED`` rounds, which is a part of their time.
    """
    begin = time.perf_counter()
    state = jax.block_until_ready(work.start())
    middle = time.perf_counter()
    if work.session is None or not work.session.asks:
        state = jax.block_until_ready(work.burst(work.capacity, state))
    else:
        while (budget := np.asarray(state.budget)).any():
            tokens, lengths = np.asarray(state.tokens), np.asarray(state.length)
            texts = [tokens[row, : lengths[row]] for row in np.flatnonzero(budget)]
            work = work.refreshed(lambda texts=texts: texts)
            state = jax.block_until_ready(work.burst(SEARCHED, state))
    return middle - begin, time.perf_counter() - middle, result(state)


def tau_interval(stats: specjax.Stats) -> dict[str, float]:
    """Returns τ over all rows, and the bounds that hold 95 % of the resampled rows."""
    emitted, rounds = np.asarray(stats.emitted), np.asarray(stats.rounds)
    picks = np.random.default_rng(0).integers(0, len(rounds), (RESAMPLES, len(rounds)))
    low, high = np.quantile(emitted[picks].sum(axis=1) / rounds[picks].sum(axis=1), [0.025, 0.975])
    return {"tau": float(emitted.sum() / rounds.sum()), "low": float(low), "high": float(high)}


def _sum(counts: list[np.ndarray]) -> np.ndarray:
    """The sum of counts by position, of which batches that were decoded plainly have none."""
    total = np.zeros(max(map(len, counts)), int)
    for one in counts:
        total[: len(one)] += one
    return total


def _ratio(spent: np.ndarray, emitted: np.ndarray, plain_emitted: np.ndarray) -> dict:
    """Returns the ratio of speculative to plain tokens a second, with a bootstrap interval.

    Args:
      spent: seconds ``[prompts, 2]``, of plain and of speculative decoding.
      emitted: tokens ``[prompts]`` of speculative decoding.
      plain_emitted: tokens ``[prompts]`` of plain decoding.
    """

    def ratio(pick) -> float:
        speculative = emitted[pick].sum() / spent[pick, 1].sum()
        return float(speculative / (plain_emitted[pick].sum() / spent[pick, 0].sum()))

    rng, size = np.random.default_rng(0), len(spent)
    boot = [ratio(rng.integers(0, size, size)) for _ in range(RESAMPLES)]
    low, high = np.quantile(boot, [0.025, 0.975])
    return {
        "median": ratio(slice(None)),
        "low": float(low),
        "high": float(high),
        "confidence": 0.95,
    }
