"""Every family of heads in one table: ``python -m benchmarks.families``.

Each line is a head: what it drafts right, what its round costs, and how fast it is beside the
embedded target, as ``heads.py`` measured it, and beside a target of 100M weights, as
``expected.py`` computes it from the same τ. Nothing is timed here.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from .calculated import conditional
from .expected import RESULTS, add_sources, kind_of, plain_steps, rows_of, write
from .tables import cells

GREEDY, DRAWN = {"temperature": 0.0, "num": 3}, {"temperature": 1.0, "num": 3}
TREE = {"temperature": 0.0, "tree": "3x2x1"}


def main(arguments: list[str] | None = None) -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_sources(parser, ["heads-100m", "heads-100m-drawn"], RESULTS / "families")
    args = parser.parse_args(arguments)
    write(args.out, page(args.trained, args.rounds))
    return 0


def figures_of(rows: Sequence[dict], row: dict) -> dict:
    """The figures of all heads in a row; none where the row was not measured."""
    return next((one["figures"] for one in rows if one["row"] == row), {})


def page(trained: Sequence[str], rounds: Sequence[str]) -> str:
    """The page for results by their names.

    Raises:
      ValueError: the trained heads were not measured at temperature 0 with three tokens a round.
    """
    (taught, heads), (where, timed) = rows_of(trained), rows_of(rounds)
    greedy, drawn, tree = (figures_of(heads, row) for row in (GREEDY, DRAWN, TREE))
    if not greedy:
        raise ValueError(f"{', '.join(trained)}: no row at T = 0 with three tokens a round")
    grown = {row["temperature"]: figures_of(timed, row) for row in (GREEDY, DRAWN)}

    def of(figures, show):
        return lambda name: show(figures[name]) if name in figures else "–"

    def beside_more_weights(figures, temperature):
        def show(name):
            cost = grown[temperature].get(kind_of(name))
            known = cost and name in figures
            return f"{figures[name]['tau'] / plain_steps(cost):.2f}" if known else "–"

        return show

    def tau(figures):
        return f"{figures['tau']:.2f}"

    def steps(figures):
        return f"{plain_steps(figures):.2f}"

    def rates(figures):
        found = conditional(figures["acceptance_by_position"])
        return ", ".join(cells.share(one) for one in found)

    columns = {
        "head": lambda name: name,
        "τ": of(greedy, tau),
        "accepted, given those before": of(greedy, rates),
        "τ, tree": of(tree, tau),
        "round": of(greedy, steps),
        "rounds": of(greedy, lambda x: cells.ratio(x["ratio_rounds"])),
        "whole": of(greedy, lambda x: cells.ratio(x["ratio_whole"])),
        "100M": beside_more_weights(greedy, 0.0),
        "T = 1: τ": of(drawn, tau),
        "round at T = 1": of(drawn, steps),
        "rounds at T = 1": of(drawn, lambda x: cells.ratio(x["ratio_rounds"])),
        "whole at T = 1": of(drawn, lambda x: cells.ratio(x["ratio_whole"])),
        "100M at T = 1": beside_more_weights(drawn, 1.0),
    }
    names = sorted(greedy, key=lambda name: -greedy[name]["ratio_rounds"]["median"])
    words = shlex.join(["--trained", *trained, "--rounds", *rounds])
    return (
        f"# Every family of heads in one table\n\n```sh\npython -m benchmarks.families {words}\n"
        f"```\n\nBeside the embedded target: {taught}. *τ*: tokens that a round emits, with three "
        f"drafted tokens, and in the column *tree* with {TREE['tree']}. *Accepted*: the share of "
        "each position, of the rounds that accept all positions before it. *Round*: its time in "
        "plain steps. *Rounds* and *whole*: how many times as fast as plain decoding, without and "
        "with the reading of the prompt, with intervals of 95 % over the prompts. *100M*: τ "
        "divided by the time of a round beside a target of 100M weights that writes the same "
        f"texts, {where}: the speed of rounds that is [expected](../heads-expected/README.md) "
        "there. All heads had [the same number of tokens](../training/README.md"
        "#seventeen-families-after-the-same-tokens), but for the EAGLE-3 and the LSTM that ship "
        "and those that are called *longer*, which had more. The first columns are at T = 0. The "
        "tree that suits each head best has [a page of its own](../best-trees/README.md). Hydra++ "
        "and Medusa-2 were trained later, on other rows: "
        "[their figures](../training/README.md#hydra-and-medusa-2-after-few-tokens). The times of "
        "SpecDec beside the embedded target were taken before a fault was mended: "
        "[its rounds since](../heads-few-all/README.md).\n\n"
        f"{cells.table(columns, [(name,) for name in names])}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
