"""Runs a named suite: ``python -m benchmarks cpu``; results go to ``benchmarks/results/cpu``.

Every finished row is written at once, so that an interrupted suite continues where it stopped.
Other settings or another commit start the suite anew; the earlier rows are set aside in a file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if every row was measured, 1 if some failed, 2 for bad input, 130 for Ctrl-C."""
    args = _parser().parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to the peers
    if args.suite in ("cpu", "cpu-peers"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    from specjax._internal import compile_cache  # imports JAX, which reads the environment then

    from . import runner, suites

    if args.suite in suites.KEEPS_PROGRAMS:
        compile_cache.enable()

    options = {k: v for k, v in vars(args).items() if k in suites.OPTIONS and v is not None}
    name = f"{args.suite}-rehearsal" if args.rehearse else args.suite
    folder = args.out or RESULTS / name
    try:
        if args.redraw:
            runner.redraw(folder)
            return 0
        return runner.run_suite(
            args.suite,
            options,
            folder=folder,
            cache=args.cache or _cache(),
            rehearse=args.rehearse,
            fresh=args.fresh,
            only=args.only,
        )
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: stopped; the same command continues from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suite",
        help="smoke, cpu, gpu, embedded, workloads, quality, self-drafting, small-caches, "
        "cascades, scaling, peers, cpu-peers, serving, regeneration, eagle",
    )
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--cache", type=Path, help="folder of the model pairs that the suites make")
    parser.add_argument(
        "--fresh", action="store_true", help="measure all rows anew; the earlier rows are set aside"
    )
    parser.add_argument(
        "--only", metavar="KIND", help="measure the rows of a kind anew and keep the others"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="the suite gpu or cpu-peers in miniature"
    )
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="only write table and plots anew, from the measured rows",
    )
    parser.add_argument("--pair", help="sizes of the model pair: tiny, 100m, 8b")
    parser.add_argument(
        "--agreement", type=float, help="agreement of drafter and target, 0.05 to 1"
    )
    parser.add_argument("--drafts", type=int, nargs="+", help="tokens drafted a round")
    parser.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes of the timed passes")
    parser.add_argument("--batches", type=int, nargs="+", help="rows of a batch")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens before the first new one")
    parser.add_argument("--entries", type=int, nargs="+", help="tokens that small caches show")
    parser.add_argument("--prompts", type=int, help="held-out prompts of the embedded pair")
    parser.add_argument("--target", help="folder of a target that was trained for early exits")
    parser.add_argument("--twin", help="folder of the target's twin that was trained plainly")
    parser.add_argument("--engines", nargs="+", help="engines of the suite cpu-peers")
    parser.add_argument("--precisions", nargs="+", help="precisions of the suite cpu-peers")
    parser.add_argument(
        "--checkpoints", nargs="+", help="types that its checkpoints hold for precision float32"
    )
    parser.add_argument(
        "--repetitions", type=int, help="repetitions of each measurement, at least 6"
    )
    return parser


def _cache() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "specjax" / "pairs"


if __name__ == "__main__":
    sys.exit(main())
