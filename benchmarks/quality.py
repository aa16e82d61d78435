"""What approximate rules cost and what they gain: the embedded pair, and its target grown to 100M.

A row is one rule at several settings: figures of the text (``specjax.quality``) and τ. The ratio to
plain decoding in rounds is τ times the time of a plain step over that of a round with the lossless
rule; both are measured once for each size and temperature. A rule that ranks tokens or needs their
probabilities takes longer than the lossless rule at temperature 0, so its ratio is an upper bound.
The texts of the grown target are those of the embedded one, so figures of the text and τ serve for
both.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

import specjax
from specjax.analysis import timing
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare

from . import heldout
from .grown import grown_embedded

NEW, NUM_DRAFT = 64, 3
SETTINGS = {  # from the strictest on
    "approximate-lenience": ("scale=1.0", "scale=0.7", "scale=0.4", "scale=0.1"),
    "approximate-typical": (
        "epsilon=0.5,delta=0.9",
        "epsilon=0.2,delta=0.5",
        "epsilon=0.09,delta=0.3",
        "epsilon=0.01,delta=0.1",
    ),
    "approximate-tolerance": (
        "top_k=1,gap=0.0",
        "top_k=2,gap=0.5",
        "top_k=3,gap=1.5",
        "top_k=5,gap=3.0",
    ),
    "approximate-top-k": ("k=1", "k=2", "k=3", "k=5"),
    "approximate-threshold": ("loss=0.0", "loss=0.5", "loss=1.0", "loss=2.0", "loss=3.0"),
    "approximate-fly": ("entropy=1.1", "entropy=0.8", "entropy=0.5", "entropy=0.2"),
    "approximate-sprinter": ("verified=3", "verified=2", "verified=1"),
}
EXACT_WHEN_GREEDY = ("approximate-lenience", "approximate-typical")  # no curve at temperature 0


def measure_rule(
    bench,
    *,
    rule: str,
    temperature: float,
    prompts: int,
    probes: int = 1,
    probe_samples: int = 256,
    new: int = NEW,
) -> dict:
    """Measures the texts of one rule at each of its settings, and what its rounds gain.

    Args:
      bench: see ``rows.Bench``.
      rule: a key of ``SETTINGS``.
      temperature: 0 is greedy.
      prompts: the number of held-out prompts.
      probes, probe_samples: see ``specjax.quality``.
      new: the tokens that are emitted for each prompt.

    Returns:
      ``{"points": [figures]}``, first those of the lossless rule, whose setting is ``lossless``;
      and ``{"costs": {size: [seconds of a plain step, seconds of a round]}}``.
    """
    del bench
    lm, texts = specjax.load("embedded"), heldout.prompts(prompts)
    found = specjax.quality(
        lm,
        texts,
        rules=["auto", *(f"{rule}:{setting}" for setting in SETTINGS[rule])],
        drafter=specjax.load("embedded-draft"),
        drafting=Drafting(num=NUM_DRAFT),
        sampling=specjax.Sampling(temperature=temperature),
        max_new_tokens=new,
        probes=probes,
        probe_samples=probe_samples,
    )
    costs = {size: round_cost(size == "grown", temperature, new) for size in ("embedded", "grown")}
    points = []
    for setting, one in zip(("lossless", *SETTINGS[rule]), found.rules[1:], strict=True):
        ratios = {size: one.tau * step / spent for size, (step, spent) in costs.items()}
        points.append({"setting": setting, "ratio": ratios, **dataclasses.asdict(one)})
    return {"plain": dataclasses.asdict(found.rules[0]), "points": points, "costs": costs}


@functools.cache
def round_cost(grown: bool, temperature: float, new: int = NEW) -> tuple[float, float]:
    """Returns seconds of a plain step and of a round with the lossless rule, medians in turn."""
    lm = grown_embedded() if grown else specjax.load("embedded")
    plain = Options(
        drafter=None,
        sampling=specjax.Sampling(temperature=temperature),
        max_new_tokens=new,
        stop=(),
    )
    drafting = Drafting(num=NUM_DRAFT)
    fast = dataclasses.replace(plain, drafter=specjax.load("embedded-draft"), drafting=drafting)
    calls, rounds = {}, {}
    for name, options in (("plain", plain), ("fast", fast)):
        work = prepare(lm, heldout.prompts(1), options)
        rounds[name] = int(np.sum(heldout.run(work)[2].stats.rounds))
        calls[name] = timing.Call(
            functools.partial(work.burst, work.capacity), work.start, times=rounds[name]
        )
    seconds = timing.alternate(calls, repetitions=5 if grown else 15, warmup=1)
    step, spent = (float(np.median(seconds[name])) for name in ("plain", "fast"))
    return step, spent


def curves(rows, size: str, temperature: float) -> dict[str, list[tuple[float, float]]]:
    """For each rule ``[(ratio in rounds, mean log p of a token)]``, from its strictest setting."""
    return {
        row["rule"].removeprefix("approximate-"): [
            (point["ratio"][size], point["loglik"])
            for point in figures["points"]
            if point["setting"] != "lossless" and math.isfinite(point["loglik"])
        ]
        for row, figures in rows
        if row["temperature"] == temperature
    }


def draw(rows):
    """One picture: speed against quality, for both sizes and temperatures."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), squeeze=False)
    for across, size in enumerate(("embedded", "grown")):
        for down, temperature in enumerate((0.0, 1.0)):
            panel = panels[down][across]
            for name, points in curves(rows, size, temperature).items():
                panel.plot(*zip(*points, strict=True), marker="o", label=name)
            here = [f for r, f in rows if r["temperature"] == temperature]
            for figures in here[:1]:
                point = figures["points"][0]
                panel.plot(point["ratio"][size], point["loglik"], "k*", ms=12, label="lossless")
                panel.axhline(figures["plain"]["loglik"], color="grey", ls="--", lw=1)
            panel.axvline(1.0, color="grey", ls=":", lw=1)
            title = "embedded pair" if size == "embedded" else "grown to 100M"
            panel.set_title(f"{title}, T = {temperature:g}", fontsize=9)
            panel.set_xlabel("ratio to plain decoding, in rounds")
            panel.set_ylabel("mean log p of a token, by the target")
            panel.legend(fontsize=6)
    figure.tight_layout()
    return figure
