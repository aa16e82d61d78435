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

from specjax._internal.keywords import did_you_mean
from specjax.drafters import registry

# The recipes that train no drafter of the registry, which names all others.
OTHERS = {
    "corpus": "list the files of the standard library as a corpus",
    "packages": "download published packages as a second corpus of code",
    "tokenizer": "train a byte-level BPE tokenizer",
    "prompts": "choose held-out prompts to measure on",
    "pretrain": "train a small target by next-token cross-entropy",
    "unlikelihood": "teach a target not to repeat what it wrote",
    "regenerate": "let a target write the text that its drafter learns from",
    "distill": "train a draft model from a frozen target",
    "prune": "leave out layers of a target, and train the rest as its draft model",
    "depth_width": "train draft models of one size, from shallow and wide to deep and narrow",
    "boost": "train several draft models, each where the earlier ones fail",
    "online": "let a draft model learn from the requests that it serves",
    "probe": "train a probe that says which drafted tokens need no verification",
    "reward": "train a reward model that says which steps of a draft model to keep",
    "objectives": "compare the objectives of distillation over several seeds",
    "features": "store the hidden states of a target for heads to learn from",
    "medusa2": "train Medusa heads together with their target",
    "compare": "compare several heads on the same held-out prompts and trees",
    "report": "draw the report of a run again: specjax train report folder=FOLDER",
}
HEADS = {name.rpartition(".")[2]: (name, heads) for name, heads in registry.recipes().items()}
RECIPES = OTHERS | {
    name: f"train {', '.join(heads)} on a frozen target" for name, (_, heads) in HEADS.items()
}
# The recipes that can run on a mesh of devices and in several processes. `boost` and `objectives`
# have the section distill.run, and run in one process.
SHARED = {"pretrain", "unlikelihood", "distill", "prune", "medusa2", *HEADS}
NOT_RECOMPUTED = ("specdec", "mtp_heads")  # recipes whose layers `run.remat` does not reach
HELP = {"-h", "--help"}
PATIENCE = 100  # seconds without a sign of life after which a process counts as dead


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="specjax train",
        description="Trains targets and drafters. A run that was stopped is resumed by the same "
        "command.",
        epilog="recipes (specjax train RECIPE --help lists the fields):\n"
        + "\n".join(f"  {name:<16}{what}" for name, what in RECIPES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="one of the recipes listed below")
    parser.add_argument("--config", help="a shipped configuration or a TOML file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the estimated memory and time, and stop"
    )
    parser.add_argument(
        "--processes",
        nargs=3,
        metavar=("ADDRESS", "COUNT", "INDEX"),
        help="run as one of several processes that share run.mesh: ADDRESS is the host:port of "
        "the first process, COUNT their number, INDEX the number of this process (process 0 "
        "writes and prints)",
    )
    parser.add_argument("fields", nargs="*", metavar="field=value", help="e.g. run.steps=10")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a recipe.

    Args:
      argv: the words of the command after ``specjax train``; None: those of this process.

    Returns:
      The exit status: 0, 1 (diverged, or could not be saved) or 2 (the request is not valid).
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if HELP & set(argv) and argv[0] in RECIPES:
        from .describe import help_of

        print(help_of(argv[0], load_recipe(argv[0])), end="")
        return 0
    if not argv:
        parser().print_help()
        return 0
    arguments = parser().parse_intermixed_args(argv)
    if arguments.recipe not in RECIPES:
        print(f"error: {_unknown(arguments.recipe)}", file=sys.stderr)
        return 2
    from . import config, outlook
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
        if not arguments.processes or arguments.processes[2] == "0":  # the others would interfere
            check_folders(settings)
        with _process(arguments.processes):
            if arguments.dry_run:
                outlook.note("reading the models and the text")
            elif _is_done(recipe, settings):
                return 0
            with _alone(settings, arguments.dry_run):
                recipe.run(settings, dry_run=arguments.dry_run)
    except (config.ConfigError, FileNotFoundError, Diverged, NotWritten, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, config.ConfigError | FileNotFoundError) else 1
    return 0


