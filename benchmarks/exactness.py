"""Greedy text in several precisions, plain and speculative: ``python -m benchmarks.exactness``.

The embedded target writes the continuations of held-out prompts, one at a time, by plain decoding
and with several drafters, in the same precision; each token is compared. A precision is a law of
its own: a text in eight bits is compared with plain decoding in eight bits. A finished row is not
measured again; exit code 1: a text differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

import specjax
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare

from . import heldout, runner
from .fixed_bits import differing

RESULTS = Path(__file__).parent / "results" / "exactness"
PRECISIONS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantize": "int8"},
    "int8, groups of 64": {"quantize": specjax.Quantization("int8", group_size=64)},
    "int4": {"quantize": "int4"},
    "int4, groups of 64": {"quantize": specjax.Quantization("int4", group_size=64)},
}
WAYS = {
    "eagle3, 3": ("eagle3", Drafting(num=3)),
    "draft, 4": ("draft", Drafting(num=4)),
    "ngram, 7": ("ngram", Drafting(num=7)),
    "eagle3, 3x2x1": ("eagle3", Drafting(tree="3x2x1")),
}


def texts(lm, prompts, drafter, drafting, new: int) -> tuple[list[list[int]], float]:
    """The new tokens of each prompt, alone; and how many were emitted for each pass."""
    said, rounds = [], 0
    for prompt in prompts:
        options = Options(drafter=drafter, drafting=drafting, max_new_tokens=new, stop=())
        work = prepare(lm, [prompt], options, least_width=256, least_buffer=512)
        *_, out = heldout.run(work)
        tokens, begin = np.asarray(out.tokens)[0], len(work.prompts[0])
        said.append(tokens[begin : int(out.lengths[0])].tolist())
        rounds += int(out.stats.rounds[0])
    return said, (sum(map(len, said)) - len(said)) / rounds


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if no text differs, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    header = {"suite": "exactness", "prompts": args.prompts, "new": args.new, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    rows = [{"precision": p, "drafter": way} for p in args.precisions for way in WAYS]
    prompts = heldout.prompts(args.prompts)
    for precision in args.precisions:
        todo = [r for r in rows if r["precision"] == precision and r not in kept.finished]
        if not todo:
            continue
        lm = specjax.load("embedded", **PRECISIONS[precision])
        wanted, _ = texts(lm, prompts, None, Drafting(), args.new)
        for row in todo:
            begin = time.perf_counter()
            said, tau = texts(lm, prompts, *WAYS[row["drafter"]], args.new)
            figures = dict(zip(("texts", "tokens"), differing(said, wanted), strict=True))
            kept.add({"row": row, "figures": figures | {"tau": tau}})
            print(f"{row} {figures} {time.perf_counter() - begin:.0f} s", flush=True)
    every = [{"precision": p, "drafter": way} for p in PRECISIONS for way in WAYS]
    found = [(line["row"], line["figures"]) for line in kept.outcomes(every)]
    (args.out / "README.md").write_text(page(header, found), encoding="utf-8")
    return 1 if any(figures["texts"] for _, figures in found) else 0


def page(header: dict, found: list) -> str:
    """The page of the results."""
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if value)
    differ = sum(figures["texts"] for _, figures in found)
    tokens = sum(figures["tokens"] for _, figures in found)
    table = "\n".join(
        f"| {row['precision']} | {row['drafter']} | {figures['tau']:.2f} | {figures['texts']} | "
        f"{figures['tokens']:,} |"
        for row, figures in found
    )
    return (
        f"# Greedy text in several precisions\n\n`python -m benchmarks.exactness`\n\n{facts}.\n\n"
        "The embedded target, greedy, on held-out prompts, each alone. The texts of each drafter "
        "are compared, token for token, with those of plain decoding in the same precision. τ is "
        "the number of tokens that a pass emits.\n\n"
        f"**{differ} texts differ, in {tokens:,} compared tokens.**\n\n"
        "| precision | drafter, tokens a round or tree | τ | texts that differ | tokens compared |"
        f"\n|---|---|---|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
