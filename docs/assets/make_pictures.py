"""Makes the pictures of the README and of the documentation.

Run ``python docs/assets/make_pictures.py`` in the clone's root folder. It writes four pictures
beside itself:

* ``one_round.svg``: one round of speculative decoding with a tree of drafted tokens.
* ``speed.svg``: measured speed-up, from the committed results of two benchmark suites.
* ``laws.svg`` and ``trees.svg``, see ``concept_pictures.py``.

All are made from files of the repository alone, and come out the same each time.
"""

from __future__ import annotations

import json
from pathlib import Path

import concept_pictures  # beside this file
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
STYLE = {
    "svg.hashsalt": "specjax",  # else the file differs from run to run
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
INK, MUTED, LINE, PAPER = "#20242a", "#686f79", "#d8d5cc", "#ffffff"
GREEN, RED, AMBER, BLUE = "#1c7a4a", "#b23b30", "#94600a", "#3a72b8"
FILL = {GREEN: "#e4f3e9", RED: "#fbebe9", AMBER: "#fdf0d2", MUTED: "#f4f3ef", INK: "#363c46"}

# name: (token, x, y, colour, parent)
NODES = {
    "root": ("return", 2.3, 3.0, INK, None),
    "a": ("a", 4.3, 3.75, GREEN, "root"),
    "self": ("self", 4.3, 1.75, RED, "root"),
    "+": ("+", 6.1, 4.25, GREEN, "a"),
    "*": ("*", 6.1, 3.15, RED, "a"),
    ".": (".", 6.1, 1.75, MUTED, "self"),
    "b": ("b", 7.9, 4.75, GREEN, "+"),
    "1": ("1", 7.9, 3.75, RED, "+"),
    "sum": ("sum", 7.9, 1.75, MUTED, "."),
    "bonus": ("⏎", 10.2, 4.75, AMBER, "b"),
}


def one_round() -> plt.Figure:
    """The committed text, a tree of drafted tokens, its verification, and what is committed."""
    figure, panel = plt.subplots(figsize=(11, 5.6))
    panel.set_xlim(0, 12.2)
    panel.set_ylim(-0.55, 6.35)
    panel.axis("off")
    band = FancyBboxPatch((1.55, 1.1), 7.25, 4.3, boxstyle="round,pad=0.1,rounding_size=0.25")
    band.set(facecolor="#eef3fa", edgecolor=BLUE, linewidth=1.4, linestyle=(0, (4, 3)))
    panel.add_patch(band)
    for title, detail, x, colour in (
        ("1  draft", "the drafter proposes a tree of tokens", 2.9, INK),
        ("2  verify", "one pass of the target scores all nodes", 6.75, BLUE),
        ("3  accept", "the rule keeps one path", 10.2, GREEN),
    ):
        panel.text(x, 6.15, title, ha="center", size=13, weight="bold", color=colour)
        panel.text(x, 5.8, detail, ha="center", size=9.5, color=MUTED)
    for token, x, y, colour, above in NODES.values():
        if above is not None:
            _edge(panel, NODES[above][1:3], (x, y), colour)
        _token(panel, token, x, y, colour)
    _text(panel, 0.66, 3.0, "def add(a, b):", MUTED, size=10)
    panel.text(
        2.3, 2.45, "root: the last\ncommitted token", ha="center", va="top", size=9, color=INK
    )
    panel.text(10.2, 4.25, "bonus token:\nthe target's own,\nfrom the same pass", ha="center",
               va="top", size=9, color=AMBER)  # fmt: skip
    for token, x, y, colour, _ in NODES.values():
        if colour in (GREEN, RED):
            mark = "✓" if colour == GREEN else "✕"
            right = x + _width(token) / 2 + 0.06
            panel.text(right, y + 0.3, mark, size=10, color=colour, va="center", weight="bold")
    panel.text(5.2, 1.22, "below a rejected token nothing is accepted", size=9, color=MUTED)
    _committed(panel)
    figure.tight_layout(pad=0.3)
    return figure


def _committed(panel) -> None:
    panel.text(0.12, 0.22, "4  commit", size=13, weight="bold", color=INK, va="center")
    x = 2.05
    for word, colour in (("def add(a, b): return", MUTED), ("a", GREEN), ("+", GREEN),
                         ("b", GREEN), ("⏎", AMBER)):  # fmt: skip
        width = 0.103 * len(word) + 0.2
        _text(panel, x + width / 2, 0.22, word, colour, size=11, boxed=colour != MUTED)
        x += width + 0.12
    panel.text(x + 0.1, 0.22, "four new tokens from one pass of the target;\nwithout drafts it"
               " would have been one", size=9.5, color=MUTED, va="center")  # fmt: skip
    panel.text(2.05, -0.38, "The bonus token is the root of the next round.", size=9, color=AMBER)


def _token(panel, token: str, x: float, y: float, colour: str) -> None:
    width = _width(token)
    box = FancyBboxPatch((x - width / 2, y - 0.24), width, 0.48,
                         boxstyle="round,pad=0.02,rounding_size=0.12", zorder=3)  # fmt: skip
    box.set(facecolor=FILL[colour], edgecolor=colour, linewidth=1.4)
    panel.add_patch(box)
    ink = PAPER if colour == INK else colour
    panel.text(x, y - 0.01, token, family="DejaVu Sans Mono", size=12, color=ink, ha="center",
               va="center", zorder=4)  # fmt: skip


def _width(token: str) -> float:
    return 0.42 + 0.11 * len(token)


def _edge(panel, start: tuple, end: tuple, colour: str) -> None:
    kept = colour in (GREEN, AMBER)
    panel.plot(
        *zip(start, end, strict=True),
        color=colour if kept else LINE,
        linewidth=2.6 if kept else 1.5,
        linestyle=(0, (3, 2)) if colour == AMBER else "-",
        zorder=2,
    )


def _text(panel, x: float, y: float, word: str, colour: str, *, size: float, boxed=False) -> None:
    box = (
        dict(boxstyle="round,pad=0.3", facecolor=FILL[colour], edgecolor=colour) if boxed else None
    )
    panel.text(x, y, word, family="DejaVu Sans Mono", size=size, color=colour, ha="center",
               va="center", bbox=box)  # fmt: skip


def speed() -> plt.Figure:
    """Speed-up over plain decoding, prompts included, with intervals; losses are shown too."""
    run = json.loads((RESULTS / "embedded" / "results.json").read_text())
    sides = [
        ("100M float32 weights: each pass waits for memory", _held_out(run, grown=True)),
        ("the embedded model: 10M weights in float32", _held_out(run, grown=False)),
    ]
    sides = [side for side in sides if side[1]]  # grown models may not be measured yet
    size = (5.5 * len(sides) + 2, 6.2)
    figure, panels = plt.subplots(1, len(sides), figsize=size, sharex=True, squeeze=False)
    for panel, (title, rows) in zip(panels[0], sides, strict=True):
        _speedups(panel, rows)
        panel.set_title(title, size=11, loc="left")
    panels[0][-1].legend(loc="lower right", fontsize=9, frameon=False)
    figure.supxlabel(
        "speed-up over plain decoding of the same target in the same run (whole requests, batch 1)",
        size=10,
    )
    head = run["header"]
    figure.text(
        0.5,
        -0.05,
        f"{head['processor']}, {head['cores']} cores (CPU only), jax {head['jax']}. Suite "
        f"embedded: commit {head['commit']}, {head['date']}. Bars: 95 % intervals over "
        "held-out prompts.\n"
        "Number: tokens drafted in a round."
        + " 100M: the embedded model grown with weights that leave its text unchanged."
        * (len(sides) > 1),
        ha="center",
        size=8,
        color=MUTED,
    )
    figure.tight_layout(pad=0.6)
    return figure


def _held_out(run: dict, grown: bool) -> dict[tuple[str, float], dict]:
    """``{(drafter and number, temperature): ratio of whole requests}`` of the rows of batch 1 in
    float32."""
    rows = {}
    for outcome in run["rows"]:
        row, figures = outcome["row"], outcome.get("figures")
        if row["kind"] != "drafters" or figures is None or row.get("batch", 1) != 1:
            continue
        if bool(row.get("grown")) != grown or row.get("quantize"):
            continue
        for way, found in zip(row["ways"], figures["ways"], strict=True):
            if way.get("num_draft"):
                name = f"{way['drafter']}, {way['num_draft']}"
                rows[name, row["temperature"]] = found["ratio_whole"]
    return rows


def _speedups(panel, rows: dict[tuple[str, float], dict]) -> None:
    names = {name for name, _ in rows}
    best = {n: max(r["median"] for (m, _), r in rows.items() if m == n) for n in names}
    names = sorted(names, key=lambda n: (best[n], n))
    for temperature, colour, marker, shift in ((0.0, BLUE, "o", 0.14), (1.0, AMBER, "s", -0.14)):
        shown = [(i + shift, rows[n, temperature]) for i, n in enumerate(names)
                 if (n, temperature) in rows]  # fmt: skip
        x = [r["median"] for _, r in shown]
        off = [
            [r["median"] - r["low"] for _, r in shown],
            [r["high"] - r["median"] for _, r in shown],
        ]
        panel.errorbar(x, [y for y, _ in shown], xerr=off, fmt=marker, color=colour, capsize=3,
                       markersize=6, label=f"temperature {temperature:g}")  # fmt: skip
    panel.axvline(1.0, color=INK, linewidth=1.2, linestyle="--")
    panel.text(0.99, len(names) - 0.45, "plain", ha="right", size=8.5, color=INK)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(-0.6, len(names) - 0.2)
    panel.grid(axis="x", color=LINE, linewidth=0.6)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    panel.tick_params(axis="y", length=0)


def main() -> None:
    """Writes all pictures."""
    concept_pictures.laws()
    concept_pictures.trees()
    with matplotlib.rc_context(STYLE):
        for name, make in (("one_round", one_round), ("speed", speed)):
            figure = make()
            figure.savefig(
                HERE / f"{name}.svg",
                bbox_inches="tight",
                facecolor=PAPER,
                metadata={"Date": None},
            )
            plt.close(figure)


if __name__ == "__main__":
    main()
