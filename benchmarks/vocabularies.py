"""Acceptance lengths of drafters on the embedded target, without times, on held-out prompts.

python -m benchmarks.vocabularies draft tli:runs/other_draft/model slem:runs/other_draft/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import specjax

from .heldout import prompts, tau_interval


def acceptance_length(stats: specjax.Stats) -> dict[str, float]:
    """τ over all rows with its interval, and the share of drafted tokens that were accepted."""
    accepted = np.sum(stats.accepted) / max(1, np.sum(stats.drafted))
    return tau_interval(stats) | dict(accepted=float(accepted))


def main() -> None:
    """Prints a line of JSON for each drafter and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="+")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--num-draft", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="tokens after each prompt")
    parser.add_argument("--output", type=Path, help="a file to which the lines are added")
    given = parser.parse_args()
    lm, texts = specjax.load("embedded"), prompts(given.prompts)
    for name in given.drafters:
        for temperature in (0.0, 1.0):
            out = specjax.generate(
                lm,
                texts,
                drafter=name,
                drafting=specjax.Drafting(num=given.num_draft),
                sampling=specjax.Sampling(temperature=temperature),
                max_new_tokens=given.new,
            )
            settings = dict(drafter=name, temperature=temperature, num_draft=given.num_draft)
            line = json.dumps(settings | acceptance_length(out.stats))
            print(line, flush=True)
            if given.output:
                with given.output.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
