"""The calculator beside measured runs: ``python -m benchmarks.calculator``.

The embedded target decodes held-out prompts with its draft model and with its EAGLE-3 head, with
chains of one to five tokens, in turn with plain decoding. Parts of rounds (drafts, passes of the
target, plain rounds) are timed on the same machine, and the calculator is given what was measured:
first what the field's formula takes, one acceptance rate and the cost of a draft step; then the
rates of each position and the costs of the target's passes; then the rest of a round, as the runs
of the other lengths say; and, for one half of the prompts, that rest as the runs of the other half
say. So no time of the run that a speed-up is compared with is used. The page states the errors,
also those of the time to the first token (TTFT). Needs an idle machine. This measures requests that
are decoded together::

    python -m benchmarks.calculator --batch 8 --prompts 48 --repetitions 15 --out FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

import specjax
from specjax._internal import compile_cache
from specjax.analysis import round_timing, timing
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_measured

from . import heldout, runner
from .calculated import computed, error, latencies, speedup
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "calculator"
DRAFTERS, TEMPERATURES, LENGTHS = ("draft", "eagle3"), (0.0, 1.0), (1, 2, 3, 4, 5)
PROMPTS = 16
REPETITIONS = 24  # of the run of each prompt, and of the parts of its rounds
ROUNDS = 16  # of which a part is timed in one call; half of them for several requests
PARTS = 4  # of rounds that one turn times
KINDS = {
    "formula": "α, c",
    "passes": "rates, c, passes",
    "others": "and the rest of other rounds",
}
HALVES = 2  # parts of the prompts, each of which is computed with the rest of a round of the other


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a round, timed in a call of several rounds and in one of a single round.

    A call has a cost of its own, here up to 2 ms, which the parts of a round would have several
    times; the difference of the two calls is without it. After another program the first
    hundredths of a second are slower, while in a run most rounds follow their like; so a call that
    does not count comes first.
    """

    many: timing.Call
    one: timing.Call

    def calls(self) -> tuple[float, float]:
        """Seconds of the call of several rounds, and of that of one round."""
        self.many.seconds()
        return self.many.seconds() * self.many.times, self.one.seconds()

    def seconds(self, calls: list[tuple[float, float]]) -> float:
        """Seconds in one round, of what ``calls`` returned in all turns."""
        many, one = np.mean(calls, axis=0)
        return float(many - one) / (self.many.times - 1)


