"""``specjax train RECIPE [--config NAME_OR_FILE] [--dry-run] [field=value ...]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

RECIPES = {
    "corpus": "the manifest of the corpus",
    "tokenizer": "a byte-level BPE tokenizer",
    "prompts": "held-out prompts, to measure on",
    "pretrain": "a small target, next-token cross-entropy",
    "regenerate": "text by a target, for its drafter to learn from",
    "distill": "a drafter, from a frozen target",
    "online": "a drafter that learns from what it serves, under a shift of domain",
    "objectives": "the same drafter by each objective, a table over several seeds",
    "features": "the hidden states of a target, for heads to read",
    "heads": "Medusa-1 or Blockwise heads on a frozen target",
    "eagle": "EAGLE's head on a frozen target, by regression, and HASS's",
    "eagle3": "EAGLE-3's head on a frozen target, by training-time test",
    "mtp": "multi-token prediction modules on a frozen target",
    "block": "a DFlash block drafter on a frozen target, from random anchors",
    "hydra": "Hydra or Hydra++ heads on a frozen target, by the teacher loss",
    "medusa2": "Medusa heads and their target together",
    "compare": "held-out tau of several heads on the same trees",
    "speculator": "MLP and LSTM speculators and ReDrafters, in two phases",
}
HELP = {"-h", "--help"}


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="specjax train",
        description="Trains targets and drafters; a run that was stopped goes on where it was.",
        epilog="recipes (specjax train RECIPE --help lists the fields):\n"
        + "\n".join(f"  {name:<12}{what}" for name, what in RECIPES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help="one of those below")
    parser.add_argument("--config", help="a known name, or a TOML file; default: no file")
    parser.add_argument("--dry-run", action="store_true", help="print sizes and times, then stop")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="e.g. run.steps=10")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a recipe; returns the exit status: 0, 1 (diverged) or 2 (cannot be run as asked)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if HELP & set(argv) and argv[0] in RECIPES:
        from .describe import help_of

        print(help_of(argv[0], importlib.import_module(f".{argv[0]}", __package__)), end="")
        return 0
    arguments = parser().parse_intermixed_args(argv)
    from . import config
    from .loop import Diverged

    # installed, this package is specjax.train; in a clone `python -m train` finds its neighbour
    configs = importlib.import_module(f"{__package__.rpartition('train')[0]}configs")
    recipe = importlib.import_module(f".{arguments.recipe}", __package__)
    try:
        file = configs.find(arguments.config) if arguments.config else None
        settings = config.load(recipe.Config, file, arguments.fields)
        recipe.run(settings, dry_run=arguments.dry_run)
    except (config.ConfigError, FileNotFoundError, Diverged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2
    return 0
