"""Plots of a suite's rows: speed-up, acceptance by position, the parts of a round's time."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from . import quality
from .tables.decoding import each_way
from .tables.small_caches import by_drafter

AXES = {"num_draft": "tokens drafted a round", "batch": "batch", "context": "context, tokens"}
DEFAULTS = {"batch": 1, "context": 64, "temperature": 0.0, "num_draft": 0}
PARTS = ("draft", "verify", "accept", "commit", "observe")


def draw(folder: Path, outcomes: list[dict]) -> list[str]:
    """Draws the plots that the rows have figures for; returns the names of the files."""
    measured = [(o["row"], o["figures"]) for o in outcomes if "figures" in o]
    decoded = [
        (DEFAULTS | r, f) for r, f in measured if r["kind"] == "decode" and r["drafter"] != "plain"
    ]
    peers = [(r, f) for r, f in measured if r["kind"] == "peer"]
    tables = [(r, f) for r, f in measured if r["kind"] == "tables"]
    made = []
    for name, plot, rows in (
        ("speedup", _speedup, decoded),
        ("acceptance", _acceptance, decoded),
        ("round", _round, [(r, f) for r, f in decoded if "parts" in f]),
        ("peers", _peers, peers),
        ("quality", quality.draw, [(r, f) for r, f in measured if r["kind"] == "quality"]),
        ("budgets", _budgets, [(r, f) for r, f in measured if r["kind"] == "budgets"]),
        ("workloads", _workloads, [x for x in each_way(tables) if not x[0].get("given")]),
    ):
        figure = plot(rows) if rows else None
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")
            plt.close(figure)
            made.append(f"{name}.png")
    return made


def curves(rows: list, along: str) -> dict[str, list[tuple]]:
    """Joins rows that differ only in the setting ``along``.

    Returns:
      ``{shared settings: [(x, ratio), ...]}``. Rows with a single value of ``along`` are left out.
    """
    groups: dict[str, list[tuple]] = {}
    for row, figures in rows:
        shared = {
            k: v for k, v in row.items() if k not in (along, "parts", "new", "repetitions", "kind")
        }
        key = json.dumps(shared, sort_keys=True)
        groups.setdefault(key, []).append((row[along], figures["ratio_rounds"], row, figures))
    curves = {}
    for points in groups.values():
        if len({x for x, *_ in points}) > 1:
            points.sort(key=lambda point: point[0])
            curves[_name(points[0][2], points[0][3], without=along)] = [p[:2] for p in points]
    return curves


def _name(row: dict, figures: dict, without: str = "") -> str:
    words = [row["drafter"]]
    words += [f"{row['num_draft']} a round"] * (without != "num_draft")
    words += [f"batch {row['batch']}"] * (without != "batch" and row["batch"] > 1)
    words += [f"context {row['context']}"] * (without != "context" and row["context"] != 64)
    words += [f"T={row['temperature']:g}"] * (row["temperature"] > 0)
    return ", ".join(words) + " (synthetic)" * bool(figures.get("synthetic"))


def _speedup(rows):
    panels_lines = {along: curves(rows, along) for along in AXES}
    panels_lines = {along: lines for along, lines in panels_lines.items() if lines}
    if not panels_lines:
        return None
    figure, panels = plt.subplots(
        1, len(panels_lines), figsize=(4.6 * len(panels_lines), 3.6), squeeze=False
    )
    for panel, (along, lines) in zip(panels[0], panels_lines.items(), strict=True):
        for name, points in lines.items():
            x = [p[0] for p in points]
            y = [p[1]["median"] for p in points]
            low = [p[1]["median"] - p[1]["low"] for p in points]
            high = [p[1]["high"] - p[1]["median"] for p in points]
            panel.errorbar(x, y, [low, high], marker="o", capsize=3, label=name)
        panel.axhline(1.0, color="grey", linewidth=1, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xlabel(AXES[along])
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel("speed-up of the rounds over plain")
    return figure


def _acceptance(rows):
    figure, panel = plt.subplots(figsize=(5, 3.6))
    for row, f in rows:
        positions = range(1, len(f["acceptance_by_position"]) + 1)
        panel.plot(positions, f["acceptance_by_position"], marker="o", label=_name(row, f))
    panel.set_ylim(0, 1.02)
    panel.set_xlabel("position in the draft")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel("share of rounds in which it was accepted")
    panel.legend(fontsize=6)
    return figure


def _round(rows):
    figure, panel = plt.subplots(figsize=(6, 0.6 * len(rows) + 1.4))
    names = [_name(row, f) for row, f in rows]
    left = [0.0] * len(rows)
    for part in PARTS:
        width = [1e3 * f["parts"][part] for _, f in rows]
        panel.barh(names, width, left=left, label=part)
        left = [a + b for a, b in zip(left, width, strict=True)]
    whole = [1e3 * f["parts"]["round"] for _, f in rows]
    panel.plot(whole, names, "k|", markersize=18, label="the round in the loop")
    panel.set_xlabel("ms a round, each part alone")
    panel.invert_yaxis()
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure


def _peers(rows):
    figure, panels = plt.subplots(1, len(rows), figsize=(4.6 * len(rows), 3.6), squeeze=False)
    for panel, (row, f) in zip(panels[0], rows, strict=True):
        rates = {name: x["tokens_per_second"] for name, x in f["methods"].items()}
        middle = [x["median"] for x in rates.values()]
        off = [
            [x["median"] - x["q25"] for x in rates.values()],
            [x["q75"] - x["median"] for x in rates.values()],
        ]
        colours = ["C1" if name.startswith("hf") else "C0" for name in rates]
        panel.barh(list(rates), middle, xerr=off, color=colours, capsize=3)
        synthetic = ", synthetic" * bool(f["synthetic"])
        panel.set_title(f"{row['pair']}, {row['num_draft']} a round{synthetic}", fontsize=9)
        panel.set_xlabel("tokens/s, whole requests")
        panel.invert_yaxis()
    return figure


def _workloads(rows):
    """τ of each drafter, a panel for each kind of text; where targets differ, grown ones alone."""
    grown = [(r, f) for r, f in rows if r.get("grown")] or rows
    kinds = list(dict.fromkeys(row["workload"] for row, _ in grown))
    figure, panels = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.6), squeeze=False)
    for panel, kind in zip(panels[0], kinds, strict=True):
        for at, mark in ((0.0, "o"), (1.0, "x")):
            here = [(r, f) for r, f in grown if r["workload"] == kind and r["temperature"] == at]
            here = [(r, f) for r, f in here if r.get("batch", 1) == 1]
            names = [r["drafter"].partition(":")[0] for r, _ in here]
            panel.plot([f["tau"] for _, f in here], names, mark, label=f"T={at:g}")
        panel.set_title(kind, fontsize=9)
        panel.set_xlabel("τ, tokens a pass")
        panel.legend(fontsize=7)
    return figure


def _budgets(rows):
    """Acceptance by what is seen, a panel for each drafter; a line for what sees everything."""
    rows = by_drafter(rows)
    figure, panels = plt.subplots(1, len(rows), figsize=(4.6 * len(rows), 3.6), squeeze=False)
    for panel, (row, found) in zip(panels[0], rows, strict=True):
        whole, *points = found["points"]
        for at, style in (("0.0", "-"), ("1.0", "--")):
            for number, cache in enumerate(row["caches"]):
                own = [p for p in points if p["cache"] == cache]
                x, y = [p["entries"] for p in own], [p[at]["first"] for p in own]
                words = dict(color=f"C{number}", label=f"{cache}, T={float(at):g}")
                panel.plot(x, y, style, marker="o", **words)
            panel.axhline(whole[at]["first"], color="grey", linewidth=1, linestyle=style)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{row['drafter']} (grey: the whole cache)", fontsize=9)
        panel.set_xlabel("entries that are seen")
    panels[0][0].set_ylabel("share of first tokens accepted")
    panels[0][0].legend(fontsize=6)
    return figure
