"""What trained heads should gain beside a larger target: ``python -m benchmarks.expected``.

Heads that were trained for the embedded target have the τ of their results there. A target of 100M
weights that writes the same texts (``grown.py``) sees the same τ. The time of a round does not
depend on the values of weights: it is measured with heads of the sizes that the same recipe gives
for the larger target, untrained, so that no trained weights need be kept. Where a head was grown
and measured, the page shows both figures. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from . import head_rows, runner
from .tables import cells

KINDS = (", shipped", ", longer")  # of heads with the sizes of the kind before
RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_sources(parser, ["heads-100m"], RESULTS / "heads-expected")
    what = "results of grown heads"
    parser.add_argument("--measured", nargs="+", default=[], metavar="NAME", help=what)
    args = parser.parse_args(arguments)
    write(args.out, page(args.trained, args.rounds, args.measured))
    return 0


def add_sources(parser: argparse.ArgumentParser, rounds: list[str], out: Path) -> None:
    """Adds the arguments that name the stored results of which a page is made, and its folder."""
    at = parser.add_argument
    what = "results with the τ of trained heads; of a head that several have, the first"
    at("--trained", nargs="+", default=["heads"], metavar="NAME", help=what)
    what = "results with the times of rounds beside a larger target"
    at("--rounds", nargs="+", default=rounds, metavar="NAME", help=what)
    at("--out", type=Path, default=out)


def write(folder: Path, text: str) -> None:
    """Writes the page of a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(text, encoding="utf-8")


def stored(name: str) -> tuple[dict, list[dict]]:
    """The header and the lines of the results ``name``."""
    lines = (RESULTS / name / runner.KEPT).read_text(encoding="utf-8").splitlines()
    header, *rows = map(json.loads, lines)
    return header, rows


def plain_steps(figures: dict) -> float:
    """The time of a round, in plain steps."""
    return figures["seconds_per_round"] / figures["seconds_per_plain_step"]


def kind_of(name: str) -> str:
    """The kind of a head: its name, without words that do not change its sizes."""
    return next((name.removesuffix(word) for word in KINDS if name.endswith(word)), name)


def rows_of(names: Sequence[str]) -> tuple[str, list[dict]]:
    """What several results hold together: where each was measured, in words, and their rows."""
    places, rows = [], {}
    for name in names:
        header, lines = stored(name)
        prompts, processor = header["prompts"], header["processor"]
        places.append(f"[{name}](../{name}/README.md) ({prompts} prompts, {processor})")
        for line in lines:
            row = line["row"]
            row = rows.setdefault(head_rows.label(row), {"row": row, "figures": {}})
            row["figures"] = line["figures"] | row["figures"]
    return " and ".join(places), list(rows.values())


def page(trained: Sequence[str], rounds: Sequence[str], measured: Sequence[str] = ()) -> str:
    """The page for results by their names: rows of fixed shapes, and heads, that are in both.

    Raises:
      ValueError: no row is in both.
    """
    (taught, heads), (where, timed) = rows_of(trained), rows_of(rounds)
    there, grown = rows_of(measured)
    words = shlex.join(["--trained", *trained, "--rounds", *rounds])
    words += f" {shlex.join(['--measured', *measured])}" * bool(measured)
    text = (
        f"# Trained heads beside a target of 100M weights, expected\n\n```sh\n"
        f"python -m benchmarks.expected {words}\n```\n\n"
        f"τ is that of {taught}; a round's time, in plain steps, is that of heads of these sizes "
        f"without training, {where}. *Expected* is τ divided by that time: how many times as fast "
        "as plain decoding the head should be, without the reading of the prompt."
    )
    if measured:
        text += f" *Measured*: the same of a trained head that was grown, {there}."
    text, tables = text + "\n", 0
    for line in heads:
        if isinstance(line["row"].get("num"), str):  # a policy chooses by what is accepted
            continue
        same = [x["figures"] for x in timed if x["row"] == line["row"]]
        found = [x["figures"] for x in grown if x["row"] == line["row"]]
        if not same:
            continue
        tables += 1
        rows = [
            (name, f["tau"], plain_steps(same[0][kind]), [x[name] for x in found if name in x])
            for name, f in line["figures"].items()
            if (kind := kind_of(name)) in same[0]
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
    if not tables:
        names = ", ".join(trained), ", ".join(rounds)
        raise ValueError("no row of {} has the shape and temperature of one of {}".format(*names))
    return text


if __name__ == "__main__":
    sys.exit(main())
