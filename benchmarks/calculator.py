"""The calculator beside measured runs: ``python -m benchmarks.calculator``.

The embedded target decodes held-out prompts with its draft model and with its EAGLE-3 head, with
chains of one to five tokens, in turn with plain decoding. The parts of a round are timed on the
same machine, and the calculator is given what was measured: first what the field's formula takes,
one acceptance rate and the cost of a draft step; then the rates of each position and the costs of
the target's passes and of the rest of a round. The page states the errors. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

import specjax
from specjax._internal import compile_cache
from specjax.analysis import calculate, round_timing, timing
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_measured

from . import heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "calculator"
DRAFTERS, TEMPERATURES, LENGTHS = ("draft", "eagle3"), (0.0, 1.0), (1, 2, 3, 4, 5)
ROUNDS, REPETITIONS = 8, 15  # of the parts of a round
KINDS = {"formula": "α, c", "passes": "rates, c, passes", "rounds": "and the rest of a round"}


def time_parts(lm, prompt: str, ways: list, sampling, new: int) -> list[dict[str, float]]:
    """Seconds of a round in the middle of a text, of drafting in it, and of the target's pass over
    its nodes, alone; the fastest of several counts. Plain rounds come first."""
    plain = Options(drafter=None, sampling=sampling, max_new_tokens=new)
    options = [plain, *(dataclasses.replace(plain, drafter=d, drafting=s) for d, s in ways)]
    calls = {}
    for index, one in enumerate(options):
        sizes = dict(least_width=heldout.SLOTS, least_buffer=heldout.SLOTS)
        work = prepare_measured(lm, [prompt], one, **sizes)
        nodes = work.drafter.num_draft + 1
        state = work.burst(max(new // (2 * nodes), 1), work.start())
        parts = round_timing.part_calls(work, state, rounds=ROUNDS)
        calls |= {f"{index} {name}": parts[name] for name in ("draft", "round")}
        held = dict(length=int(state.length[0]), capacity=heldout.SLOTS)
        calls[f"{index} pass"] = timing.pass_call(lm, nodes, **held)
    seconds = timing.alternate(calls, repetitions=REPETITIONS)
    return [
        {name: float(np.min(seconds[f"{index} {name}"])) for name in ("draft", "pass", "round")}
        for index in range(len(options))
    ]


def conditional(shares: list[float]) -> list[float]:
    """The rate of each position, given that all before it were accepted, of the shares of rounds in
    which positions were accepted."""
    before = [1.0, *shares[:-1]]
    return [now / past if past else 0.0 for now, past in zip(shares, before, strict=True)]


def computed(shares: list[float], plain: dict[str, float], parts: dict[str, float]) -> dict:
    """What the calculator says of a chain, from ever more measurements; see ``KINDS``.

    Args:
      shares: of rounds in which each position was accepted.
      plain, parts: the seconds of the parts of a plain round and of one with such a chain.
    """
    num, one = len(shares), min(plain["pass"], plain["round"])
    rate = sum(shares) / (1 + sum(shares[:-1]))  # accepted tokens over those that could have been
    known = {
        "acceptance": conditional(shares),
        "draft_cost": parts["draft"] / num / one,
        "passes": {1: 1.0, num + 1: parts["pass"] / one},
    }
    overhead = (plain["round"] - one) / one
    beside = (parts["round"] - parts["draft"] - parts["pass"]) / one
    rest = {"overhead": overhead, "draft_overhead": max(beside - overhead, 0.0)}
    found = {
        "formula": calculate(rate, num_draft=num, draft_cost=known["draft_cost"]),
        "passes": calculate(**known),
        "rounds": calculate(**known, **rest),
    }
    inputs = {"rate": rate, **known, **rest}
    return {"inputs": inputs, **{kind: one.asked.speedup for kind, one in found.items()}}


def measure(lm, drafter: str, temperature: float, num: int, prompts: list[str], new: int) -> dict:
    """What was measured of a chain, and what is computed."""
    ways, sampling = [(drafter, Drafting(num=num))], specjax.Sampling(temperature=temperature)
    plain, parts = time_parts(lm, prompts[0], ways, sampling, new)
    given = [sampling] * len(prompts)
    (run,) = heldout.measure_model(lm, ways, prompts, given, new, heldout.REPETITIONS)
    said = computed(run["acceptance_by_position"], plain, parts)
    return {"run": run, "parts": parts, "plain": plain, **said}


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    compile_cache.enable()  # a run that was interrupted finds its programs again
    header = {"suite": "calculator", "prompts": args.prompts, "new": args.new, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    lm, prompts = specjax.load("embedded"), heldout.prompts(args.prompts)
    rows = [
        {"drafter": d, "temperature": t, "num": n}
        for d in DRAFTERS
        for t in TEMPERATURES
        for n in LENGTHS
    ]
    for row in (row for row in rows if row not in kept.finished):
        figures = measure(lm, **row, prompts=prompts, new=args.new)
        kept.add({"row": row, "figures": figures})
        errors = ", ".join(f"{kind} {error(figures, kind):+.1%}" for kind in KINDS)
        print(row, f"{figures['run']['ratio_rounds']['median']:.2f}", errors, flush=True)
    found = [(line["row"], line["figures"]) for line in kept.outcomes(rows)]
    (args.out / "README.md").write_text(page(header, found), encoding="utf-8")
    return 0


def error(figures: dict, kind: str) -> float:
    """How far a computed speed-up is above the measured one, as a share of it."""
    return figures[kind] / figures["run"]["ratio_rounds"]["median"] - 1


def page(header: dict, found: list) -> str:
    """The page of the results."""
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if value)

    def signed(kind):
        return lambda row, one: f"{one[kind]:.2f} ({100 * error(one, kind):+.1f} %)"

    columns = {
        "drafter": lambda row, one: row["drafter"],
        "T": lambda row, one: f"{row['temperature']:g}",
        "γ": lambda row, one: row["num"],
        "rates": lambda row, one: ", ".join(f"{rate:.2f}" for rate in one["inputs"]["acceptance"]),
        "c": lambda row, one: f"{one['inputs']['draft_cost']:.2f}",
        "pass": lambda row, one: f"{list(one['inputs']['passes'].values())[-1]:.2f}",
        "rest": lambda row, one: (
            f"{one['inputs']['overhead']:.2f} + {one['inputs']['draft_overhead']:.2f}"
        ),
        "measured": lambda row, one: cells.ratio(one["run"]["ratio_rounds"]),
        **{said: signed(kind) for kind, said in KINDS.items()},
    }
    summary = "\n".join(
        f"- {said}: {_spread([abs(error(one, kind)) for _, one in found])}"
        for kind, said in KINDS.items()
    )
    return (
        "# The calculator beside measured runs\n\n`python -m benchmarks.calculator`\n\n"
        f"{facts}.\n\nThe speed-up of the rounds over plain decoding of the embedded target on "
        "held-out prompts, one request at a time, measured in turn (intervals of 95 % over the "
        "prompts) and computed by [the calculator](../../../docs/howto/calculator.md). *Rates*: "
        "the acceptance of each position, given that all before it were accepted. *c*: a draft "
        "step, *pass*: the verification of γ drafted tokens, *rest*: what every round and what a "
        "round that drafts costs beside its passes, all in passes over one token, timed in the "
        "middle of one text. *α* is one rate for all positions. In parentheses: how far "
        f"the computed speed-up is from the measured one.\n\nErrors:\n\n{summary}\n\n"
        f"{cells.table(columns, found)}\n"
    )


def _spread(errors: list[float]) -> str:
    low, most = 100 * np.median(errors), 100 * np.max(errors)
    inside = sum(one <= 0.05 for one in errors)
    return f"median {low:.1f} %, greatest {most:.1f} %, within 5 % in {inside} of {len(errors)}"


if __name__ == "__main__":
    sys.exit(main())
