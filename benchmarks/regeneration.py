"""Measures the recipe ``regenerate`` with and without a drafter, in turn, on the same rows.

The embedded target continues prompts of the corpus.
"""

from __future__ import annotations

import functools

from specjax.train import data, regenerate, writing
from specjax.train.config import DataConfig

import specjax
from specjax.analysis import timing

from .figures import interval, spread


def measure_regeneration(
    bench,
    *,
    drafter: str,
    num_draft: int,
    rows: int = 64,
    new: int = 192,
    batch: int = 8,
    temperature: float = 0.0,
    split: str = "train",
    repetitions: int = 6,
) -> dict:
    """Times both ways from the prompts to the last row, without compilation."""
    config = regenerate.Config(
        split=split,
        num_rows=rows,
        new_tokens=new,
        greedy_share=float(not temperature),
        temperature=temperature,
        num_draft=num_draft,
        data=DataConfig(batch=batch, strict=False),
    )
    ways = {"plain": "plain", "drafted": drafter}
    lm = specjax.load(config.teacher)
    stream, end_of_text = data.load_stream(config.data, split)
    prompts, ends = regenerate.row_prompts(config, stream, end_of_text), {}

    def serve(name):
        ends[name] = writing.serve(lm, prompts, config, [end_of_text], ways[name])

    calls = {name: functools.partial(serve, name) for name in ways}
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=1)
    tokens = {name: sum(len(row.tokens) for row in found) for name, found in ends.items()}
    rates = {name: tokens[name] / spent for name, spent in seconds.items()}
    said = {name: [row.tokens for row in found] for name, found in ends.items()}
    return {
        "tokens": tokens["plain"],
        "tau": (tokens["drafted"] - len(ends["drafted"]))
        / sum(row.rounds for row in ends["drafted"]),
        "tokens_per_second": {name: spread(rate) for name, rate in rates.items()},
        "ratio": interval(timing.ratio(rates["drafted"], rates["plain"])),
        "identical": None if temperature else said["plain"] == said["drafted"],
    }
