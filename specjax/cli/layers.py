"""``specjax layers``: searches which sublayers of a model to leave out so that the rest drafts."""

from __future__ import annotations

import argparse
import json
import sys

import specjax

from ..analysis.layer_search import LayerSearch
from ..checkpoints.sub_network import default_path, save_layers
from .options import DTYPE, set_up
from .prompts import read_prompts


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "layers",
        help="search which layers of a model draft best for the model itself",
        description="Takes away one attention or MLP sublayer after the other, each time the one "
        "without which the rest is predicted to draft fastest for your prompts, and saves the best "
        "set, which --drafter self then reads. Says so where plain decoding is faster.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument("--prompts", help="a file of prompts, as for plan; default: the shipped ones")
    p.add_argument("--limit", type=int, default=8, help="prompts used at most")
    p.add_argument(
        "--max-new-tokens",
        type=int,
        default=48,
        help="new tokens of each text by which sets are judged, 48 by default",
    )
    p.add_argument("--dtype", help=DTYPE)
    p.add_argument(
        "--journal", help="a file of the sets that were judged: a search that stopped goes on"
    )
    p.add_argument(
        "--output", help="where the set is saved; default: self.json in the folder of the model"
    )
    p.add_argument(
        "--measure", action="store_true", help="run the choice beside plain decoding, too"
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """``specjax layers``: searches, saves and prints the choice."""
    from rich.console import Console

    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    lm = set_up(arguments)
    where = arguments.output or default_path(lm)
    if where is None:
        raise ValueError(
            f"--model {arguments.model} has no folder of its own to save in: give --output FILE"
        )
    with Console(stderr=True).status("timing passes") as status:
        search = LayerSearch(
            lm, prompts, max_new_tokens=arguments.max_new_tokens, journal=arguments.journal
        )
        drafter = search.run(status.update)
    choice = search.choice
    found = {
        "agreement": choice.agreement,
        "predicted_ratio": choice.ratio,
        "judged": len(search.known),
        "prompts": len(search.begin),
        "max_new_tokens": search.size,
    }
    facts = {"skip": list(choice.skip), "num_draft": choice.num_draft} | found
    words = f"without {', '.join(choice.skip)}, {choice.num_draft} drafts a round: "
    words += f"{choice.agreement:.0%} of tokens agree, predicted {choice.ratio:.2f} x plain"
    if drafter is None:
        words = f"plain decoding is faster; the best set was {words}"
        print(json.dumps(facts) if arguments.json else words)
        return 0
    if arguments.measure:
        pairs = specjax.compare(
            lm,
            prompts,
            drafter=drafter,
            drafting=specjax.Drafting(num=drafter.num_draft),
            max_new_tokens=arguments.max_new_tokens,
        )
        found["measured_ratio"] = facts["measured_ratio"] = pairs.ratio
        low, high = pairs.interval
        words += f", measured {pairs.ratio:.2f} [{low:.2f}, {high:.2f}] in whole runs"
    path = save_layers(drafter, lm, where, found)
    print(json.dumps(facts) if arguments.json else words)
    print(f"wrote {path}; --drafter self reads it", file=sys.stderr)
    return 0
