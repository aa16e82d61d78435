"""Continuous batching against whole batches, for the embedded pair and texts of various lengths.

Both run ``specjax.serve_offline`` with the same programs. Whole batches wait until every row of the
batch is free (``gather=batch``).
"""

from __future__ import annotations

import functools

import numpy as np

import specjax
from specjax.analysis import timing

from .figures import interval, spread
from .heldout import prompts as heldout_prompts


def measure_serving(
    bench,
    *,
    drafter: str,
    num_draft: int | None = None,
    prompts: int = 256,
    longest: int = 128,
    batch: int = 8,
    temperature: float = 0.0,
    repetitions: int = 7,
) -> dict:
    """Times both ways in turn, each from the call to the last text, with reading of the prompts.

    Prompts are the last tokens of held-out prompts. Their number and the number of tokens to emit
    are drawn uniformly from 1 to ``longest``, and no text ends before.
    """
    lm = specjax.load("embedded")
    lengths, budgets = np.random.default_rng(0).integers(1, longest + 1, (2, prompts))
    asked = [
        {"prompt": lm.tokenizer.encode(text)[-length:], "max_new_tokens": int(new), "stop": []}
        for text, length, new in zip(heldout_prompts(prompts), lengths, budgets, strict=True)
    ]
    common = dict(
        batch=batch,
        drafter=drafter,
        drafting=specjax.Drafting(num=num_draft),
        sampling=specjax.Sampling(temperature=temperature),
    )
    ends = {}

    def serve(name, gather):
        ends[name] = specjax.serve_offline(lm, asked, gather=gather, **common)

    ways = {"continuous": None, "whole": batch}
    longest_last = sorted(asked, key=lambda one: len(one["prompt"]) + one["max_new_tokens"])
    for gather in ways.values():  # compiles; the longest request decides the size of buffers
        specjax.serve_offline(lm, longest_last[-2 * batch :], gather=gather, **common)
    calls = {name: functools.partial(serve, name, gather) for name, gather in ways.items()}
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=0)
    emitted, rounds = int(budgets.sum()), sum(row.rounds for row in ends["continuous"].rows)
    drafted = sum(row.drafted for row in ends["continuous"].rows)
    return {
        "tokens": emitted,
        "prompt_tokens": sum(len(one["prompt"]) for one in asked),
        "tau": (emitted - len(asked)) / rounds,
        "acceptance": sum(row.accepted for row in ends["continuous"].rows) / max(1, drafted),
        "tokens_per_second": {name: spread(emitted / s) for name, s in seconds.items()},
        "ratio": interval(timing.ratio(seconds["whole"], seconds["continuous"])),
        "identical": ends["whole"].texts == ends["continuous"].texts,
    }
