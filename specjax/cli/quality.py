"""``specjax quality``: measures how much approximate acceptance rules change the text."""

from __future__ import annotations

import argparse
import dataclasses
import json

import specjax

from .. import acceptance
from ..acceptance.chain_rule import ChainRule
from ..drafters.hybrid import drafts_chains
from ..text import drafter_names
from .options import add_decoding, options_of, set_up
from .prompts import read_prompts, read_tasks
from .screen import in_width


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "quality",
        help="measure the quality and the speed of approximate acceptance rules",
        description="Decodes prompts with each rule and plainly, and scores the texts by the "
        "target: the log-likelihood and the rank of the tokens and, above temperature 0, the "
        "distance between the emitted law and the target's law.",
    )
    add_decoding(p)
    p.add_argument(
        "--rules",
        nargs="+",
        help="the acceptance rules, with settings after a colon (approximate-top-k:k=3); default: "
        "auto and all approximate rules",
    )
    p.add_argument(
        "--prompts",
        help="a file with one prompt in each line; in a .jsonl file each line is a string or "
        '{"text": ...} or {"prompt": ...}, with "answer" or "tests" where a text can be right or '
        "wrong; default, for the embedded model: held-out prompts that ship with the package",
    )
    p.add_argument(
        "--limit",
        type=int,
        default=8,
        help="the most prompts that are used, evenly spread over the file; 8 by default",
    )
    p.add_argument(
        "--probes",
        type=int,
        default=2,
        help="the number of positions of each text at which laws are compared, 2 by default",
    )
    p.add_argument(
        "--probe-samples",
        type=int,
        default=256,
        help="the number of draws at each of these positions, 256 by default",
    )
    p.add_argument(
        "--run-code",
        action="store_true",
        help='run what the model wrote with the "tests" of a prompt, in a process with limits on '
        "time and memory that is no sandbox",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints a table, with plain decoding first; returns the exit code."""
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
    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    tasks = read_tasks(arguments.prompts, arguments.limit, arguments.run_code)
    lm = set_up(arguments)
    options = options_of(arguments, lm)
    chains = _drafts_chains(lm, options)
    approximate = [
        name
        for name, rule in acceptance.RULES.items()
        if not rule.lossless and (chains or not isinstance(rule, ChainRule))
    ]
    found = specjax.quality(
        lm,
        prompts,
        rules=arguments.rules or given or ["auto", *approximate],
        probes=arguments.probes,
        probe_samples=arguments.probe_samples,
        tasks=tasks,
        **options,
    )
    print(json.dumps(dataclasses.asdict(found)) if arguments.json else in_width(found))
    return 0


def _drafts_chains(lm, options: dict) -> bool:
    """Whether the drafter of the options proposes chains, which some rules need."""
    drafting = options["drafting"]
    found, _ = drafter_names.resolve_drafter(
        lm, options["drafter"], drafting.num, tree=drafting.tree
    )
    return drafts_chains(found)
