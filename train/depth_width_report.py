"""The table, the picture and the findings of the recipe ``depth_width``."""

from __future__ import annotations

import collections
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specjax.analysis import calculate

PLAIN = "plain"
# the quantiles at 0.975 of Student's t with 1, 2, ... degrees of freedom; beyond: a little too wide
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Interval = tuple[float, float, float]  # a mean and the ends of its interval


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of values over seeds and its 95 % interval by Student's t.

    A single value has no interval: its ends are NaN.
    """
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


@dataclasses.dataclass(frozen=True)
class TimedModel:
    """One trained model with one number of drafts, timed beside plain decoding.

    Attributes:
      facts: what is known of the model, see ``depth_width.facts_of``.
      drafts: the number of drafts of a round.
      cost: c, the seconds of the model's pass over one token in those of the target.
      latency: seconds of that pass.
      rate: emitted tokens per second of the rounds.
      speedup: ``rate`` in that of plain decoding of the same turn.
      tau: tokens per round in the timed runs.
      computed: the speed-up that the calculator gives for the acceptance rates and costs.
    """

    facts: dict
    drafts: int
    cost: float
    latency: float
    rate: float
    speedup: float
    tau: float
    computed: float

    @property
    def shape(self) -> tuple:
        """What models of several seeds have in common: size, depth and width."""
        return self.facts["size"], self.facts["depth"], self.facts["width"]

    @property
    def acceptance(self) -> float:
        """The share of first drafts that are accepted."""
        return self.facts["rates"][0]


def outcomes(facts: list[dict], rows: list[dict]) -> list[TimedModel]:
    """Returns the outcomes of all models that were timed; medians over the turns.

    Args:
      facts: what is known of each model.
      rows: the timed runs, see ``depth_width.Timer``.
    """
    turns: dict[tuple, dict[int, dict]] = collections.defaultdict(dict)
    for row in rows:
        turns[row["model"], row["drafts"]][row["turn"]] = row
    plain, found = turns[PLAIN, 0], []
    for one in facts:
        for (name, drafts), own in turns.items():
            both = [(own[turn], plain[turn]) for turn in own if turn in plain]
            if name != one["model"] or not both:
                continue

            def median(of: Callable, both=both) -> float:
                return float(np.median([of(row, base) for row, base in both]))

            cost = median(lambda row, base: row["passes"]["1"] / base["passes"]["1"])
            wide = str(drafts + 1)
            passes = median(lambda row, base, w=wide: base["passes"][w] / base["passes"]["1"])
            each = median(lambda row, base: base["run"] / base["rounds"] / base["passes"]["1"])
            computed = calculate(
                one["rates"],
                num_draft=drafts,
                draft_cost=cost,
                passes={1: 1.0, drafts + 1: passes},
                overhead=max(each - 1, 0.0),
            )
            found.append(
                TimedModel(
                    facts=one,
                    drafts=drafts,
                    cost=cost,
                    latency=median(lambda row, base: row["passes"]["1"]),
                    rate=median(lambda row, base: row["tokens"] / row["run"]),
                    speedup=median(
                        lambda row, base: row["tokens"] / row["run"] * base["run"] / base["tokens"]
                    ),
                    tau=median(lambda row, base: row["tokens"] / row["rounds"]),
                    computed=computed.asked.speedup,
                )
            )
    return found


def fastest(found: list[TimedModel]) -> dict[tuple, list[TimedModel]]:
    """Returns for each shape the outcomes of its seeds with the number of drafts that is fastest,
    by the mean speed-up over the seeds."""
    groups: dict[tuple, dict[int, list[TimedModel]]] = collections.defaultdict(dict)
    for one in found:
        groups[one.shape].setdefault(one.drafts, []).append(one)
    return {
        shape: max(by.values(), key=lambda own: statistics.mean(x.speedup for x in own))
        for shape, by in sorted(groups.items())
    }


def shown(found: Interval, form: str = ".2f") -> str:
    """Formats ``mean [low, high]``, or the mean alone where there is one seed."""
    mean, low, high = (format(x, form) for x in found)
    return mean if low == "nan" else f"{mean} [{low}, {high}]"


def table(facts: list[dict], found: list[TimedModel]) -> str:
    """Returns the table in Markdown. Models that were not timed have their acceptance alone."""
    names = ("layers", "width", "feed-forward", "parameters", "seeds", "first draft accepted")
    names += ("drafts", "τ", "ms a drafted token", "c", "tokens/s", "× plain", "computed", "error")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    best, shapes = fastest(found), collections.defaultdict(list)
    for one in facts:
        shapes[one["size"], one["depth"], one["width"]].append(one)
    for shape, own in sorted(shapes.items()):
        first, timed = own[0], best.get(shape, [])
        cells = [str(first[name]) for name in ("depth", "width", "inner")]
        cells += [f"{first['parameters']:,}", str(len(own))]
        cells.append(shown(interval([one["rates"][0] for one in own]), ".3f"))
        if timed:
            over = lambda of, timed=timed: interval([of(one) for one in timed])  # noqa: E731
            errors = [one.computed / one.speedup - 1 for one in timed]
            cells += [str(timed[0].drafts), shown(over(lambda one: one.tau))]
            cells += [shown(over(lambda one: 1e3 * one.latency), ".3f")]
            cells += [shown(over(lambda one: one.cost)), shown(over(lambda one: one.rate), ".0f")]
            cells += [shown(over(lambda one: one.speedup)), shown(over(lambda one: one.computed))]
            cells.append(f"{statistics.mean(errors):+.0%}")
        lines.append(f"| {' | '.join(cells + [''] * (len(names) - len(cells)))} |")
    return "\n".join(lines) + "\n"


def findings(found: list[TimedModel]) -> str:
    """Returns what the study says, in sentences with intervals over the seeds."""
    lines, best = [], fastest(found)
    for size in sorted({shape[0] for shape in best}):
        own = {shape[1]: timed for shape, timed in best.items() if shape[0] == size}
        deepest = {one.facts["seed"]: one.speedup for one in own[max(own)]}
        for depth in sorted(own)[:-1]:
            pairs = [
                one.speedup / deepest[one.facts["seed"]]
                for one in own[depth]
                if one.facts["seed"] in deepest
            ]
            if pairs:
                lines.append(
                    f"At size {size:g}, a depth of {depth} with width "
                    f"{own[depth][0].facts['width']} is {shown(interval(pairs))} times as fast as "
                    f"a depth of {max(own)} with width {own[max(own)][0].facts['width']} "
                    f"(seeds: {len(pairs)})."
                )
    every = [one for timed in best.values() for one in timed]
    if len({one.shape for one in every}) > 2:
        rates = [one.rate for one in every]
        latency = np.corrcoef([one.latency for one in every], rates)[0, 1]
        accepted = np.corrcoef([one.acceptance for one in every], rates)[0, 1]
        lines.append(
            f"Over {len(every)} models the correlation of tokens per second with the latency of a "
            f"drafted token is {latency:+.2f}, with the acceptance of the first draft "
            f"{accepted:+.2f}."
        )
    if found:
        errors = [abs(one.computed / one.speedup - 1) for one in found]
        lines.append(
            f"The calculator's speed-up differs from the measured one by {np.median(errors):.1%} "
            f"in the median of {len(errors)} settings, by {max(errors):.1%} at most."
        )
    return "\n\n".join(lines) + "\n" if lines else "Nothing was timed.\n"


def picture(found: list[TimedModel], file: Path) -> None:
    """Draws tokens per second against latency and against acceptance, with intervals."""
    from matplotlib.figure import Figure  # not pyplot, whose state is the user's (notebooks)

    from .charts import COLOURS, GRID

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    panels: list[tuple[str, Callable[[TimedModel], float]]] = [
        ("milliseconds of a drafted token", lambda one: 1e3 * one.latency),
        ("share of first drafts that are accepted", lambda one: one.acceptance),
    ]
    best = fastest(found)
    sizes = sorted({shape[0] for shape in best})
    for axes, (label, of) in zip(figure.subplots(1, 2), panels, strict=True):
        for shape, own in best.items():
            x, y = (interval([pick(one) for one in own]) for pick in (of, lambda one: one.rate))
            spread = [[v[2] - v[0]] if v[2] == v[2] else None for v in (x, y)]
            colour = COLOURS[sizes.index(shape[0]) % len(COLOURS)]
            axes.errorbar(
                x[0], y[0], xerr=spread[0], yerr=spread[1], fmt="o", color=colour, capsize=2
            )
            axes.annotate(
                f"{shape[1]}×{shape[2]}", (x[0], y[0]), xytext=(5, 5), textcoords="offset points"
            )
        axes.set_xlabel(label)
        axes.set_ylabel("tokens per second")
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Draft models of one size: layers × width, 95 % intervals over the seeds")
    figure.savefig(file, dpi=110)


def write(folder: Path, facts: list[dict], rows: list[dict]) -> None:
    """Writes ``rows.jsonl``, ``table.md``, ``findings.md`` and, if models were timed,
    ``picture.png``; prints the table and the findings."""
    found = outcomes(facts, rows)
    lines = [dataclasses.asdict(one) for one in found] or facts
    (folder / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), "utf-8")
    (folder / "table.md").write_text(table(facts, found), encoding="utf-8")
    (folder / "findings.md").write_text(findings(found), encoding="utf-8")
    if found:
        picture(found, folder / "picture.png")
    print(table(facts, found))
    print(findings(found))
