"""Trained heads of the embedded target side by side: ``python -m benchmarks.heads FOLDER ...``.

Each folder is what a recipe exported; ``NAME=FOLDER`` gives it another name. A name such as
``eagle3`` takes a head that ships. All heads and plain decoding decode the same held-out prompts in
turn, with a chain at temperatures 0 and 1 and with a tree at 0, so that speed, tau and acceptance
come from one run. Needs an idle machine. A finished row is kept.

Other rows, beside those that are kept::

    --lengths 2 5 --trees 3x2x1 2x1x1 --temperatures 0 1      every shape at every temperature
    --lengths 3 --trees 3x2x1 --siblings top iid distinct      above 0, how tokens are proposed
    --grown                                                    a target of 100M weights (grown.py)
    --target FOLDER                                            another target, such as Medusa-2's
    --policies auto auto:schedule --batches 1 8                a policy chooses the length
    --before 24                                                other prompts than the last 24
    --in-turn                           rows of one temperature in turn, where they are compared

A head that a shape does not suit is left out of that row, and the page says why.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import specjax
from specjax._internal import compile_cache

from . import grown, head_rows, heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "heads"
NEW = 128  # tokens of each prompt
EMBEDDED, GROWN = "embedded", "grown to 100M"  # targets
WAYS = (
    {"temperature": 0.0, "num": 3},
    {"temperature": 1.0, "num": 3},
    {"temperature": 0.0, "tree": "3x2x1"},
)


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("heads", nargs="+", metavar="[NAME=]FOLDER", help="trained heads")
    parser.add_argument("--prompts", type=int, default=24)
    what = "leave out so many prompts at the end, on which something was chosen"
    parser.add_argument("--before", type=head_rows.length, default=0, metavar="N", help=what)
    parser.add_argument("--new", type=int, default=NEW, help="new tokens of each prompt")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--grown", action="store_true", help="target and heads grown to 100M")
    which.add_argument("--target", default=EMBEDDED, help="name or folder of the heads' target")
    parser.add_argument("--out", type=Path, default=RESULTS)
    head_rows.add_shapes(parser, (0.0, 1.0))
    head_rows.add_policies(parser)
    what = "measure rows of one temperature in turn; usually one row is finished before the next"
    parser.add_argument("--in-turn", action="store_true", help=what)
    args = parser.parse_args(arguments)
    asked = head_rows.rows_of(args) or head_rows.with_siblings(WAYS, args.siblings)
    if args.prompts < (most := max(row.get("batch", 1) for row in asked)):
        parser.error(f"--prompts {args.prompts}: rows with {most} requests need at least {most}")
    compile_cache.enable()  # a run that was interrupted finds its programs again
    named = head_rows.named(args.heads)
    facts = {"suite": "heads", "heads": args.heads, "prompts": args.prompts, "new": args.new}
    target = GROWN if args.grown else None if args.target == EMBEDDED else args.target
    asked_for = {"before": args.before, "in_turn": args.in_turn}
    asked_for = {name: value for name, value in asked_for.items() if value}
    header = {**facts, **asked_for, "target": target, **runner.where()}
    lm, prompts = specjax.load(args.target), heldout.prompts(args.prompts, args.before)
    if args.grown:  # heads keep the names that are asked for
        lm = grown.grown_embedded()
        named = {name: grown.grown_drafter(drafter) for name, drafter in named.items()}
    head_rows.check_heads(lm, prompts[0], named.values())
    kept = runner.Kept(args.out, header, fresh=False)
    print(
        f"{len(named)} heads, {len(asked)} rows; each begins with a program for each head",
        flush=True,
    )
    todo = [row for row in asked if row not in kept.finished]
    for rows in head_rows.in_turn(todo) if args.in_turn else [[row] for row in todo]:
        for line in measured(lm, named, prompts, rows, args.new):
            kept.add(line)
            for name, figures in line["figures"].items():
                told = f"{figures['ratio_rounds']['median']:.2f}"
                print(head_rows.label(line["row"]), name, told, flush=True)
    rows = [*(line["row"] for line in kept.lines), *asked]
    rows = [row for index, row in enumerate(rows) if row not in rows[:index]]
    (args.out / "README.md").write_text(page(kept.header, kept.outcomes(rows)), encoding="utf-8")
    return 0


def measured(lm, named: dict, prompts: list[str], rows: list[dict], new: int) -> list[dict]:
    """Measures rows of one temperature and batch in turn with each other: a line for each.

    Args:
      named: the drafter of each name.
      new: the tokens of each prompt.
    """
    lines, ways = [], []
    for row in rows:
        refused = {name: head_rows.refusal(lm, prompts[0], x, row) for name, x in named.items()}
        refused = {name: reason for name, reason in refused.items() if reason}
        lines.append({"row": row, "figures": {}} | ({"refused": refused} if refused else {}))
        drafting = head_rows.drafting_of(row)
        able = (name for name in named if name not in refused)
        ways += [(lines[-1], name, (named[name], drafting)) for name in able]
    batch = rows[0].get("batch", 1)
    count = len(prompts) // batch
    texts, sampling = prompts[: count * batch], [head_rows.sampling_of(rows[0])] * count
    pairs = [way for _, _, way in ways]
    how = new, heldout.REPETITIONS
    found = heldout.measure_model(lm, pairs, texts, sampling, *how) if pairs else []
    for (line, name, _), figures in zip(ways, found, strict=True):
        line["figures"][name] = figures
    return lines


def _target_words(target: str | None) -> str:
    """The arguments that ask for a target; none for the embedded one."""
    if target is None:
        return ""
    return " --grown" if target == GROWN else f" --target {shlex.quote(target)}"


def page(header: dict, lines: list[dict]) -> str:
    """The page of the results, of the lines that are kept of rows."""
    said = ("suite", "heads", "in_turn")  # elsewhere on the page
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v and k not in said)
    rows = [line["row"] for line in lines]
    words = [] if rows == [*WAYS] else head_rows.words_of(rows)
    batched = any("batch" in row for row in rows)
    together = (
        ", or of as many together as a title says" if batched else " of one request at a time"
    )
    over = "the prompts, or over the batches" if batched else "the prompts"
    own_prompts = "before" in header
    own = header.get("target") not in (None, GROWN)
    whose = "a target of their own" if own else "the embedded target"
    text = (
        "# Trained heads side by side\n\n```sh\npython -m benchmarks.heads "
        + shlex.join(header["heads"])
        + f" --prompts {header['prompts']}"
        + (f" --before {header['before']}" if own_prompts else "")
        + (f" --new {header['new']}" if header["new"] != NEW else "")
        + _target_words(header.get("target"))
        + "".join(f" {word}" for word in words)
        + (" --in-turn" if header.get("in_turn") else "")
        + "\n```\n\n"
        f"{facts}.\n\nHeads of {whose} on held-out prompts, in turn with plain "
        f"decoding{together}. τ: tokens that a round emits. *Rounds* and *whole*: "
        "how many times as fast as plain decoding, without and with the reading of the prompt; "
        f"intervals of 95 % are over {over}. *Round*: its time in plain steps. *Accepted*: the "
        "share of rounds in which a draft position was accepted."
        + (
            " The last {before} prompts are not among these.".format(**header)
            if own_prompts
            else ""
        )
        + (" Rows of one temperature were measured in turn." if header.get("in_turn") else "")
        + "\n"
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
    for line in lines:
        row, figures = line["row"], line["figures"]
        best = sorted(figures.items(), key=lambda one: -one[1]["ratio_rounds"]["median"])
        text += f"\n## {head_rows.label(row)}\n\n{cells.table(columns, best)}\n"
        if best and isinstance(row.get("num"), str):
            name, least = best[-1]
            told = cells.ratio(least["ratio_rounds"])
            text += f"\nThe least ratio of rounds is that of {name}: {told}.\n"
        for name, reason in line.get("refused", {}).items():
            text += f"\nWithout {name}: {reason}\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