def round_parts(
    lm, prompts: list[str], ways: list, sampling, new: int, rounds: int
) -> list[dict[str, Part]]:
    """The parts of up to ``rounds`` rounds in the middle of the texts of ``prompts``, a batch.

    Returns:
      parts by name: of plain rounds ``pass`` (the target's pass) and ``round`` (the whole round),
      and then for each way ``draft`` and ``pass`` (the pass over the round's nodes).
    """
    plain = Options(drafter=None, sampling=sampling, max_new_tokens=new)
    options = [plain, *(dataclasses.replace(plain, drafter=d, drafting=s) for d, s in ways)]
    found = []
    for option in options:
        sizes = dict(least_width=heldout.SLOTS, least_buffer=heldout.SLOTS)
        work = prepare_measured(lm, prompts, option, **sizes)
        nodes, ended = work.drafter.num_draft + 1, heldout.run(work)[-1]
        total = int(ended.stats.rounds.max())
        state = work.burst(max(0, total - rounds) // 2, work.start())
        room = (work.capacity - int(np.max(state.length))) // nodes
        rounds_here = max(2, min(rounds, total, room))
        middle = int(np.mean([np.asarray(work.start().length), ended.lengths]))
        held = dict(batch=len(prompts), length=middle, capacity=heldout.SLOTS)

        def calls(times, work=work, state=state, nodes=nodes, held=held):
            parts = round_timing.part_calls(work, state, rounds=times)
            return parts | {"pass": timing.pass_call(lm, nodes, times=times, **held)}

        many, single = calls(rounds_here), calls(1)
        names = ("draft", "pass") if found else ("pass", "round")
        found.append({name: Part(many[name], single[name]) for name in names})
    return found


def in_turn(parts: list[dict[str, Part]], spent: list[dict[str, list]], rng):
    """A function for ``heldout.measure_model`` that runs requests, and adds the seconds of calls of
    some of the parts of their rounds to ``spent``, all in an order that ``rng`` draws."""
    all_parts = [(way, name) for way, one in enumerate(parts) for name in one]
    requests = [(way, "run") for way in range(len(parts))]
    waiting: list[tuple] = []  # parts that were not timed since all were

    def runs(works, order):
        seconds, outs = np.zeros((len(works), 2)), [None] * len(works)
        if not waiting:
            waiting.extend(all_parts[i] for i in rng.permutation(len(all_parts)))
        some, waiting[:] = waiting[:PARTS], waiting[PARTS:]
        for way, name in rng.permutation(np.asarray([*requests, *some], object)):
            if name == "run":
                *seconds[way], outs[way] = heldout.run(works[way])
            else:
                spent[way][name].append(parts[way][name].calls())
        return seconds, outs

    return runs


def measure(
    lm, drafter: str, temperature: float, *, prompts: list[str], new: int, batch: int, times: int
) -> dict:
    """What was measured of chains of ``LENGTHS`` tokens: the ``seconds`` of the parts of rounds, of
    plain ones and of those of each chain, and the figures of the runs (``chains``). Each prompt is
    decoded ``times`` times.

    On a shared machine the seconds of one program differ by a fifth from call to call, and calls
    within the same second are alike. So runs and parts are timed in turn, in calls that are short,
    and the means of all are compared; medians and the fastest calls vary more.
    """
    ways = [(drafter, Drafting(num=num)) for num in LENGTHS]
    sampling = specjax.Sampling(temperature=temperature)
    timed = round_parts(lm, prompts[:batch], ways, sampling, new, ROUNDS // (2 if batch > 1 else 1))
    spent = [{name: [] for name in one} for one in timed]
    for part in (part for one in timed for part in one.values()):  # compiled, and not counted
        part.calls()
    asked = [sampling] * (len(prompts) // batch)
    how = dict(new=new, repetitions=times, average=np.mean, parts=HALVES)
    turns = in_turn(timed, spent, np.random.default_rng(0))
    runs = heldout.measure_model(lm, ways, prompts, asked, **how, runs=turns)
    seconds = [
        {name: part.seconds(calls[name]) for name, part in one.items()}
        for one, calls in zip(timed, spent, strict=True)
    ]
    return {"seconds": seconds, "chains": [{"run": run} for run in runs]}


def main(arguments: list[str] | None = None) -> int:
    """Measures all rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--new", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1, help="requests that are decoded together")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="runs of each prompt")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    if args.repetitions < 1:
        parser.error(f"--repetitions {args.repetitions}: it must be at least 1")
    turns = args.prompts // max(1, args.batch) * args.repetitions
    parts = 2 * (1 + len(LENGTHS))  # two of each kind of round
    if args.batch < 1 or args.prompts < HALVES * args.batch or args.prompts % args.batch:
        parser.error(
            f"--batch {args.batch}: it must be at least 1 and divide --prompts {args.prompts} into "
            f"{HALVES} batches or more"
        )
    if turns * PARTS < parts:
        parser.error(
            f"--repetitions {args.repetitions}: in {turns} turns not all {parts} parts are timed"
        )
    compile_cache.enable()  # a run that was interrupted finds its programs again
    header = {"suite": "calculator", "prompts": args.prompts, "new": args.new}
    header |= {} if args.batch == 1 else {"batch": args.batch}
    header |= {"repetitions": args.repetitions} | runner.where()
    kept = runner.Kept(args.out, header, fresh=False)
    lm, prompts = specjax.load("embedded"), heldout.prompts(args.prompts)
    rows = [{"drafter": d, "temperature": t} for d in DRAFTERS for t in TEMPERATURES]
    for row in (row for row in rows if row not in kept.finished):
        sizes = dict(new=args.new, batch=args.batch, times=args.repetitions)
        figures = measure(lm, **row, prompts=prompts, **sizes)
        kept.add({"row": row, "figures": figures})
        for num, one in zip(LENGTHS, computed(figures, args.batch), strict=True):
            errors = ", ".join(f"{kind} {error(one, kind):+.1%}" for kind in KINDS)
            errors += "".join(f", half {error(half, 'others'):+.1%}" for half in one["halves"])
            print(row, num, f"{one['run']['ratio_rounds']['median']:.2f}", errors, flush=True)
    (args.out / "README.md").write_text(page(kept.header, kept.outcomes(rows)), encoding="utf-8")
    return 0


def page(header: dict, lines: list[dict]) -> str:
    """The page of the results, of the lines that are kept of rows."""
    facts = ", ".join(f"{name} {value}" for name, value in header.items() if value)
    batch = header.get("batch", 1)
    found, times = [], []
    for line in lines:
        chains = computed(line["figures"], batch)
        asked = [line["row"] | {"num": num} for num in LENGTHS]
        found += zip(asked, chains, strict=True)
        delays = latencies(chains, header["prompts"], header["new"], batch)
        times += zip(asked, delays, strict=True)

    def signed(kind):
        return lambda row, one: f"{speedup(one, kind):.2f} ({100 * error(one, kind):+.1f} %)"

    def seconds(name, at):
        return lambda row, one: f"{1e3 * one[name][at]:.2f}"

    which = {
        "drafter": lambda row, one: row["drafter"],
        "T": lambda row, one: f"{row['temperature']:g}",
        "γ": lambda row, one: row["num"],
    }
    slowest = {"slowest": lambda row, one: f"{one['run']['slowest']:.2f}"} if batch > 1 else {}
    columns = {
        **which,
        "rates": lambda row, one: ", ".join(f"{rate:.2f}" for rate in one["inputs"]["acceptance"]),
        "c": lambda row, one: f"{one['inputs']['draft_cost']:.2f}",
        "pass": lambda row, one: f"{list(one['inputs']['passes'].values())[-1]:.2f}",
        "every round": lambda row, one: f"{one['inputs']['overhead']:.2f}",
        "rest": lambda row, one: f"{one['rest']:.2f}",
        "by the others": lambda row, one: f"{one['inputs']['draft_overhead']:.2f}",
        **slowest,
        "measured": lambda row, one: cells.ratio(one["run"]["ratio_rounds"]),
        **{said: signed(kind) for kind, said in KINDS.items()},
        "with the rest of the other half of the prompts": lambda row, one: ", ".join(
            signed("others")(row, half) for half in one["halves"]
        ),
    }
    delay_columns = {
        **which,
        "TTFT, ms": seconds("ttft", 0),
        "computed": seconds("ttft", 1),
        "TPOT, ms": seconds("tpot", 0),
        "and computed": seconds("tpot", 1),
    }
    errors = {said: [abs(error(one, kind)) for _, one in found] for kind, said in KINDS.items()}
    errors["of these, lengths between two others"] = [
        abs(error(one, "others")) for row, one in found if LENGTHS[0] < row["num"] < LENGTHS[-1]
    ]
    errors["with the rest of the other half of the prompts, the greater of both errors"] = [
        max(abs(error(half, "others")) for half in one["halves"]) for _, one in found
    ]
    errors["TTFT"] = [abs(one["ttft"][1] / one["ttft"][0] - 1) for _, one in times]
    summary = "\n".join(f"- {said}: {_spread(off)}" for said, off in errors.items())
    together, over = "one request at a time", "the prompts"
    words = ""
    if batch > 1:
        together = f"{batch} requests together"
        over = f"the batches, which are {header['prompts'] // batch} and so say little"
        words = f" --batch {batch}"
    usual = {"prompts": PROMPTS, "repetitions": REPETITIONS}
    words += "".join(f" --{k} {header[k]}" for k, v in usual.items() if header[k] != v)
    lasting = (
        " *Slowest*: the rounds of the slowest row of a batch, divided by those of the mean row. "
        "The calculator does not know this ratio: the computed speed-up is divided by it here, and "
        "the computed TPOT is multiplied by it."
    ) * (batch > 1)
    return (
        f"# The calculator beside measured runs\n\n`python -m benchmarks.calculator{words}`\n\n"
        f"{facts}.\n\nThe speed-up of the rounds over plain decoding of the embedded target on "
        f"held-out prompts, {together}, measured in turn (intervals of 95 % over "
        f"{over}) and computed by [the calculator](../../../docs/howto/calculator.md). *Rates*: "
        "the acceptance of each position, given that all before it were accepted. *c*: a draft "
        "step. *Pass*: the verification of γ drafted tokens. *Every round*: what a plain round "
        "costs beside its pass. These parts were timed in the rounds of "
        f"{'one batch' if batch > 1 else 'one text'}, in turn with the runs, without what a call "
        "costs by itself. *Rest*: what a round that drafts costs beyond these parts, by the time "
        "of the run. *By the others*: halfway between the mean of the rests of the other lengths "
        "and what the line through them says here, at least 0; with one and with five tokens the "
        "line goes beyond these lengths. "
        f"All costs are in passes over one token{' of each row' * (batch > 1)}, of which plain "
        "decoding gives the seconds. All times are means. *α* is one rate for all positions."
        f"{lasting} In parentheses: how far the computed speed-up is from the measured "
        "one. *The rest of other rounds* is that by the others. *With the rest of the other half "
        f"of the prompts*: the speed-up of every second {'batch' if batch > 1 else 'prompt'}, from "
        "the first and from the second, each computed from its own rates and with the rest of the "
        "rounds of the other half, of the same length; pass and draft step cancel there, so that "
        "this column tests the part of the formula that is about acceptance, and whether a round "
        "takes as many plain steps on other prompts. So no time of the run itself is used in "
        "either.\n\n"
        f"Errors:\n\n{summary}\n\n"
        f"{cells.table(columns, found)}\n\n"
        "The time to the first token (TTFT) is the time in which target and drafter read the "
        "prompts; the calculator is given the time in which the target alone reads them, and what "
        "the reading of the drafter cost in the runs of the other lengths. The time "
        "per token of a row (TPOT) is computed from the rest of other rounds and from the "
        "milliseconds of a pass over one token in the plain runs; its error is that of the "
        f"speed-up, with the other sign.\n\n{cells.table(delay_columns, times)}\n"
    )


def _spread(errors: list[float]) -> str:
    low, most = 100 * np.median(errors), 100 * np.max(errors)
    inside = sum(one <= 0.05 for one in errors)
    return f"median {low:.1f} %, greatest {most:.1f} %, within 5 % in {inside} of {len(errors)}"


if __name__ == "__main__":
    sys.exit(main())
