"""``specjax train RECIPE [--config NAME_OR_FILE] [--dry-run] [field=value ...]``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from specjax.drafters import registry

# what trains no drafter of the registry; the recipes that do are found there
OTHERS = {
    "corpus": "the manifest of the corpus",
    "packages": "code of published packages, a further corpus",
    "tokenizer": "a byte-level BPE tokenizer",
    "prompts": "held-out prompts, to measure on",
    "pretrain": "a small target, next-token cross-entropy",
    "regenerate": "text by a target, for its drafter to learn from",
    "distill": "a drafter, from a frozen target",
    "boost": "several drafters, each where the earlier ones fail, and their union",
    "online": "a drafter that learns from what it serves, under a shift of domain",
    "objectives": "the same drafter by each objective, a table over several seeds",
    "features": "the hidden states of a target, for heads to read",
    "medusa2": "Medusa heads and their target together",
    "compare": "held-out tau of several heads on the same trees",
    "report": "the report of a run, drawn again: specjax train report folder=FOLDER",
}
HEADS = {name.rpartition(".")[2]: (name, heads) for name, heads in registry.recipes().items()}
RECIPES = OTHERS | {
    name: f"{', '.join(heads)} on a frozen target" for name, (_, heads) in HEADS.items()
}
# recipes with a section `run` whose mesh is used, of several processes too; `boost` and
# `objectives` have distill.run, of one process
SHARED = {"pretrain", "distill", "medusa2", *HEADS}
HELP = {"-h", "--help"}
PATIENCE = 100  # seconds without a sign of life after which a process counts as dead


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
    parser.add_argument(
        "--processes",
        nargs=3,
        metavar=("ADDRESS", "COUNT", "INDEX"),
        help="this is one of several processes that share run.mesh: host:port of the first, how "
        "many there are, which one this is (the first, 0, writes and prints)",
    )
    parser.add_argument("fields", nargs="*", metavar="field=value", help="e.g. run.steps=10")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a recipe; returns the exit status: 0, 1 (diverged, or could not be saved) or 2
    (cannot be run as asked)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if HELP & set(argv) and argv[0] in RECIPES:
        from .describe import help_of

        print(help_of(argv[0], load_recipe(argv[0])), end="")
        return 0
    if not argv:
        parser().print_help()
        return 0
    arguments = parser().parse_intermixed_args(argv)
    from . import config
    from .checkpoint import NotWritten
    from .loop import Diverged

    # installed, this package is specjax.train; in a clone `python -m train` finds its neighbour
    configs = importlib.import_module(f"{__package__.rpartition('train')[0]}configs")
    recipe = load_recipe(arguments.recipe)
    try:
        file = configs.find(arguments.config) if arguments.config else None
        check_recipe(arguments.recipe, file)
        settings = config.load(recipe.Config, file, arguments.fields)
        check_scale(arguments.recipe, settings, arguments.processes)
        check_folders(settings)
        with _process(arguments.processes):
            recipe.run(settings, dry_run=arguments.dry_run)
    except (config.ConfigError, FileNotFoundError, Diverged, NotWritten, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, config.ConfigError | FileNotFoundError) else 1
    return 0


def load_recipe(name: str) -> ModuleType:
    """The module of a recipe, of this package or of a drafter registered from elsewhere."""
    module, _ = HEADS.get(name, (f".{name}", ()))
    return registry.load_module(module, __package__)


def check_recipe(name: str, file) -> None:
    """Raises ConfigError for a TOML file that cannot be this recipe's but is another's."""
    from . import config

    def fits(recipe: str) -> str:
        """What keeps the file from being one of this recipe; empty: nothing."""
        try:
            config.load(load_recipe(recipe).Config, file)
        except config.ConfigError as error:
            return str(error)
        return ""

    problem = fits(name) if file else ""
    if problem.startswith("unknown field"):
        others = [other for other in RECIPES if other != name and not fits(other)]
        if others:
            raise config.ConfigError(
                f"{file.name} is a configuration of the recipe {' or '.join(others)}, not of "
                f"{name} ({problem.partition(';')[0]})"
            )


def check_scale(name: str, settings, processes) -> None:
    """Raises ConfigError where a recipe would pass over what is asked of devices."""
    from .config import ConfigError, RunConfig

    run, usual = getattr(settings, "run", RunConfig()), RunConfig()
    fields = ("mesh", "fully_sharded", "accumulate", "remat", "precision")
    asked = [f"run.{field}" for field in fields if getattr(run, field) != getattr(usual, field)]
    if asked and name not in SHARED:
        raise ConfigError(f"{', '.join(asked)}: the recipe {name} has no use for it; leave it out")
    if processes and name not in SHARED:
        raise ConfigError(
            f"--processes: the recipe {name} runs in one process; of several run "
            f"{', '.join(sorted(SHARED))}"
        )


def check_folders(settings) -> None:
    """Raises ConfigError where a folder that the recipe will write to cannot be made.

    A folder that is not there is made and removed again, since only the system knows whether it
    can be made.
    """
    from .config import ConfigError

    inner = getattr(settings, "distill", settings)
    folders = {}
    if hasattr(settings, "output"):
        folders["output"] = Path(settings.output).parent
    elif hasattr(inner, "run"):
        folders["run.folder" if inner is settings else "distill.run.folder"] = inner.run.folder
    for field, folder in folders.items():
        folder = Path(folder)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"{field}: the folder {str(folder)!r} cannot be written to ({error.strerror}): "
                "give another one"
            ) from None
        finally:
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()


@contextlib.contextmanager
def _process(given: Sequence[str] | None):
    """A context in which this process is one of those that ``--processes`` names, if any; all but
    the first print nothing but errors."""
    if not given:
        yield
        return
    from specjax import sharding

    from .config import ConfigError
    from .scale import is_first

    if not (given[1].isdigit() and given[2].isdigit()):
        raise ConfigError(f"--processes {' '.join(given)}: COUNT and INDEX are whole numbers")
    try:
        sharding.join(given[0], int(given[1]), int(given[2]), patience=PATIENCE)
    except ValueError as error:
        raise ConfigError(f"--processes: {error}") from error
    with contextlib.ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        with sharding.peers():
            yield
