"""Trained heads of the embedded target side by side: ``python -m benchmarks.heads FOLDER ...``.

Each folder is what a recipe exported; ``NAME=FOLDER`` gives it another name. A name such as
``eagle3`` takes a head that ships. All heads and plain decoding decode the same held-out prompts in
turn, with a chain at temperatures 0 and 1 and with a tree at 0, so that speed, tau and acceptance
come from one run. Needs an idle machine. A finished row is kept.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import specjax
from specjax._internal import compile_cache
from specjax.text.options import Drafting

from . import heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "heads"
WAYS = (
    {"temperature": 0.0, "num": 3},
    {"temperature": 1.0, "num": 2},
    {"temperature": 0.0, "tree": "3x2x1"},
)


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("heads", nargs="+", metavar="[NAME=]FOLDER", help="trained heads")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    compile_cache.enable()  # a run that was interrupted finds its programs again
    named = dict(one.rpartition("=")[::2] if "=" in one else (one, one) for one in args.heads)
    facts = {"suite": "heads", "heads": args.heads, "prompts": args.prompts, "new": args.new}
    header = {**facts, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    print(
        f"{len(named)} heads, {len(WAYS)} rows; each begins with a program for each head",
        flush=True,
    )
    lm, prompts = specjax.load("embedded"), heldout.prompts(args.prompts)
    for way in (way for way in WAYS if way not in kept.finished):
        shape = {name: way[name] for name in ("num", "tree") if name in way}
        ways = [(folder, Drafting(**shape)) for folder in named.values()]
        sampling = [specjax.Sampling(temperature=way["temperature"])] * args.prompts
        found = heldout.measure_model(lm, ways, prompts, sampling, args.new, heldout.REPETITIONS)
        kept.add({"row": way, "figures": dict(zip(named, found, strict=True))})
        for name, figures in zip(named, found, strict=True):
            print(way, name, f"{figures['ratio_rounds']['median']:.2f}", flush=True)
    rows = [(line["row"], line["figures"]) for line in kept.outcomes(list(WAYS))]
    (args.out / "README.md").write_text(page(header, rows), encoding="utf-8")
    return 0


def page(header: dict, rows: list) -> str:
    """The page of the results."""
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v and k not in ("suite", "heads"))
    text = (
        "# Trained heads side by side\n\n```sh\npython -m benchmarks.heads "
        + shlex.join(header["heads"])
        + "\n```\n\n"
        f"{facts}.\n\nHeads of the embedded target on held-out prompts, in turn with plain "
        "decoding of one request at a time. τ: tokens that a round emits. *Rounds* and *whole*: "
        "how many times as fast as plain decoding, without and with the reading of the prompt; "
        "intervals of 95 % are over the prompts. *Round*: its time in plain steps. *Accepted*: the "
        "share of rounds in which a draft position was accepted.\n"
    )
    columns = {
        "head": lambda name, f: name,
        "τ": lambda name, f: f"{f['tau']:.2f}",
        "rounds": lambda name, f: cells.ratio(f["ratio_rounds"]),
        "whole": lambda name, f: cells.ratio(f["ratio_whole"]),
        "round, plain steps": lambda name, f: (
            f"{f['seconds_per_round'] / f['seconds_per_plain_step']:.2f}"
        ),
        "accepted": lambda name, f: ", ".join(map(cells.share, f["acceptance_by_position"])),
        "same text": lambda name, f: f["identical"] or "T > 0",
    }
    for way, figures in rows:
        shape = f"tree {way['tree']}" if "tree" in way else f"{way['num']} tokens a round"
        best = sorted(figures.items(), key=lambda one: -one[1]["ratio_rounds"]["median"])
        text += f"\n## T = {way['temperature']:g}, {shape}\n\n{cells.table(columns, best)}\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
