"""``specjax calculator``: the speed of speculative decoding from a few numbers, without a model."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import specjax

from .outputs import check_file
from .screen import in_width

LEAST_MS, MOST_MS = 1e-9, 1e18  # of a pass


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "calculator",
        help="compute the speed of speculative decoding from acceptance and costs",
        description="Computes tokens per round, speed-up, time to the first token and time per "
        "token in closed form, and the number of drafts that is fastest. The command loads no "
        "model; specjax plan measures instead.",
    )
    p.add_argument(
        "--acceptance",
        nargs="+",
        metavar="RATE",
        help="the acceptance rate: one number for all positions, or one for each; for --tree the "
        "rates of a depth by rank, with commas: 0.7,0.1 0.6,0.1",
    )
    p.add_argument(
        "--tau",
        type=float,
        help="instead of --acceptance: tokens per round of a chain of --num-draft tokens, the "
        "target's own token included",
    )
    p.add_argument(
        "--draft-cost",
        type=float,
        default=0.05,
        metavar="C",
        help="the cost of the drafter's pass over one token in those of the target; default: 0.05",
    )
    p.add_argument(
        "--num-draft",
        type=int,
        help="tokens drafted a round; default: 4, or as many as --acceptance has rates",
    )
    p.add_argument("--tree", help="instead of --num-draft: a static tree, such as 3x2x1")
    p.add_argument(
        "--parallel",
        action="store_true",
        help="the drafter drafts all levels in one pass, as DFlash and Medusa do",
    )
    p.add_argument(
        "--overhead",
        type=float,
        default=0.0,
        help="the cost of a round besides its passes, plain or not, in passes over one token",
    )
    p.add_argument(
        "--draft-overhead",
        type=float,
        default=0.0,
        metavar="COST",
        help="what a round that drafts costs beside that and its passes, in passes over one token",
    )
    p.add_argument(
        "--read-cost",
        type=float,
        metavar="COST",
        help="what reading the prompt for the drafter costs, in the time in which the target reads "
        "it; default: --draft-cost",
    )
    p.add_argument(
        "--knee",
        type=float,
        default=math.inf,
        metavar="TOKENS",
        help="the number of tokens up to which a pass takes as long as one over a single token; "
        "default: unbounded",
    )
    p.add_argument(
        "--passes",
        nargs="+",
        metavar="N:COST",
        help="measured costs of the target's pass over N nodes of a row: 1:1 4:1.1 8:1.4; --knee "
        "then decides what further rows, the drafter's wider passes and the prompt cost",
    )
    p.add_argument(
        "--batch", type=int, nargs="+", default=[1], help="rows decoded together; default: 1"
    )
    p.add_argument(
        "--prompt", type=int, default=0, help="tokens of a prompt; 0, the default: not counted"
    )
    p.add_argument(
        "--new-tokens", type=int, default=128, help="tokens of a request; 128 by default"
    )
    p.add_argument(
        "--pass-ms",
        type=float,
        metavar="MS",
        help="milliseconds of the target's pass over one token; default: times are in passes",
    )
    p.add_argument(
        "--most",
        type=int,
        default=16,
        help="the longest chain that is considered, unless a longer one is asked for (16)",
    )
    p.add_argument("--picture", metavar="FILE", help="an .svg file to which the curves are drawn")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Computes and prints the tables; returns the exit code."""
    from ..analysis.calculator_picture import COLOURS, picture

    if arguments.pass_ms is not None and not LEAST_MS <= arguments.pass_ms <= MOST_MS:
        raise ValueError(
            f"--pass-ms {arguments.pass_ms:g}: give milliseconds, at least {LEAST_MS} and at most "
            f"{MOST_MS:g}"
        )
    if arguments.picture and len(arguments.batch) > len(COLOURS):
        raise ValueError(
            f"--batch {' '.join(map(str, arguments.batch))}: a picture has colours for "
            f"{len(COLOURS)} sizes of the batch, not for {len(arguments.batch)}; give fewer, or "
            "leave --picture out"
        )
    if arguments.picture and Path(arguments.picture).suffix != ".svg":
        raise ValueError(f"--picture {arguments.picture}: it is drawn as SVG; give a name of .svg")
    if arguments.picture:
        check_file("--picture", arguments.picture)
    found = [
        specjax.analysis.calculate(
            _acceptance(arguments.acceptance),
            tau=arguments.tau,
            draft_cost=arguments.draft_cost,
            num_draft=arguments.num_draft,
            tree=arguments.tree,
            parallel=arguments.parallel,
            overhead=arguments.overhead,
            draft_overhead=arguments.draft_overhead,
            read_cost=arguments.read_cost,
            knee=arguments.knee,
            passes=_passes(arguments.passes),
            batch=batch,
            prompt=arguments.prompt,
            new_tokens=arguments.new_tokens,
            pass_seconds=None if arguments.pass_ms is None else arguments.pass_ms / 1e3,
            most=arguments.most,
        )
        for batch in arguments.batch
    ]
    if arguments.picture:
        Path(arguments.picture).write_text(picture(found), encoding="utf-8")
    if arguments.json:
        print(json.dumps({"calculations": [one.as_json() for one in found]}))
    else:
        for one in found:
            print(f"batch {one.batch}" if len(found) > 1 else "", in_width(one), sep="\n")
    return 0


def _acceptance(words: list[str] | None):
    """Returns the rates of ``--acceptance``."""
    if words is None:
        return None
    try:
        rows = [[float(rate) for rate in word.split(",")] for word in words]
    except ValueError:
        raise ValueError(
            f"--acceptance {' '.join(words)}: give numbers from 0 to 1, and commas between the "
            "rates of one depth of a tree"
        ) from None
    if any(len(row) > 1 for row in rows):
        return rows
    rates = [rate for row in rows for rate in row]
    return rates[0] if len(rates) == 1 else rates


def _passes(words: list[str] | None) -> dict[int, float] | None:
    """Returns the costs of ``--passes`` by the number of nodes."""
    if words is None:
        return None
    try:
        pairs = [word.partition(":") for word in words]
        costs = {int(nodes): float(cost) for nodes, _, cost in pairs}
    except ValueError:
        raise ValueError(
            f"--passes {' '.join(words)}: give pairs N:COST, such as 1:1 4:1.1 8:1.4"
        ) from None
    if len(costs) < len(words):
        raise ValueError(f"--passes {' '.join(words)}: a number of nodes is given twice")
    return costs
