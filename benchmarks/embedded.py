"""Plain against speculative decoding of the embedded target, over held-out prompts.

    python benchmarks/embedded.py --prompts 100

For every drafter and temperature each prompt is decoded plainly and speculatively in turn, batch
1, 64 new tokens. Prints a table and writes it, with all figures, under ``benchmarks/results/``.
Two ratios: of whole runs (reading the prompt included), and of the decoding rounds alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import time

os.environ.setdefault("NPROC", "1")  # as the command does for so small a model

import jax
import numpy as np

import specjax
from specjax import job
from specjax.comparison import repeated_ngrams

HERE = pathlib.Path(__file__).parent
DRAFTERS = {
    "draft, 3": dict(drafter="draft", num_draft=3),
    "draft, 7": dict(drafter="draft", num_draft=7),
    "ngram, 3": dict(drafter="ngram", num_draft=3),
    "ngram, 7": dict(drafter="ngram", num_draft=7),
    "ngram, 15": dict(drafter="ngram", num_draft=15),
}


def prompts(count: int) -> list[str]:
    """The first ``count`` held-out prompts that ship with the package."""
    file = pathlib.Path(specjax.__file__).parent / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines[:count]]


def run(work: job.Job) -> tuple[float, float, specjax.Decoded]:
    """Seconds of reading the prompt, seconds of the rounds, and what came out."""
    begin = time.perf_counter()
    state = jax.block_until_ready(work.start())
    middle = time.perf_counter()
    state = jax.block_until_ready(work.burst(work.capacity, state))
    return middle - begin, time.perf_counter() - middle, specjax.loop.result(state)


def measure(lm, texts, options, temperature, repetitions) -> dict:
    """Figures of one drafter at one temperature; ratios with an interval over the prompts."""
    seconds, stats, same, rows = [], [], [], []
    for index, text in enumerate(texts):
        common = dict(max_new_tokens=64, temperature=temperature, seed=index)
        works = [
            job.prepare(lm, text, drafter=None, **common),
            job.prepare(lm, text, **options, **common),
        ]
        if index == 0:
            for work in works:
                run(work)
        best = np.full((2, 2), np.inf)
        for repetition in range(repetitions):
            outs = [None, None]
            for which in (0, 1) if (index + repetition) % 2 else (1, 0):
                *spent, outs[which] = run(works[which])
                best[which] = np.minimum(best[which], spent)
        seconds.append(best)
        stats.append([int(np.sum(getattr(outs[1].stats, k))) for k in COUNTS])
        emitted = [int(out.stats.emitted[0]) for out in outs]
        if temperature == 0:
            ends = [int(out.lengths[0]) for out in outs]
            tokens = [np.asarray(o.tokens)[0, :end] for o, end in zip(outs, ends, strict=True)]
            same.append(np.array_equal(*tokens))
        rows.append(np.asarray(outs[1].tokens)[0, len(works[1].prompts[0]) : outs[1].lengths[0]])
        stats[-1].append(emitted[0])
    seconds, stats = np.asarray(seconds), np.asarray(stats, float)
    rounds, new, drafted, accepted, plain_new = stats.T

    def ratio(pick) -> float:
        """Tokens a second, speculative over plain, of the prompts ``pick``."""
        speculative = new[pick].sum() / spent[pick, 1].sum()
        return speculative / (plain_new[pick].sum() / spent[pick, 0].sum())

    result = {}
    for name, spent in (("whole", seconds.sum(axis=2)), ("rounds", seconds[:, :, 1])):
        rng, size = np.random.default_rng(0), len(texts)
        boot = [ratio(rng.integers(0, size, size)) for _ in range(2000)]
        result[f"ratio_{name}"] = ratio(slice(None))
        result[f"ratio_{name}_interval"] = np.quantile(boot, [0.025, 0.975]).tolist()
        result[f"plain_tokens_per_second_{name}"] = plain_new.sum() / spent[:, 0].sum()
        result[f"tokens_per_second_{name}"] = new.sum() / spent[:, 1].sum()
    return result | {
        "tau": new.sum() / rounds.sum(),
        "acceptance": accepted.sum() / max(1.0, drafted.sum()),
        "repeated_4grams": repeated_ngrams(rows),
        "identical": f"{sum(same)} of {len(same)}" if same else "not expected (T > 0)",
        "milliseconds_per_round": 1e3 * seconds[:, 1, 1].sum() / rounds.sum(),
        "milliseconds_per_plain_step": 1e3 * seconds[:, 0, 1].sum() / plain_new.sum(),
    }


COUNTS = ("rounds", "emitted", "drafted", "accepted")


def machine() -> dict:
    """Where and with what it ran."""
    model = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    return {
        "device": str(jax.devices()[0].device_kind),
        "processor": model,
        "cores": os.cpu_count(),
        "threads of the backend": os.environ.get("NPROC", "all"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def table(results: dict) -> str:
    """Markdown."""
    lines = [
        "| T | drafter, tokens a round | τ | accepted | ratio, rounds | ratio, whole run "
        "| repeated 4-grams | same text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for temperature, rows in results.items():
        for name, r in rows.items():
            a, b = (
                "{:.2f} [{:.2f}, {:.2f}]".format(r[f"ratio_{k}"], *r[f"ratio_{k}_interval"])
                for k in ("rounds", "whole")
            )
            lines.append(
                f"| {temperature} | {name} | {r['tau']:.2f} | {r['acceptance']:.0%} | {a} | {b} "
                f"| {r['repeated_4grams']:.0%} | {r['identical']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=3, help="the best of each is kept")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "embedded-cpu")
    args = parser.parse_args()
    lm, texts, results = specjax.load("embedded"), prompts(args.prompts), {}
    where = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    for temperature in (0.0, 1.0):
        for name, options in DRAFTERS.items():
            figures = measure(lm, texts, options, temperature, args.repetitions)
            results.setdefault(str(temperature), {})[name] = figures
            print(table({str(temperature): {name: figures}}).splitlines()[-1], flush=True)
            report = {"machine": where, "prompts": len(texts), "results": results}
            (args.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    facts = ", ".join(f"{key} {value}" for key, value in where.items())
    command = f"python benchmarks/embedded.py --prompts {len(texts)}"
    head = f"# Embedded target, batch 1, 64 new tokens\n\n`{command}` ({facts})\n\n"
    (args.out / "README.md").write_text(head + table(results) + "\n")


if __name__ == "__main__":
    main()
