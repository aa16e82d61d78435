"""SPRINTER and reward-guided decoding on the embedded pair: quality and speed by their settings.

python -m benchmarks.learned sprinter PROBE TEMPERATURE [PROMPTS]     PROBE: the recipe's file
python -m benchmarks.learned guided [PROMPTS] [REWARD]                REWARD: the recipe's file

Each prints a table. `sprinter` decodes all prompts in one batch for the figures of quality, and a
few of them alone, in turn, for the time. `guided` writes one prompt at a time; the reward is the
target's likelihood of the step, or a trained head of the draft model. Its last column is the time
that the draft model, the target and the reward take, divided by that of plain decoding, on
prompts that were decoded once before.
"""

from __future__ import annotations

import functools
import math
import sys
import time

import numpy as np

import specjax
from specjax.analysis.rescoring import scores_of_new
from specjax.drafters import DraftModel
from specjax.drafters.probe import ProbedDraftModel, load_probe
from specjax.text import LikelihoodReward, ScalarReward, reward_guided

from .heldout import prompts

NEW, DEPTH, TIMED, REPEATS = 64, 8, 6, 3
FLAGS = (1.0, 0.75, 0.6, 0.5, 0.4, 0.0)
THRESHOLDS = (math.inf, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1, -math.inf)


def sprinter(path: str, temperature: float, count: int = 16) -> None:
    """Prints quality and speed for each threshold of the probe."""
    lm, draft = specjax.load("embedded"), specjax.load("embedded-draft")
    probe, texts = load_probe(path, draft), prompts(count)
    weights = {"model": draft.params, "probe": probe}
    made = [("draft, 3: auto", DraftModel(num_draft=3, model=draft.target), draft.params, "auto")]
    for flag in FLAGS:
        drafter = ProbedDraftModel(num_draft=DEPTH, model=draft.target, flag=flag)
        rules = ("auto", "approximate-sprinter") if flag == 0.5 else ("approximate-sprinter",)
        made += [(f"flag {flag:g}: {rule}", drafter, weights, rule) for rule in rules]
    sampling = specjax.Sampling(temperature=temperature)
    shared = dict(sampling=sampling, max_new_tokens=NEW)
    seconds = _seconds(lm, texts[:TIMED], made, shared)
    print(f"| T = {temperature:g} | τ | drafted a round | log p | best | same | TV | time |")
    print("|---|---|---|---|---|---|---|---|")
    plain = seconds["plain"]
    for index, (name, drafter, params, rule) in enumerate(made):
        given = dict(drafter=drafter, drafter_params=params, **shared)
        found = specjax.quality(lm, texts, rules=[rule], probes=1, probe_samples=256, **given)
        out = specjax.generate(lm, texts, drafting=specjax.Drafting(rule=rule), **given)
        drafted = np.sum(out.stats.drafted) / np.sum(out.stats.rounds)
        for one in found.rules[index > 0 :]:
            ratio = seconds[name] / plain if one.rule != "plain" else 1.0
            own, many = (name, f"{drafted:.2f}") if one.rule != "plain" else ("plain", "0")
            same = "-" if one.same is None else f"{one.same:.0%}"
            variation = f"{one.variation[0]:.3f} ({one.variation[1]:.3f})"
            print(
                f"| {own} | {one.tau:.2f} | {many} | {one.loglik:.3f} | {one.best:.0%} | "
                f"{same} | {variation} | {ratio:.2f} |",
                flush=True,
            )


def _seconds(lm, texts, made, shared) -> dict[str, float]:
    """Returns the seconds of all texts, one after the other, the least of some runs in turn."""
    runs = [("plain", dict(drafter="none"))]
    for name, drafter, params, rule in made:
        how = specjax.Drafting(rule=rule)
        runs.append((name, dict(drafter=drafter, drafter_params=params, drafting=how)))
    found: dict[str, float] = {}
    for repeat in range(REPEATS + 1):  # the first run compiles
        for name, options in runs:
            begin = time.perf_counter()
            for text in texts:
                specjax.generate(lm, text, **options, **shared)
            spent = time.perf_counter() - begin
            if repeat:
                found[name] = min(spent, found.get(name, math.inf))
    return found


def guided(count: int = 16, path: str | None = None) -> None:
    """Prints the target's share, its likelihood of the texts and the time, for each threshold."""
    lm, draft = specjax.load("embedded"), specjax.load("embedded-draft")
    reward = LikelihoodReward(lm) if path is None else ScalarReward.load(path, draft)
    texts, sampling = prompts(count), specjax.Sampling(temperature=0.7)
    shared = dict(sampling=sampling, max_new_tokens=NEW)

    def spent(write) -> tuple[float, list]:
        for index, text in enumerate(texts):  # compiles
            write(index, text)
        begin = time.perf_counter()
        made = [write(index, text) for index, text in enumerate(texts)]
        return time.perf_counter() - begin, made

    plain, _ = spent(lambda i, text: specjax.generate(lm, text, drafter="none", seed=i, **shared))
    print("| threshold | steps kept | tokens by the target | draft tokens a token | log p | time |")
    print("|---|---|---|---|---|---|")
    for threshold in THRESHOLDS:
        guide = functools.partial(reward_guided, lm, draft, reward=reward, threshold=threshold)
        seconds, made = spent(
            lambda i, text, guide=guide: guide(text, separator="\n", seed=2 * i, **shared)
        )
        steps = [step for one in made for step in one.steps]
        total = sum(len(step.tokens) for step in steps)
        written = sum(len(step.tokens) for step in steps if not step.from_draft)
        drafted = sum(one.draft_tokens for one in made)
        logp = _loglik(lm, texts, made)
        kept = np.mean([step.from_draft for step in steps])
        print(
            f"| {threshold:g} | {kept:.0%} | {written / total:.0%} | {drafted / total:.2f} | "
            f"{logp:.3f} | {seconds / plain:.2f} |",
            flush=True,
        )


def _loglik(lm, texts, made) -> float:
    """Returns the mean ``log p`` of the emitted tokens by the target at temperature 1."""
    rows = [
        (lm.tokenizer.encode(text), one.tokens.tolist())
        for text, one in zip(texts, made, strict=True)
    ]
    found = []
    for (_, new), logits in zip(rows, scores_of_new(lm, rows), strict=True):
        top = logits.max(axis=1)
        whole = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        found.append(logits[np.arange(len(new)), new] - whole)
    return float(np.concatenate(found).mean())


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "sprinter":
        sprinter(rest[0], float(rest[1]), *map(int, rest[2:]))
    else:
        guided(*map(int, rest[:1]), *rest[1:])
