"""How heads choose tokens above temperature 0, and τ: ``python -m benchmarks.drawn``.

The heads of the embedded target draft held-out prompts with their most probable tokens (``top``),
with tokens that are drawn independently (``iid``) and, in trees, without replacement
(``distinct``). A finished row is not measured again. The figures are counts, so that neither the
machine nor its load changes them, but for the rounding of logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import specjax

from . import heldout, runner

RESULTS = Path(__file__).parent / "results" / "drawn"
HEADS = (
    *(("eagle3", {"num": 2}), ("eagle3", {"tree": "3x1"}), ("eagle3", {"tree": "3x2x1"})),
    *(("mtp", {"num": 2}), ("hydra", {"num": 2}), ("medusa", {"num": 1})),
)
TEMPERATURES = (0.1, 0.3, 0.7, 1.0)


def tau(lm, prompts, drafter: str, drafting, temperature: float, new: int) -> dict:
    """Tokens a round of all prompts, with an interval of 95 % over the prompts."""
    sampling = specjax.Sampling(temperature=temperature)
    asked = dict(drafter=drafter, drafting=drafting, sampling=sampling, max_new_tokens=new)
    return heldout.tau_interval(specjax.generate(lm, prompts, seed=0, **asked).stats)


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    header = {"suite": "drawn", "prompts": args.prompts, "new": args.new, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    lm, prompts = specjax.load("embedded"), heldout.prompts(args.prompts)
    rows = [
        {"temperature": t, "drafter": drafter, **shape, "how": how}
        for t in TEMPERATURES
        for drafter, shape in HEADS
        for how in (("top", "iid", "distinct") if "tree" in shape else ("top", "iid"))
    ]
    for row in (row for row in rows if row not in kept.finished):
        shape = {name: row[name] for name in ("num", "tree") if name in row}
        drafting = specjax.Drafting(sibling_sampling=row["how"], **shape)
        figures = tau(lm, prompts, row["drafter"], drafting, row["temperature"], args.new)
        kept.add({"row": row, "figures": figures})
        print(row, f"{figures['tau']:.2f}", flush=True)
    found = [(line["row"], line["figures"]) for line in kept.outcomes(rows)]
    (args.out / "README.md").write_text(page(header, found), encoding="utf-8")
    return 0


def page(header: dict, found: list) -> str:
    """The page of the results."""
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if value)
    cells: dict[tuple, dict[str, str]] = {}
    for row, f in found:
        key = row["temperature"], f"{row['drafter']}, {row.get('tree') or row['num']}"
        told = f"{f['tau']:.2f} [{f['low']:.2f}, {f['high']:.2f}]"
        cells.setdefault(key, {})[row["how"]] = told
    lines = [
        f"| {t:g} | {what} | {own['top']} | {own['iid']} | {own.get('distinct', '')} |"
        for (t, what), own in cells.items()
    ]
    return (
        "# How heads choose tokens above temperature 0\n\n`python -m benchmarks.drawn`\n\n"
        f"{facts}.\n\nThe heads of the embedded target on held-out prompts: τ, the tokens that a "
        "round emits, with an interval of 95 % over the prompts. `top`: the most probable tokens "
        "of the head; `iid`: tokens drawn independently from its law; `distinct`: drawn without "
        "replacement.\n\n| T | drafter, tokens a round or tree | `top` | `iid` | `distinct` |\n"
        "|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
