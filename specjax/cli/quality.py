"""``specjax quality``: what an approximate rule costs."""

from __future__ import annotations

import argparse
import dataclasses
import json

import specjax

from .. import acceptance
from .options import add_decoding, options_of, set_up
from .prompts import read_prompts


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "quality",
        help="what approximate acceptance rules cost in quality, beside tokens a pass",
        description="Decodes prompts with each rule and plainly, and scores the texts by the "
        "target: log-likelihood, rank, and above temperature 0 the distance of the emitted law to "
        "the target's.",
    )
    add_decoding(p)
    p.add_argument(
        "--rules",
        nargs="+",
        help="acceptance rules, with settings after a colon (approximate-top-k:k=3); default: auto "
        "and all approximate ones",
    )
    p.add_argument(
        "--prompts",
        help='a file of prompts: one a line, or in a .jsonl file one string or {"text": ...} a '
        "line; default, for the embedded model: held-out prompts that ship with it",
    )
    p.add_argument(
        "--limit", type=int, default=8, help="prompts used at most, evenly spread over the file"
    )
    p.add_argument("--probes", type=int, default=2, help="places a text at which laws are compared")
    p.add_argument("--probe-samples", type=int, default=256, help="draws at each of these places")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """``specjax quality``: prints a table, plain decoding first."""
    given = [arguments.rule] if arguments.rule != "auto" else None
    if arguments.rules and given:
        raise ValueError(
            f"--rules {' '.join(arguments.rules)} and --rule {arguments.rule}: give one of the two"
        )
    if arguments.session:
        raise ValueError(
            f"--session {arguments.session}: a rule would draft from what the rule before it "
            "wrote; leave --session out"
        )
    approximate = [name for name, rule in acceptance.RULES.items() if not rule.lossless]
    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    lm = set_up(arguments)
    found = specjax.quality(
        lm,
        prompts,
        rules=arguments.rules or given or ["auto", *approximate],
        probes=arguments.probes,
        probe_samples=arguments.probe_samples,
        **options_of(arguments, lm),
    )
    print(json.dumps(dataclasses.asdict(found)) if arguments.json else found)
    return 0
