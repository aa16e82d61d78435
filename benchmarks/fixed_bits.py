"""Greedy text in few bits at every width and batch: ``python -m benchmarks.fixed_bits``.

The embedded target in bfloat16, or float16 by ``--dtype``, writes texts plainly, each prompt alone.
Then `jacobi` writes them with passes of 2 to 16 nodes, and plain decoding with passes of one, in
batches of 1 to 8 rows; each token is compared. With ``SPECJAX_BITS=fixed``, which this command
sets, all must be the same. Three further rows are without it. What it costs: the time of reading
prompts and of a pass over many columns, with and without. A finished row is not measured again;
exit code 1: a token differs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.analysis import timing
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare

from . import heldout, runner

RESULTS = Path(__file__).parent / "results" / "bits"
WIDTHS, BATCHES = (1, 2, 3, 4, 5, 8, 13, 16), (1, 2, 3, 5, 8)
FREE = ((1, 8), (8, 8), (16, 8))  # widths and batches without the mode
WIDE = (128, 512)  # columns of the passes whose time is stated


def texts(lm, prompts, width: int, batch: int, new: int) -> list[list[int]]:
    """The new tokens of each prompt, by passes over ``width`` nodes of ``batch`` rows."""
    drafter, drafting = (None, Drafting()) if width == 1 else ("jacobi", Drafting(num=width - 1))
    said = []
    for first in range(0, len(prompts), batch):
        part = [prompts[(first + i) % len(prompts)] for i in range(batch)]
        options = Options(drafter=drafter, drafting=drafting, max_new_tokens=new, stop=())
        work = prepare(lm, part, options, least_width=256, least_buffer=512)
        _, _, out = heldout.run(work)
        tokens, ends = np.asarray(out.tokens), np.asarray(out.lengths)
        said += [tokens[i, len(prompt) : ends[i]].tolist() for i, prompt in enumerate(work.prompts)]
    return said[: len(prompts)]


def differing(said: list[list[int]], wanted: list[list[int]]) -> tuple[int, int]:
    """The texts that differ, and the tokens up to the first differing one of each, which counts."""
    texts = tokens = 0
    for one, other in zip(said, wanted, strict=True):
        same = [a == b for a, b in itertools.zip_longest(one, other)]  # one may have ended
        texts, tokens = (
            texts + (not all(same)),
            tokens + (same.index(False) + 1 if not all(same) else len(same)),
        )
    return texts, tokens


def mode(fixed: bool) -> None:
    """Turns ``SPECJAX_BITS=fixed`` on or off for programs that are traced from now on."""
    jax.clear_caches()
    os.environ.pop("SPECJAX_BITS", None)
    if fixed:
        os.environ["SPECJAX_BITS"] = "fixed"


def cost(lm, columns: int, repetitions: int = 9) -> float:
    """Seconds of a pass over ``columns`` columns, the median."""
    batch = 8
    call = timing.pass_call(lm, columns // batch, batch=batch, length=100, capacity=512)
    return float(np.median(timing.alternate({"pass": call}, repetitions=repetitions)["pass"]))


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if no token differs with the mode, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=176, help="new tokens of each prompt")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name}/DTYPE of the results")
    args = parser.parse_args(arguments)
    out = args.out or RESULTS / args.dtype
    lm, prompts = specjax.load("embedded", dtype=args.dtype), heldout.prompts(args.prompts)
    asked = {"dtype": args.dtype, "prompts": args.prompts, "new": args.new}
    header = {"suite": "bits", **asked, **runner.where()}
    kept = runner.Kept(out, header, fresh=False)
    wanted = None
    rows = [
        *({"fixed": True, "width": w, "batch": b} for w in args.widths for b in args.batches),
        *({"fixed": False, "width": w, "batch": b} for w, b in FREE),
        *({"fixed": f, "columns": c} for f in (True, False) for c in WIDE),
    ]
    todo = [row for row in rows if row not in kept.finished]
    for index, row in enumerate(todo):
        begin = time.perf_counter()
        mode(row["fixed"])
        if "columns" in row:
            figures = {"seconds": cost(lm, row["columns"])}
        else:
            if wanted is None:
                mode(True)
                wanted = texts(lm, prompts, 1, 1, args.new)
                mode(row["fixed"])
            said = texts(lm, prompts, row["width"], row["batch"], args.new)
            figures = dict(zip(("texts", "tokens"), differing(said, wanted), strict=True))
        kept.add({"row": row, "figures": figures})
        spent = time.perf_counter() - begin
        print(f"{index + 1}/{len(todo)} {row} {figures} {spent:.0f} s", flush=True)
    found = [(line["row"], line["figures"]) for line in kept.outcomes(rows)]
    (out / "README.md").write_text(page(header, found))
    return 1 if any(f["texts"] for r, f in found if r["fixed"] and "width" in r) else 0


def page(header: dict, found: list) -> str:
    """The page of the results."""
    fixed = [(r, f) for r, f in found if r["fixed"] and "width" in r]
    free = [(r, f) for r, f in found if not r["fixed"] and "width" in r]
    seconds = {(r["fixed"], r["columns"]): f["seconds"] for r, f in found if "columns" in r}
    tokens, texts = (sum(f[name] for _, f in fixed) for name in ("tokens", "texts"))
    widths, batches = (sorted({r[name] for r, _ in fixed}) for name in ("width", "batch"))
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v)
    parts = [
        f"# Bits that do not move, {header['dtype']}\n\n`python -m benchmarks.fixed_bits --dtype "
        f"{header['dtype']}`\n\n{facts}.",
        f"The embedded target in {header['dtype']}, greedy, on held-out prompts. The texts of "
        "plain decoding of each prompt alone are compared with those of passes over W nodes "
        "(`jacobi`; W = 1: plain decoding) in batches of B rows.",
        f"**With `SPECJAX_BITS=fixed`: {texts} texts differ, in {tokens:,} compared tokens, for W "
        f"in {', '.join(map(str, widths))} and B in {', '.join(map(str, batches))}.**",
    ]
    if free:
        parts.append(
            "Without it (tokens are compared up to the first that differs):\n\n"
            "| W | B | texts that differ | tokens compared |\n|---|---|---|---|\n"
            + "\n".join(
                f"| {r['width']} | {r['batch']} | {f['texts']} | {f['tokens']:,} |" for r, f in free
            )
        )
    if seconds:
        parts.append(
            "The cost: a pass over many columns (B = 8), as prompts are read. Passes of at most 32 "
            "columns (in bfloat16 2,048, where the processor has AMX) are computed alike with and "
            "without.\n\n"
            "| columns | fixed, ms | free, ms | fixed over free |\n|---|---|---|---|\n"
            + "\n".join(
                f"| {c} | {1e3 * seconds[True, c]:.2f} | {1e3 * seconds[False, c]:.2f} | "
                f"{seconds[True, c] / seconds[False, c]:.2f} |"
                for c in WIDE
                if (True, c) in seconds and (False, c) in seconds
            )
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