def _unknown(name: str) -> str:
    """What to say of a recipe that does not exist, which may be the name of a drafter."""
    entry = registry.find(name)
    meant = did_you_mean(name, RECIPES)
    if entry is not None and entry.recipe:
        meant = f"the recipe {entry.recipe.rpartition('.')[2]} trains {entry.name}. "
    elif entry is not None and entry.name == registry.DRAFT:
        meant = "the recipe distill trains a draft model. "
    return f"unknown recipe {name}: {meant}Known are {', '.join(RECIPES)}"


def load_recipe(name: str) -> ModuleType:
    """The module of a recipe, which a drafter from outside this package may register."""
    module, _ = HEADS.get(name, (f".{name}", ()))
    return registry.load_module(module, __package__)


def check_recipe(name: str, file) -> None:
    """Raises ConfigError for a TOML file that fits another recipe and not this one."""
    from . import config

    def fits(recipe: str) -> str:
        """The reason why the file does not fit a recipe; empty where it fits."""
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
    """Raises ConfigError where a recipe would ignore a setting of devices or processes."""
    from .config import ConfigError, RunConfig

    run, usual = getattr(settings, "run", RunConfig()), RunConfig()
    fields = ("mesh", "fully_sharded", "accumulate", "remat", "precision")
    asked = [f"run.{field}" for field in fields if getattr(run, field) != getattr(usual, field)]
    if asked and name not in SHARED:
        raise ConfigError(f"{', '.join(asked)}: the recipe {name} has no use for it; leave it out")
    if "run.remat" in asked and name in NOT_RECOMPUTED:
        raise ConfigError(
            f"run.remat=true: the recipe {name} recomputes no layer; leave it out, and save memory "
            "by run.accumulate"
        )
    if processes and name not in SHARED:
        raise ConfigError(
            f"--processes: the recipe {name} runs in one process; the recipes that run in several "
            f"are {', '.join(sorted(SHARED))}"
        )


def _is_done(recipe: ModuleType, settings) -> bool:
    """Whether a run has finished before, which is printed.

    It is read from the folder alone, before a text is read or a model is loaded. A recipe that
    trains in several phases has a function ``phases(settings)``, which returns their
    configurations as each is stored in the folder of its phase; the run ends with the last one.

    Raises:
      ConfigError: the folder holds a run of another configuration.
    """
    from . import checkpoint
    from .config import resolved

    if not hasattr(settings, "run"):
        return False
    phases = recipe.phases(settings) if hasattr(recipe, "phases") else [settings]
    for phase in phases:
        folder, flat = Path(phase.run.folder), resolved(phase)
        checkpoint.check_config(folder, flat)
    if not checkpoint.is_done(folder, flat):
        return False
    print(
        f"{folder} is at step {settings.run.steps} already, its last, and was exported then: a "
        f"greater run.steps goes on; `specjax train report folder={folder}` draws the report "
        f"again; without its {checkpoint.FINISHED} the next call exports it again"
    )
    return True


def _run_folder(settings) -> dict[str, Path]:
    """The folder of a run by the name of its field; empty for recipes with an ``output``."""
    inner = getattr(settings, "distill", settings)
    if hasattr(settings, "output") or not hasattr(inner, "run"):
        return {}
    return {"run.folder" if inner is settings else "distill.run.folder": Path(inner.run.folder)}


@contextlib.contextmanager
def _alone(settings, dry_run: bool):
    """A context in which no other process writes to the folder of a run, exports included, and a
    full disk is said in words."""
    from . import checkpoint

    with contextlib.ExitStack() as stack:
        for folder in () if dry_run else _run_folder(settings).values():
            stack.enter_context(checkpoint.alone(folder))
            stack.enter_context(checkpoint.writing(folder))
        yield


def check_folders(settings) -> None:
    """Raises ConfigError where a folder that the recipe will write to cannot be made.

    A folder that is not there is made and removed again, since only the system knows whether it
    can be made.
    """
    from .config import ConfigError

    folders = _run_folder(settings)
    if hasattr(settings, "output"):
        folders["output"] = Path(settings.output).parent
    for field, folder in folders.items():
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
    """A context in which this process has joined those of ``--processes``, if any are given.

    All processes but the first print errors alone.
    """
    if not given:
        yield
        return
    from specjax import sharding

    from .config import ConfigError
    from .scale import is_first

    if not (given[1].isdigit() and given[2].isdigit()):
        raise ConfigError(f"--processes {' '.join(given)}: COUNT and INDEX must be whole numbers")
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
