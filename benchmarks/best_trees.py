"""The best static tree of each head, by counts: ``python -m benchmarks.best_trees FOLDER ...``.

On prompts that are not measured, the script counts how often the head's best, second, third ...
choice is right at each depth (``specjax.analysis.rank_counts``). For each number of tokens it takes
the tree with the most expected tokens a round (Sequoia's dynamic program), and decodes the last
held-out prompts with this tree and with those of ``--trees``, all at temperature 0. The figures are
counts, so that neither the machine nor its load changes them, but for the rounding of logits. A
finished row is not measured again.

Each head is a folder that a recipe exported, or the name of a head that ships; ``NAME=FOLDER``
gives it another name.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax import trees
from specjax.analysis import rank_counts, tree_search
from specjax.text.drafter_names import named, resolve_drafter
from specjax.text.options import Drafting, Options
from specjax.text.prepare import end_ids, prepare

from . import head_rows, heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "best-trees"
SHAPES = ("chain:3", "3x2x1", "expand:3x3x7")
NEW, TARGET = 64, "embedded"
BATCH = 16  # prompts that are counted or decoded together
RANKS = 6  # the most children of a node
DEEPEST = 8  # the most levels, where the head drafts further


def main(arguments: list[str] | None = None) -> int:
    """Measures all heads and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("heads", nargs="+", metavar="[NAME=]FOLDER", help="trained heads")
    parser.add_argument("--nodes", type=head_rows.length, nargs="+", default=[7, 15], metavar="N")
    parser.add_argument("--trees", nargs="*", default=SHAPES, help="other shapes")
    parser.add_argument("--prompts", type=head_rows.length, default=96, help="to measure on")
    what = "prompts to choose trees by, before those that are measured"
    parser.add_argument("--chosen-by", type=head_rows.length, default=64, metavar="N", help=what)
    parser.add_argument(
        "--new", type=head_rows.length, default=NEW, help="new tokens of each prompt"
    )
    parser.add_argument("--target", default=TARGET, help="name or folder of the heads' target")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    given = {"heads", "out"}
    asked = {name: value for name, value in vars(args).items() if name not in given}
    kept = runner.Kept(args.out, {"suite": "best-trees", **asked, **runner.where()}, fresh=False)
    lm, heads = specjax.load(args.target), head_rows.named(args.heads)
    head_rows.check_heads(lm, "A", heads.values())
    rows = [{"head": name} for name in heads]
    for row in (row for row in rows if row not in kept.finished):
        kept.add({"row": row, "figures": figures_of(lm, heads[row["head"]], args)})
        print(row["head"], json.dumps(kept.lines[-1]["figures"]["tau"]), flush=True)
    every = [line["row"] for line in kept.lines] + rows
    every = [row for index, row in enumerate(every) if row not in every[:index]]
    (args.out / "README.md").write_text(page(kept.header, kept.outcomes(every)), encoding="utf-8")
    return 0


def figures_of(lm, name: str, args: argparse.Namespace) -> dict:
    """The shares of right choices, the best trees, and τ of each shape, of one head."""
    heads = named(lm, name)
    most = resolve_drafter(lm, heads)[0].max_depth
    depth = min(DEEPEST, most or DEEPEST)
    texts, before = heldout.prompts(args.prompts), heldout.prompts(args.chosen_by, args.prompts)
    found: dict = {"depth": depth, "rates": [], "parents": {}, "expected": {}}
    shapes: dict = {text: trees.parse(text) for text in args.trees}
    try:
        rates = counted(lm, heads, before, depth, args.new)
    except ValueError as error:  # the head ranks no choices after the true tokens
        found["uncounted"] = str(error)
    else:
        best = {f"best of {n}": tree_search.grow_optimal(rates, n, depth=depth) for n in args.nodes}
        found["rates"] = np.round(rates, 4).tolist()
        found["parents"] = {text: list(shape.parents) for text, shape in best.items()}
        found["expected"] = {t: tree_search.expected_tokens(x, rates) for t, x in best.items()}
        shapes |= best
    rows = {text: {"temperature": 0.0, "tree": shape} for text, shape in shapes.items()}
    able = [text for text, row in rows.items() if not head_rows.refusal(lm, texts[0], heads, row)]
    return found | {"tau": {text: tau(lm, heads, shapes[text], texts, args.new) for text in able}}


