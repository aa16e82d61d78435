"""``specjax layers``: searches the set of sublayers that a model skips to draft for itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import specjax

from .._internal.bayesian import optuna
from ..analysis.bayesian_layers import BayesianSearch
from ..analysis.layer_search import LayerSearch
from ..checkpoints.sub_network import checked_path, default_path, save_layers
from ..drafters.self_draft import SelfDraft
from .options import DTYPE, set_up
from .outputs import check_file
from .prompts import read_prompts


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "layers",
        help="search which layers of a model draft best for the model itself",
        description="Searches which attention and MLP sublayers a model should skip to draft for "
        "itself. Each step removes the sublayer without which the rest has the highest predicted "
        "speed on your prompts; with --trials, the speed of each set is measured, and Bayesian "
        "optimization proposes the sets. The best set is saved, and --drafter self reads it. The "
        "command reports when plain decoding is faster.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--prompts",
        help="a file of prompts, see specjax plan; default, for the embedded model: held-out "
        "prompts that ship with the package",
    )
    p.add_argument(
        "--limit", type=int, default=8, help="the most prompts that are used, 8 by default"
    )
    p.add_argument(
        "--max-new-tokens",
        type=int,
        default=48,
        help="the length in tokens of each text on which sets are judged, 48 by default",
    )
    p.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="run N sets, those in the journal included, which Bayesian optimization proposes "
        "(Draft & Verify), and keep the one with the most tokens a second; this needs optuna: pip "
        "install 'specjax[search]'",
    )
    p.add_argument("--dtype", help=DTYPE)
    p.add_argument(
        "--journal",
        help="a file to which each judged set is written, so that the same command resumes a "
        "search that was stopped",
    )
    p.add_argument(
        "--output",
        help="the file to which the set is saved; default: self.json in the model's folder",
    )
    p.add_argument(
        "--measure",
        action="store_true",
        help="also measure the best set against plain decoding, and save it only if it is faster",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Searches, saves and prints the best set; returns the exit code."""
    from rich.console import Console

    measured = arguments.trials is not None
    if measured:
        optuna()  # refused before the model is read
    if arguments.output:
        _check_output(arguments.output)
    if arguments.journal:
        check_file("--journal", arguments.journal)
    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    lm = set_up(arguments)
    where = arguments.output or default_path(lm)
    if where is None:
        raise ValueError(
            f"--model {arguments.model} has no folder of its own to save the set in: give --output "
            "FILE"
        )
    _check_output(where)
    search = _measured if measured else _predicted
    with Console(stderr=True).status("preparing") as status:
        drafter, found, words = search(arguments, lm, prompts, status.update)
    facts = {"skip": list(drafter.skip), "num_draft": drafter.num_draft} | found
    faster = measured or found["predicted_ratio"] > 1
    if faster and (arguments.measure or measured):
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
        faster = pairs.ratio > 1
    if not faster:
        words = f"plain decoding is faster; the best set was {words}"
        print(json.dumps(facts) if arguments.json else words)
        return 0
    path = save_layers(drafter, lm, where, found)
    print(json.dumps(facts) if arguments.json else words)
    print(f"wrote {path}; --drafter self reads it", file=sys.stderr)
    return 0


def _check_output(where: str | Path) -> None:
    """Raises ``ValueError`` or ``FileNotFoundError`` where the set could not be saved."""
    check_file("--output", checked_path(where))


def _predicted(arguments, lm, prompts, tell) -> tuple[SelfDraft, dict, str]:
    """Returns the drafter of the set with the best prediction, its figures, and words."""
    tell("timing passes")
    search = LayerSearch(
        lm, prompts, max_new_tokens=arguments.max_new_tokens, journal=arguments.journal
    )
    search.run(tell)
    choice = search.choice
    found = {
        "agreement": choice.agreement,
        "predicted_ratio": choice.ratio,
        "judged": len(search.known),
        "prompts": len(search.begin),
        "max_new_tokens": search.size,
    }
    words = f"without {', '.join(choice.skip)}, {choice.num_draft} drafts a round: "
    words += f"{choice.agreement:.0%} of tokens agree, predicted {choice.ratio:.2f} x plain"
    drafter = SelfDraft(num_draft=choice.num_draft, target=lm.target, skip=choice.skip)
    return drafter, found, words


def _measured(arguments, lm, prompts, tell) -> tuple[SelfDraft, dict, str]:
    """Returns the drafter of the set that was measured fastest, its figures, and words."""
    search = BayesianSearch(
        lm, prompts, max_new_tokens=arguments.max_new_tokens, journal=arguments.journal
    )
    drafter = search.run(arguments.trials, tell)
    rate, count = search.best.rate, len(search.trials)
    found = {
        "tokens_per_second": rate,
        "trials": count,
        "prompts": len(prompts),
        "max_new_tokens": arguments.max_new_tokens,
    }
    words = f"without {', '.join(drafter.skip)}, at most {drafter.num_draft} drafts a round: "
    return drafter, found, words + f"{rate:.1f} tokens/s in {count} trials"
