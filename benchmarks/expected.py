"""What trained heads should gain beside a larger target: ``python -m benchmarks.expected``.

Heads that were trained for the embedded target have the τ of their results there. A target of 100M
weights that writes the same texts (``grown.py``) would see the same τ, but most drafters cannot be
grown with it. The time of a round does not depend on the values of weights: it is measured with
heads of the sizes that the same recipe gives for the larger target, untrained. Where a head was
grown and measured, the page shows both figures. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from . import head_rows, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    at = parser.add_argument
    at("--trained", default="heads", metavar="NAME", help="results with the τ of trained heads")
    at("--rounds", default="heads-100m", metavar="NAME", help="results with the times of rounds")
    at("--measured", nargs="*", default=[], metavar="NAME", help="results of grown heads")
    at("--out", type=Path, default=RESULTS / "expected")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "README.md").write_text(
        page(args.trained, args.rounds, args.measured), encoding="utf-8"
    )
    return 0


def stored(name: str) -> tuple[dict, list[dict]]:
    """The header and the lines of the results ``name``."""
    lines = (RESULTS / name / runner.KEPT).read_text(encoding="utf-8").splitlines()
    header, *rows = map(json.loads, lines)
    return header, rows


def plain_steps(figures: dict) -> float:
    """The time of a round, in plain steps."""
    return figures["seconds_per_round"] / figures["seconds_per_plain_step"]


def page(trained: str, rounds: str, measured: list[str]) -> str:
    """The page for results by their names; rows and heads that are in both are compared."""
    header, heads = stored(trained)
    where, timed = stored(rounds)
    grown = [line for name in measured for line in stored(name)[1]]
    words = f"--trained {trained} --rounds {rounds}"
    words += f" --measured {shlex.join(measured)}" * bool(measured)
    text = (
        f"# Trained heads beside a target of 100M weights, expected\n\n```sh\n"
        f"python -m benchmarks.expected {words}\n```\n\n"
        f"τ is that of [{trained}](../{trained}/README.md), on {header['prompts']} prompts "
        f"({header['processor']}); a round's time, in plain steps, is that of heads of these sizes "
        f"without training, [{rounds}](../{rounds}/README.md) ({where['processor']}). *Expected* "
        "is τ divided by that time: how many times as fast as plain decoding the head should be, "
        "without the reading of the prompt. *Measured*: the same of a trained head that was grown"
        + "".join(f", [{name}](../{name}/README.md)" for name in measured)
        + ", on its own prompts and machine.\n"
    )
    for line in heads:
        same = [x["figures"] for x in timed if x["row"] == line["row"]]
        found = [x["figures"] for x in grown if x["row"] == line["row"]]
        if not same:
            continue
        rows = [
            (name, f["tau"], plain_steps(same[0][kind]), [x[name] for x in found if name in x])
            for name, f in line["figures"].items()
            if (kind := name.partition(",")[0]) in same[0]
        ]
        columns = {
            "head": lambda name, tau, cost, real: name,
            "τ": lambda name, tau, cost, real: f"{tau:.2f}",
            "round, plain steps": lambda name, tau, cost, real: f"{cost:.2f}",
            "expected": lambda name, tau, cost, real: f"{tau / cost:.2f}",
            "measured": lambda name, tau, cost, real: (
                cells.ratio(real[0]["ratio_rounds"]) if real else ""
            ),
        }
        rows.sort(key=lambda row: -row[1] / row[2])
        text += f"\n## {head_rows.label(line['row'])}\n\n{cells.table(columns, rows)}\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