def counted(lm, heads, prompts: list[str], depth: int, new: int) -> np.ndarray:
    """Shares ``[depth, RANKS]`` of the text's tokens that were the choice of each rank."""
    hits = trials = 0
    for first in range(0, len(prompts), BATCH):
        options = Options(
            drafter=heads, drafting=Drafting(tree=trees.chain(depth)), max_new_tokens=new
        )
        work = prepare(lm, prompts[first : first + BATCH], options)
        counts = rank_counts.count_ranks(
            lm.target,
            work.drafter,
            work.params,
            work.request.tokens,
            work.request.lengths,
            max_new_tokens=new,
            key=jax.random.key(0),
            ranks=RANKS,
            capacity=work.capacity,
            stops=end_ids(lm),
        )
        hits, trials = hits + counts.hits, trials + counts.trials
    return rank_counts.RankCounts(np.asarray(hits), np.asarray(trials)).rates


def tau(lm, heads, shape: trees.Tree, prompts: list[str], new: int) -> dict:
    """Tokens a round with an interval of 95 % over the prompts, which are decoded in batches."""
    found = specjax.generate(
        lm, prompts, drafter=heads, drafting=Drafting(tree=shape), max_new_tokens=new
    )
    return heldout.tau_interval(found.stats)


def page(header: dict, lines: list[dict]) -> str:
    """The page of the results, of the lines that are kept of rows."""
    command = [f"--nodes {' '.join(map(str, header['nodes']))}", f"--prompts {header['prompts']}"]
    command += [f"--chosen-by {header['chosen_by']}"]
    command += [shlex.join(["--trees", *header["trees"]])] * ([*header["trees"]] != [*SHAPES])
    command += [f"--new {header['new']}"] * (header["new"] != NEW)
    command += [shlex.join(["--target", header["target"]])] * (header["target"] != TARGET)
    said = ("suite", "nodes", "trees")
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v and k not in said)
    text = (
        "# The best static tree of each head\n\n```sh\n"
        f"python -m benchmarks.best_trees NAME=FOLDER ... {' '.join(command)}\n```\n\n{facts}.\n\n"
        "τ: tokens that a round emits at T = 0, with intervals of 95 % over the prompts; nothing "
        "is timed. *Best of N*: the tree of N tokens with the most expected tokens a round, by the "
        "shares of right choices on the prompts before those that are measured.\n"
    )

    def most(line):
        return max((x["tau"] for x in line["figures"]["tau"].values()), default=0.0)

    ranked = sorted(lines, key=most, reverse=True)
    heads = [(line["row"]["head"], line["figures"]) for line in ranked]
    columns = {"head": lambda name, f: name}
    columns |= {f"τ, {shape}": tau_cell(shape) for _, f in heads for shape in f["tau"]}
    text += f"\n{cells.table(columns, heads)}\n"
    columns = {"head": lambda name, f: name}
    for best in dict.fromkeys(best for _, f in heads for best in f["parents"]):
        columns |= {best: levels_cell(best), f"expected τ, {best}": expected_cell(best)}
    text += (
        "\n## The trees\n\nThe number of tokens at each depth, and in parentheses the most "
        f"children that a token above them has.\n\n{cells.table(columns, heads)}\n"
    )
    for name, figures in heads:
        if "uncounted" in figures:
            text += f"\nWithout trees for {name}: {figures['uncounted']}.\n"
    return text


def tau_cell(shape: str) -> Callable[[str, dict], str]:
    """Tells τ of a shape; nothing where the head does not draft so deep."""

    def cell(name: str, figures: dict) -> str:
        found = figures["tau"].get(shape)
        return "" if found is None else "{tau:.3f} [{low:.3f}, {high:.3f}]".format(**found)

    return cell


def expected_cell(shape: str) -> Callable[[str, dict], str]:
    """Tells the τ that the counted shares give."""
    return lambda name, figures: f"{figures['expected'][shape]:.2f}" if figures["expected"] else ""


def levels_cell(shape: str) -> Callable[[str, dict], str]:
    """Tells the numbers of nodes at each depth, and the most children of a node above them."""

    def cell(name: str, figures: dict) -> str:
        if shape not in figures["parents"]:
            return ""
        tree = trees.Tree(tuple(figures["parents"][shape]))
        told = []
        for depth in range(1, tree.depth + 1):
            parents = [x for x, d in zip(tree.parents, tree.depths, strict=True) if d == depth]
            told.append(f"{len(parents)} ({max(map(parents.count, parents))})")
        return ", ".join(told)

    return cell


if __name__ == "__main__":
    sys.exit(main())
