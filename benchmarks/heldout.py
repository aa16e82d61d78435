"""Plain and speculative decoding of the embedded models on held-out prompts."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.analysis.comparison import repeated_ngrams
from specjax.decoding.state import result
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_measured
from specjax.text.task import GenerationTask

from .grown import grown_drafter, grown_embedded

COUNTS = ("rounds", "emitted", "drafted", "accepted")
SEARCHED = 2  # rounds for which what a datastore said is used
RESAMPLES = 2000  # bootstrap samples of the prompts for an interval


def prompts(count: int) -> list[str]:
    """Returns the last ``count`` of the shipped held-out prompts; settings were tuned on others."""
    file = Path(specjax.__file__).parent / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    if count > len(lines):
        raise ValueError(f"prompts={count}: {len(lines)} held-out prompts ship with the package")
    return [json.loads(line)["text"] for line in lines[-count:]]


def measure_prompts(
    bench,
    *,
    drafter: str,
    temperature: float,
    prompts: int,
    num_draft: int | str | None = None,
    tree: str | None = None,
    batch: int = 1,
    new: int = 64,
    grown: bool = False,
    workload: str = "completion",
    repetitions: int = 3,
) -> dict:
    """Measures ratios over many prompts, ``batch`` at a time, with an interval over the batches.

    Each batch is decoded plainly and speculatively in turn, and the fastest of its ``repetitions``
    counts.

    Args:
      bench: see ``rows.Bench``.
      drafter: a name, as ``specjax.generate`` takes it; or ``rest``: ``suffix`` with a datastore of
        the files on which the target was trained.
      temperature: 0 is greedy.
      prompts: the number of prompts.
      num_draft, tree: see ``specjax.Drafting``.
      batch: the prompts that are decoded together.
      new: the tokens that are emitted for each prompt.
      grown: whether to measure the models of ``grown.py`` instead of the embedded ones.
      workload: see ``workloads.prompts``.
      repetitions: how often each batch is decoded.

    Returns:
      Figures, among them the ratio of whole runs (which read the prompts) and that of rounds.
    """
    from . import workloads

    lm, texts = specjax.load("embedded"), workloads.prompts(workload, prompts)
    lm, named = (grown_embedded(), grown_drafter(drafter)) if grown else (lm, drafter)
    if drafter == "rest":
        named = workloads.rest(lm, batch)
    seconds, stats, same, rows, accepted_at = [], [], [], [], []
    for index in range(len(texts) // batch):
        text = texts[index * batch : (index + 1) * batch]
        sampling = specjax.Sampling(temperature=temperature)
        plain = Options(drafter=None, sampling=sampling, max_new_tokens=new, seed=index)
        drafting = Drafting(num=num_draft, tree=tree)
        fast = dataclasses.replace(plain, drafter=named, drafting=drafting)
        works = [prepare_measured(lm, text, options) for options in (plain, fast)]
        if index == 0:
            for work in works:
                run(work)
        best = np.full((2, 2), np.inf)
        for repetition in range(repetitions):
            outs = [None, None]
            for which in (0, 1) if (index + repetition) % 2 else (1, 0):
                *spent, outs[which] = run(works[which])
                best[which] = np.minimum(best[which], spent)
        seconds.append(best)
        plain, fast = outs
        stats.append([int(np.sum(getattr(fast.stats, k))) for k in COUNTS])
        stats[-1].append(int(np.sum(plain.stats.emitted)))
        accepted_at.append(np.sum(np.asarray(fast.stats.accepted_at), axis=0))
        for row, prompt in enumerate(works[1].prompts):
            said = [np.asarray(o.tokens)[row, : int(o.lengths[row])] for o in outs]
            same.append(np.array_equal(*said))
            rows.append(said[1][len(prompt) :])
    seconds, stats = np.asarray(seconds), np.asarray(stats, float)
    rounds, emitted, drafted, accepted, plain_emitted = stats.T

    result = {}
    for name, spent in (("whole", seconds.sum(axis=2)), ("rounds", seconds[:, :, 1])):
        result[f"ratio_{name}"] = _ratio(spent, emitted, plain_emitted)
        result[f"plain_tokens_per_second_{name}"] = plain_emitted.sum() / spent[:, 0].sum()
        result[f"tokens_per_second_{name}"] = emitted.sum() / spent[:, 1].sum()
    return result | {
        "tau": emitted.sum() / rounds.sum(),
        "acceptance": accepted.sum() / max(1.0, drafted.sum()),
        "acceptance_by_position": (np.sum(accepted_at, axis=0) / rounds.sum()).tolist(),
        "repeated_4grams": repeated_ngrams(rows),
        "identical": f"{sum(same)} of {len(same)}" if temperature == 0 else None,
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
