"""``specjax trace``: writes a page that shows each round of a text in a browser."""

from __future__ import annotations

import argparse

import jax

import specjax

from ..tracing import api, html_page
from .options import INTERRUPTED, NOTHING_TO_DRAW, add_decoding, options_of, set_up
from .prompts import add_prompt, asked
from .sessions import save_session

OUTPUT = "specjax-trace.html"


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "trace",
        help="show each round: the tree, p and q, and which tokens were accepted and why",
        description="Continues a prompt as generate does and writes one HTML page, which needs no "
        "network. The page shows the tree of each round with p and q at its nodes, which tokens "
        "were accepted and why, and the text so far. The arrow keys step through the rounds.",
    )
    add_prompt(p)
    p.add_argument(
        "-o",
        "--output",
        default=OUTPUT,
        help=f"the name of the page, {OUTPUT} by default; an earlier page is replaced",
    )
    p.add_argument(
        "--rounds",
        type=int,
        default=api.ROUNDS,
        help=f"the most rounds that are run, {api.ROUNDS} by default, which limits the page's size",
    )
    add_decoding(p)


def run(arguments: argparse.Namespace) -> int:
    """Traces, writes the page and prints its name and size; returns the exit code."""
    html_page.check_output(arguments.output)
    prompt, heard = asked(arguments)
    lm = set_up(arguments)
    options = options_of(arguments, lm) | {"inputs": heard}
    found = specjax.trace(lm, prompt, rounds=arguments.rounds, **options)
    if found.interrupted and not found.rounds:
        raise KeyboardInterrupt  # nothing is shown in place of an earlier page
    save_session(arguments, options)
    if jax.process_index() == 0:  # of several processes, which all have the rounds
        size = found.save(arguments.output)
        num = max(len(found.rounds) - 1, 0)  # the first is the pass over the end of the prompt
        rounds = f"{num} round{'s' * (num != 1)}"
        approximate = f" · {found.approximate}: approximate" if found.approximate else ""
        going = "" if found.reason else " · the text would go on (pass a greater --rounds)"
        print(
            f"{arguments.output}: {rounds}, {len(found.tokens)} tokens, τ {found.tau:.2f}, "
            f"{size / 1000:,.0f} kB{approximate}{going if not found.interrupted else ''}"
        )
    if found.interrupted:
        return INTERRUPTED
    return NOTHING_TO_DRAW if found.reason == "no token" else 0
