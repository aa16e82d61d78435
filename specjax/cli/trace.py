"""``specjax trace``: decodes round by round into a page for a browser."""

from __future__ import annotations

import argparse

import jax

import specjax

from ..tracing import api, html_page
from .options import INTERRUPTED, NOTHING_TO_DRAW, add_decoding, options_of, save_session, set_up
from .prompts import add_prompt, asked

OUTPUT = "specjax-trace.html"


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "trace",
        help="see each round: the tree, p and q, what was accepted and why",
        description="Continues a prompt as generate does and writes one HTML page, which needs no "
        "network: each round's tree with p and q at its nodes, what was accepted and why, and the "
        "text so far. Step through it with the arrow keys.",
    )
    add_prompt(p)
    p.add_argument(
        "-o",
        "--output",
        default=OUTPUT,
        help=f"the page, {OUTPUT} by default; an earlier page is replaced",
    )
    p.add_argument(
        "--rounds",
        type=int,
        default=api.ROUNDS,
        help=f"at most so many rounds, {api.ROUNDS} by default: they bound the page's size",
    )
    add_decoding(p)


def run(arguments: argparse.Namespace) -> int:
    """Traces, writes, says where and how large."""
    html_page.check_output(arguments.output)
    prompt, heard = asked(arguments)
    lm = set_up(arguments)
    options = options_of(arguments, lm) | {"inputs": heard}
    found = specjax.trace(lm, prompt, rounds=arguments.rounds, **options)
    save_session(arguments, options)
    if jax.process_index() == 0:  # of several processes, which all have the rounds
        size = found.save(arguments.output)
        rounds = f"{len(found.rounds)} round{'s' * (len(found.rounds) != 1)}"
        approximate = f" · {found.approximate}: approximate" if found.approximate else ""
        going = "" if found.reason else " · the text would go on (more: --rounds)"
        print(
            f"{arguments.output}: {rounds}, {len(found.tokens)} tokens, τ {found.tau:.2f}, "
            f"{size / 1000:,.0f} kB{approximate}{going if not found.interrupted else ''}"
        )
    if found.interrupted:
        return INTERRUPTED
    return NOTHING_TO_DRAW if found.reason == "no token" else 0
