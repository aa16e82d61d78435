"""How heads choose tokens above temperature 0, and τ: ``python -m benchmarks.drawn``.

The heads of the embedded target draft held-out prompts with their most probable tokens (``top``),
with tokens that are drawn independently (``iid``) and, in trees, without replacement
(``distinct``). A finished row is not measured again. The figures are counts, so that neither the
machine nor its load changes them, but for the rounding of logits.

Without arguments these are heads that ship. ``NAME=FOLDER ...`` measures heads of one's own::

    python -m benchmarks.drawn DSpark=runs/dspark/model --lengths 2 3 --trees 3x2x1 --out FOLDER

With ``--alone``, chains of block drafters are also drawn from the laws of the block alone
(``alone``), which are independent: without what corrects them, or chooses, by the tokens before.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import specjax
from specjax.drafters.block import BlockDrafter
from specjax.drafters.drawn_or_top import LEARNED
from specjax.text import drafter_names
from specjax.trees import expand

from . import head_rows, heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "drawn"
HEADS = (
    *(("eagle3", {"num": 2}), ("eagle3", {"tree": "3x1"}), ("eagle3", {"tree": "3x2x1"})),
    *(("mtp", {"num": 2}), ("p-eagle", {"num": 2}), ("medusa", {"num": 1})),
)
TEMPERATURES = (0.1, 0.3, 0.7, 1.0)
HEAD = "heads"  # those that are given, in the header
ALONE = "alone"  # the way to draw of --alone


def tau(lm, prompts, drafter, drafting, temperature: float, new: int) -> dict:
    """Tokens a round of all prompts, with an interval of 95 % over the prompts."""
    sampling = specjax.Sampling(temperature=temperature)
    asked = dict(drafter=drafter, drafting=drafting, sampling=sampling, max_new_tokens=new)
    return heldout.tau_interval(specjax.generate(lm, prompts, seed=0, **asked).stats)


def alone(drafter):
    """A block drafter that drafts each place from the block's own law, without a correction."""
    kind = type(drafter)
    own = type(f"{kind.__name__}Alone", (kind,), {"make_level": BlockDrafter.make_level})
    return own(
        **{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    )


def corrects(heads) -> bool:
    """Whether a drafter, as ``drafter_names.named`` returns it, is heads that correct a block."""
    drafter = getattr(heads, "drafter", None)
    if not isinstance(drafter, BlockDrafter):
        return False
    return type(drafter).make_level is not BlockDrafter.make_level


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("heads", nargs="*", metavar="[NAME=]FOLDER", help="other heads")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    usual = dict(lengths=[2], trees=["3x2x1"], siblings=["top", "iid", "distinct"])
    head_rows.add_shapes(parser, TEMPERATURES, **usual)
    what = "also draw chains from the laws of the block alone, without what corrects them"
    parser.add_argument("--alone", action="store_true", help=what)
    args = parser.parse_args(arguments)
    if 0 in args.temperatures:
        parser.error("--temperatures 0: tokens are drawn above temperature 0 alone")
    if not args.heads and (args.lengths, args.trees) != (usual["lengths"], usual["trees"]):
        parser.error("--lengths and --trees are for heads that are given as NAME=FOLDER")
    if args.alone and not args.heads:
        parser.error("--alone is for block drafters that are given as NAME=FOLDER")
    own = {HEAD: args.heads} if args.heads else {}
    header = {"suite": "drawn", **own, "prompts": args.prompts, "new": args.new, **runner.where()}
    lm, prompts = specjax.load("embedded"), heldout.prompts(args.prompts)
    named = head_rows.named(args.heads)
    head_rows.check_heads(lm, prompts[0], named.values())
    heads = {one: drafter_names.named(lm, one) for one in named.values() if args.alone}
    for name, one in named.items():
        if args.alone and not corrects(heads[one]):
            parser.error(
                f"--alone: {name}={one} does not correct the laws of a block; accepted are heads "
                "such as dspark, domino, dflash2, xpress and lilicorr: leave the others out"
            )
    apart = {one: dataclasses.replace(x, drafter=alone(x.drafter)) for one, x in heads.items()}
    kept = runner.Kept(args.out, header, fresh=False)
    rows = rows_of(args, named)
    for row in (row for row in rows if row not in kept.finished):
        independent = row["how"] == ALONE
        asked = {**row, "siblings": "iid" if independent else row["how"]}
        drafter = apart[row["drafter"]] if independent else row["drafter"]
        line: dict = {"row": row, "figures": {}}
        if reason := head_rows.refusal(lm, prompts[0], drafter, asked):
            line["refused"] = reason
        else:
            how = drafter, head_rows.drafting_of(asked), row["temperature"], args.new
            line["figures"] = tau(lm, prompts, *how)
        kept.add(line)
        print(row, line.get("refused") or f"{line['figures']['tau']:.2f}", flush=True)
    (args.out / "README.md").write_text(page(kept.header, kept.outcomes(rows)), encoding="utf-8")
    return 0


def rows_of(args: argparse.Namespace, named: dict[str, str]) -> list[dict]:
    """The rows of the heads that are given, else those of the heads that ship; ``name`` is in a
    row where it is another than the drafter's."""
    shapes: list[dict] = [*({"num": n} for n in args.lengths), *({"tree": t} for t in args.trees)]
    heads = [
        {"drafter": drafter} | ({} if name == drafter else {"name": name})
        for name, drafter in named.items()
    ]
    own = [(which, shape) for which in heads for shape in shapes]
    shipped = [({"drafter": drafter}, shape) for drafter, shape in HEADS]
    return [
        {"temperature": t, **which, **shape, "how": how}
        for t in args.temperatures
        for which, shape in (own if named else shipped)
        for how in (*args.siblings, *[ALONE] * args.alone)
        if how in (expand.HOW if "tree" in shape else (*head_rows.CHAINS, ALONE))
    ]


def page(header: dict, lines: list[dict]) -> str:
    """The page of the results, of the lines that are kept of rows."""
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if value and name != HEAD)
    found: dict[tuple, dict[str, str]] = {}
    refused: dict[str, None] = {}
    for line in lines:
        row, f = line["row"], line["figures"]
        what = row.get("name", row["drafter"])
        key = row["temperature"], f"{what}, {row.get('tree') or row['num']}"
        told = f"{f['tau']:.2f} [{f['low']:.2f}, {f['high']:.2f}]" if f else "–"
        found.setdefault(key, {})[row["how"]] = told
        if "refused" in line:
            refused[f"\n{key[1]}, `{row['how']}`: {line['refused']}\n"] = None
    further = [how for how in ("hub", LEARNED, ALONE) if any(how in own for own in found.values())]
    ways = ["top", "iid", "distinct", *further]
    columns = {"T": lambda key, own: f"{key[0]:g}"}
    columns |= {"drafter, tokens a round or tree": lambda key, own: key[1]}
    columns |= {f"`{how}`": lambda key, own, how=how: own.get(how, "") for how in ways}
    said = (
        f" `{ALONE}`: drawn independently from the laws of the block alone, without what corrects "
        "them, or chooses, by the tokens before."
    ) * (ALONE in further)
    learned = (
        f" `{LEARNED}`: each row draws its tokens or takes the most probable ones, whichever was "
        "accepted more often in its earlier rounds."
    ) * (LEARNED in further)
    command = shlex.join(["python", "-m", "benchmarks.drawn", *header.get(HEAD, ())])
    command += " --alone" * (ALONE in further)
    return (
        "# How heads choose tokens above temperature 0\n\n"
        f"`{command}`\n\n{facts}.\n\nThe heads of the embedded target on held-out prompts: τ, the "
        "tokens that a round emits, with an interval of 95 % over the prompts. `top`: the most "
        "probable tokens of the head; `iid`: tokens drawn independently from its law; `distinct`: "
        f"drawn without replacement.{learned}{said}\n\n{cells.table(columns, found.items())}\n"
        f"{''.join(refused)}"
    )


if __name__ == "__main__":
    sys.exit(main())
