"""Whether DSpark's confidence head says the truth: ``python -m benchmarks.calibration FOLDER``.

The head states the chance that a drafted token is accepted. At temperature 1 the true chance is
``1 - TV(q, p)``; at 0 a token is accepted if the most probable token of the drafter is the
target's. Drafts are ended by products of chances, so that both are reported: single chances, and
for each k the product of the first k, with the temperatures of the folder and without them. The
stated chances of held-out places are sorted into ten bins. The expected calibration error is the
mean over places of how far the mean of a bin's stated chances is from that of the true ones. The
mean error of a single place is stated too. Places are given the true text before them. The rows of
the corpus are those on which the recipe fits the temperatures; files in ``eval_samples`` are other
text. Nothing is timed, so a busy machine gives the same figures.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import specjax.configs
from specjax.train import calibrate, config, dspark, frozen
from specjax.train.calibrate import BINS
from specjax.train.rows import make_reader

import specjax


def main(arguments: list[str] | None = None) -> int:
    """Prints two tables for each held-out set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="what the recipe dspark exported")
    parser.add_argument(
        "fields", nargs="*", help="of the configuration embedded_dspark, name=value"
    )
    args = parser.parse_args(arguments)
    file = specjax.configs.find("embedded_dspark")
    fields = [f"init={args.folder}", "features=", "decoding.num_prompts=0", *args.fields]
    settings = config.load(dspark.Config, file, fields)
    setting = frozen.make_setting(settings, lambda count: settings.layers)
    heads, lm = dspark.make_dspark(settings, setting), setting.lm
    params = frozen.starting_params(settings, lm, heads)
    scales = specjax.load_drafter(args.folder, lm).drafter.temperatures
    read = make_reader(lm.config, setting.end_of_text, heads.layers)
    for name, batches in setting.sets.items():
        found = calibrate.measure(heads, lm, read, settings, params, batches)
        print(report(name.rstrip("/") or "corpus", found, scales))
    return 0


def report(name: str, found: calibrate.Chances, scales: tuple) -> str:
    """The tables of a set: single chances at temperature 1, and products of chances."""
    stated = calibrate.stated(found.logits, scales)
    error, own = calibrate.expected_error, found.weight
    mean = np.sum(np.abs(stated - found.drawn) * own) / own.sum()
    lines = [
        f"\n{name}: {own.sum():,.0f} places, expected calibration error "
        f"{error(stated, found.drawn, own):.4f},",
        f"mean error of a place {mean:.4f}\n\n| stated | places | mean stated | mean true |",
        "|---|---|---|---|",
    ]
    bins = np.minimum((stated * BINS).astype(int), BINS - 1)
    for b in np.unique(bins[own > 0]):
        here = own * (bins == b)
        means = [np.sum(x * here) / here.sum() for x in (stated, found.drawn)]
        span = f"{b / BINS:.1f} to {(b + 1) / BINS:.1f}"
        lines.append(f"| {span} | {here.sum():,.0f} | {means[0]:.3f} | {means[1]:.3f} |")
    told = ", ".join(f"{t:.2f}" for t in scales) or "none"
    lines += [
        f"\nTemperatures of the folder: {told}. Expected calibration error of the product of the "
        "first k chances:\n",
        "| k | T = 1 | T = 0 | T = 1, without temperatures | T = 0, without temperatures |",
        "|---|---|---|---|---|",
    ]
    plain = calibrate.stated(found.logits)
    ways = [(x, true) for x in (stated, plain) for true in (found.drawn, found.greedy)]
    columns = [
        [error(a, b, w) for a, b, w in zip(*products(chances, true, own), strict=True)]
        for chances, true in ways
    ]
    for k, errors in enumerate(zip(*columns, strict=True), start=1):
        lines.append(f"| {k} | {' | '.join(f'{x:.4f}' for x in errors)} |")
    return "\n".join(lines)


def products(stated: np.ndarray, true: np.ndarray, weight: np.ndarray) -> tuple:
    """The products of the first k of K chances, and their weights, for each k ``[M]``."""
    return np.cumprod(stated, axis=1).T, np.cumprod(true, axis=1).T, weight.T


if __name__ == "__main__":
    sys.exit(main())
