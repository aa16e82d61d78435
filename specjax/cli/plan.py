"""``specjax plan``: finds the fastest drafter, number of drafts and batch size for prompts."""

from __future__ import annotations

import argparse
import json
import sys

import specjax

from ..drafters import registry
from .options import DTYPE, INTERRUPTED, add_filters, add_quantize, set_up
from .prompts import read_prompts


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "plan",
        help="find the fastest drafter, number of drafts and batch for your prompts",
        description="Decodes your prompts with a few settings, predicts the rate of many more, and "
        "reports the fastest, which is plain decoding where no drafter is faster. Ctrl-C ends the "
        "command with the results known by then.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        action="append",
        help=f"auto, draft (the model's own draft model), {', '.join(registry.table_names())}, "
        "self (the model's own layers, searched where none are saved), self:exit=4, the name of "
        "heads that belong to the model (medusa, eagle3, ...), or the folder or hub name of a "
        "draft model or of heads (a draft model with another tokenizer is planned as tli:NAME and "
        "as slem:NAME), or MODULE:CLASS for a drafter of your own in MODULE.py; before "
        "NAME also ngram+, suffix+, sam+ or copy+; may be repeated; default: ngram, draft if the "
        "model has a draft model, self if its layers are saved",
    )
    p.add_argument(
        "--prompts",
        help="a file with one prompt in each line; in a .jsonl file each line is a string or "
        '{"text": ...} or {"prompt": ...}, for Whisper {"features": a .npy file}; default, for the '
        "embedded model: held-out prompts that ship with the package",
    )
    p.add_argument(
        "--limit",
        type=int,
        default=8,
        help="the most prompts that are used, evenly spread over the file; 8 by default",
    )
    p.add_argument(
        "--num-draft",
        type=int,
        nargs="+",
        default=[1, 3, 7, 15],
        help="numbers of tokens drafted a round that are considered; default: 1 3 7 15",
    )
    p.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1],
        help="numbers of prompts decoded together that are considered; default: 1",
    )
    p.add_argument(
        "--max-new-tokens", type=int, default=64, help="new tokens of a text, 64 by default"
    )
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add_filters(p)
    p.add_argument(
        "--sibling-sampling",
        choices=["top", "iid"],
        help="above temperature 0, draft the most probable tokens (top) or draw each token (iid, "
        "as draft models and heads do by default)",
    )
    p.add_argument("--dtype", help=DTYPE)
    add_quantize(p)
    p.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help="also run the N best candidates (default 3) and plain decoding, and choose by the "
        "measured rates",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints the candidates and the choice; returns the exit code."""
    from rich.console import Console

    names = ("temperature", "top_k", "top_p", "min_p")
    values = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    lm = set_up(arguments)
    with Console(stderr=True).status("planning") as status:  # shown on terminals only
        found = specjax.plan(
            lm,
            prompts,
            drafters=arguments.drafter,
            num_drafts=arguments.num_draft,
            batches=arguments.batch,
            drafting=specjax.Drafting(sibling_sampling=arguments.sibling_sampling),
            sampling=specjax.Sampling(**given),
            max_new_tokens=arguments.max_new_tokens,
            verify=arguments.verify,
            progress=status.update,
        )
    if arguments.json:
        print(json.dumps(found.as_json()))
    else:
        if sys.stdout.isatty():
            Console().print(found.table())
            print(found.verdict)
        else:
            print(found)
        print(f"planned in {found.seconds:.0f} s", file=sys.stderr)
    return 0 if found.finished else INTERRUPTED
