"""PEARL, SSD and a draft model side by side, and what two devices would gain.

python -m benchmarks.ahead

The embedded target and the grown one, which writes the same texts and is counted with it, decode
held-out prompts one by one. A row is of one kind:
``counts`` (τ and hidden rounds), ``seconds`` (of the passes that ``modelled_overlap`` wants) or
``one device`` (the speed on this one). Counts need no idle machine, the others do: ``--only KIND``
measures rows of one kind. A finished row is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np

import specjax
from specjax._internal import compile_cache
from specjax.analysis import timing
from specjax.analysis.overlap import modelled_overlap
from specjax.decoding.stats import start
from specjax.drafters import PEARL, SSD, DraftModel
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_measured

from . import grown, heldout, runner
from .tables import cells

RESULTS = Path(__file__).parent / "results" / "ahead"
KINDS, TARGETS = ("counts", "seconds", "one device"), ("embedded", "grown")
TEMPERATURES = (0.0, 1.0)
NUM_DRAFT, FAN_OUT = 3, 3
COUNTED = ("rounds", "hidden", "emitted", "drafted")
WIDTH, BUFFER = 128, 256  # tokens, the least, of prompts and of texts
LENGTH, CAPACITY = 127, 256  # of the text and of the cache in which single passes are timed


@functools.cache
def models(target: str) -> tuple[specjax.LM, specjax.LM]:
    """The target and its draft model."""
    lm = grown.grown_embedded() if target == "grown" else specjax.load("embedded")
    return lm, specjax.load("embedded-draft")


def drafters(target: str) -> dict:
    """The drafters of a target by name; plain decoding has none."""
    model = models(target)[1].target
    return {
        "plain": None,
        "DraftModel": DraftModel(num_draft=NUM_DRAFT, model=model),
        "PEARL": PEARL(num_draft=NUM_DRAFT, model=model),
        "SSD": SSD(num_draft=NUM_DRAFT, model=model, fan_out=FAN_OUT),
    }


def task(target: str, name: str, temperature: float, text: str, new: int, seed: int):
    """A prompt that is ready to be decoded; all prompts share the programs of a drafter."""
    (lm, small), drafter = models(target), drafters(target)[name]
    options = Options(
        drafter=drafter,
        drafter_params=None if drafter is None else small.params,
        drafting=Drafting(),
        sampling=specjax.Sampling(temperature=temperature),
        max_new_tokens=new,
        seed=seed,
    )
    sizes = dict(least_width=WIDTH, least_buffer=BUFFER)
    return prepare_measured(lm, [text], options, **sizes)


def counts(name: str, temperature: float, prompts: int, new: int) -> dict:
    """Counters of each prompt, and τ."""
    stats = [
        heldout.run(task("embedded", name, temperature, text, new, seed))[2].stats
        for seed, text in enumerate(heldout.prompts(prompts))
    ]
    every = {
        field: np.concatenate([np.asarray(getattr(one, field)) for one in stats])
        for field in COUNTED
    }
    tau = heldout.tau_interval(dataclasses.replace(stats[0], **every))
    return {field: values.tolist() for field, values in every.items()} | tau


def seconds(target: str, repetitions: int) -> dict:
    """Seconds of each pass that the model needs, and of a plain step: each time that it took."""
    lm, small = models(target)
    outcomes = drafters(target)["SSD"].num_outcomes
    passes = {
        "step": (lm, 1),
        "verify": (lm, NUM_DRAFT + 1),
        "draft_pass": (small, 1),
        "ahead_pass": (small, outcomes),
    }
    sizes = dict(length=LENGTH, capacity=CAPACITY)
    calls = {name: timing.pass_call(one, nodes, **sizes) for name, (one, nodes) in passes.items()}
    return {k: v.tolist() for k, v in timing.alternate(calls, repetitions=repetitions).items()}


def one_device(target: str, temperature: float, prompts: int, new: int, repetitions: int) -> dict:
    """For each drafter the ratio of its rounds to plain decoding, in turn with it; prompt by
    prompt, the fastest repetition of each."""
    names = list(drafters(target))
    spent, emitted, rounds = np.full((3, len(names), prompts), np.inf)
    texts = heldout.prompts(prompts)
    for turn in range(-1, repetitions):  # the first one warms up
        for seed, text in enumerate(texts if turn >= 0 else texts[:1]):
            for which in np.roll(range(len(names)), seed + turn):
                work = task(target, names[which], temperature, text, new, seed)
                _, took, out = heldout.run(work)
                at = which, seed
                spent[at] = min(spent[at], took) if turn >= 0 else np.inf
                emitted[at] = np.sum(out.stats.emitted)
                rounds[at] = np.sum(out.stats.rounds)
    picks = np.random.default_rng(0).integers(0, prompts, (heldout.RESAMPLES, prompts))
    found = {}
    for which, name in enumerate(names):
        some = [emitted[w][picks].sum(axis=1) / spent[w][picks].sum(axis=1) for w in (which, 0)]
        low, high = np.quantile(some[0] / some[1], [0.025, 0.975])
        both = [emitted[w].sum() / spent[w].sum() for w in (which, 0)]
        found[name] = {
            "ratio": {"median": both[0] / both[1], "low": low, "high": high},
            "seconds_per_round": spent[which].sum() / rounds[which].sum(),
        }
    return found


def measure(row: dict, args) -> dict:
    """The figures of a row."""
    if row["kind"] == "counts":
        return counts(row["drafter"], row["temperature"], args.prompts, args.new)
    if row["kind"] == "seconds":
        return seconds(row["target"], args.repetitions)
    return one_device(row["target"], row["temperature"], args.timed, args.new, 2)


def main(arguments: list[str] | None = None) -> int:
    """Measures the rows and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=KINDS, help="measure rows of one kind")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--prompts", type=int, default=12, help="prompts whose rounds are counted")
    parser.add_argument("--timed", type=int, default=4, help="prompts that are timed")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each prompt")
    parser.add_argument("--repetitions", type=int, default=15, help="of each timed pass")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    compile_cache.enable()  # a run that was interrupted finds its programs again
    facts = {name: getattr(args, name) for name in ("prompts", "timed", "new", "repetitions")}
    header = {"suite": "ahead", **facts, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    rows = [
        {"kind": "counts", "target": "embedded", "temperature": t, "drafter": name}
        for t in TEMPERATURES
        for name in ("DraftModel", "PEARL", "SSD")
    ]
    rows += [{"kind": "seconds", "target": target} for target in TARGETS]
    rows += [
        {"kind": "one device", "target": target, "temperature": t}
        for target in TARGETS
        for t in TEMPERATURES
    ]
    for row in rows:
        if args.only in (None, row["kind"]) and row["target"] in args.targets:
            if row not in kept.finished:
                kept.add({"row": row, "figures": measure(row, args)})
                print(row, flush=True)
    lines = kept.outcomes(rows)
    found = [(line["row"], line["figures"]) for line in lines]
    (args.out / "README.md").write_text(page(header, found), encoding="utf-8")
    return 0


def modelled(target: str, name: str, counted: dict, parts: dict) -> dict:
    """The modelled time of a round and its ratio to plain decoding, on two devices; of a draft
    model, whose parts wait for each other, on one."""
    part = {key: min(values) for key, values in parts.items()}
    step = part.pop("step")
    if name == "DraftModel":
        spent = part["verify"] + NUM_DRAFT * part["draft_pass"]
        return {"round": spent, "ratio": step * counted["tau"] / spent, "waits": "each"}
    if name == "PEARL":
        part["ahead_pass"] = part["draft_pass"]
    given = {field: np.asarray(counted[field]) for field in COUNTED}
    stats = dataclasses.replace(start(1, NUM_DRAFT), **given)
    found = modelled_overlap(drafters(target)[name], stats, **part)
    rounds = given["rounds"].sum()
    return {
        "round": found.seconds / rounds,
        "ratio": step / found.seconds_per_token,
        "waits": found.waits,
    }


def page(header: dict, rows: list) -> str:
    """The page of the results."""
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v and k != "suite")
    outcomes = (NUM_DRAFT + 1) * FAN_OUT
    text = (
        "# Drafting ahead: PEARL and SSD\n\n`python -m benchmarks.ahead`\n\n"
        f"{facts}.\n\nThe embedded target, and the same target grown to 100M weights, with the "
        f"embedded draft model; {NUM_DRAFT} tokens a round, SSD with a fan-out of {FAN_OUT} at "
        f"each place ({outcomes} outcomes); held-out prompts one by one. **Nothing ran on two "
        "devices: their gain is modelled by `specjax.analysis.overlap.modelled_overlap` from the "
        "counted rounds and from passes that were measured alone, on this one device.** The "
        "model leaves out the hand-over between devices, the draws, the acceptance and the commit, "
        "and takes a pass over all nodes for PEARL's rounds without a draft too.\n"
    )
    parts = {row["target"]: f for row, f in rows if row["kind"] == "seconds"}
    if parts:
        columns = {"target": lambda name, f: name} | {
            f"{what}, ms": lambda name, f, key=key: cells.milliseconds(min(f[key]))
            for what, key in (
                ("plain step", "step"),
                (f"verify ({NUM_DRAFT + 1} nodes)", "verify"),
                ("draft pass (1 token)", "draft_pass"),
                (f"ahead pass of SSD ({outcomes} tokens)", "ahead_pass"),
            )
        }
        over = max(np.median(v) / min(v) for f in parts.values() for v in f.values())
        text += (
            f"\n## Measured passes\n\nThe fastest of {header['repetitions']} (the medians were up "
            f"to {over:.1f} times as long: the machine is shared); after {LENGTH} "
            "tokens, in turn, with the argmax of their logits. PEARL expects one outcome, so its "
            "ahead pass is the draft pass.\n\n"
            f"{cells.table(columns, parts.items())}\n"
        )
    timed = {
        (row["target"], row["temperature"]): f for row, f in rows if row["kind"] == "one device"
    }
    lines = []
    for target in TARGETS:
        for row, found in rows:
            if row["kind"] == "counts":
                one, part = timed.get((target, row["temperature"])), parts.get(target)
                model = modelled(target, row["drafter"], found, part) if part else None
                lines.append((target, row, found, model, one and one[row["drafter"]]))
    share = lambda f, field: cells.share(np.sum(f[field]) / np.sum(f["rounds"]))  # noqa: E731
    columns = {
        "target": lambda target, r, f, m, one: target,
        "T": lambda target, r, f, m, one: f"{r['temperature']:g}",
        "drafter": lambda target, r, f, m, one: r["drafter"],
        "τ": lambda target, r, f, m, one: f"{f['tau']:.2f} [{f['low']:.2f}, {f['high']:.2f}]",
        "rounds": lambda target, r, f, m, one: f"{np.sum(f['rounds']):,}",
        "with a draft": lambda target, r, f, m, one: cells.share(
            np.sum(f["drafted"]) / NUM_DRAFT / np.sum(f["rounds"])
        ),
        "draft hidden": lambda target, r, f, m, one: share(f, "hidden"),
        "waits": lambda target, r, f, m, one: m["waits"] if m else "",
        "modelled round, ms": lambda target, r, f, m, one: (
            cells.milliseconds(m["round"]) if m else ""
        ),
        "modelled ratio": lambda target, r, f, m, one: f"{m['ratio']:.2f}" if m else "",
        "measured round on one device, ms": lambda target, r, f, m, one: (
            cells.milliseconds(one["seconds_per_round"]) if one else ""
        ),
        "measured ratio on one device": lambda target, r, f, m, one: (
            cells.ratio(one["ratio"]) if one else ""
        ),
    }
    return text + (
        f"\n## Rounds and ratios\n\nCounts are of {header['prompts']} prompts on the embedded "
        "target, whose texts the grown one writes but for rounding; measured times are of "
        f"the first {header['timed']} of them. *With a draft*: rounds that verified drafted "
        "tokens, as a share of all (a draft that the end of the budget cuts counts in part); a "
        "round of PEARL after a rejection has none. *Draft hidden*: rounds whose draft was "
        "complete before they began. *Waits*: which device waits for the other where a draft was "
        "ready. Ratios are to plain decoding, without the reading of the prompt; intervals of 95 % "
        "are over the prompts. The modelled ratio of `DraftModel` is that of its parts on one "
        "device, to which those of PEARL and SSD on two compare.\n\n"
        f"{cells.table(columns, lines)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
