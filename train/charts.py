"""Draws the curves of a run with matplotlib, as a picture or as SVG in the colours of a page."""

from __future__ import annotations

import dataclasses
import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure  # not pyplot, whose state is the user's (notebooks)

# Colours that colour-blind readers can tell apart; a page replaces each by a variable, see ``svg``.
COLOURS = ("#2f6fde", "#c9580a", "#18855a", "#9a3fb0", "#84690a", "#bd2f4f", "#0c7f92", "#6b6b6b")
INK, GRID = "#1c1d1f", "#d9dadd"
SHARES, TAU = re.compile(r"acceptance|greedy_match"), re.compile(r"\w*tau")
KEPT, HEAD = re.compile(r"decoded_kept_(\d+)"), re.compile(r"accuracy_(\d+)")  # no domain's prefix
WINDOW = 25  # steps whose mean is the curve of the training loss

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes over steps.

    Attributes:
      label: the label of the vertical axis.
      title: a description of the curves.
      series: points by name, in the order of their colours.
      ordered: whether the series are steps of one scale (positions of a draft), which are drawn in
        shades of one colour.
    """

    label: str
    title: str
    series: dict[str, Points]
    ordered: bool = False


def panels(rows: list[dict], loss_unit: str = "nats per token") -> list[Panel]:
    """The panels of all measures in the rows of a log. A missing measure is left out, never zero.

    Args:
      rows: the rows of ``log.jsonl``.
      loss_unit: the unit of the losses, shown beside their axis.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    last = {name: name.rpartition("/")[2] for name in names}

    def points(name) -> Points:
        return [(row["step"], row[name]) for row in rows if name in row]

    def of(pattern) -> dict[str, Points]:
        return {words(n): points(n) for n in names if pattern.fullmatch(last[n])}

    losses = {"training, moving mean": smooth(points("loss"))} if "loss" in names else {}
    losses |= of(re.compile("heldout_loss"))

    def numbered(pattern, what) -> dict[str, Points]:
        return {f"{what} {m[1]}": points(n) for n in names if (m := pattern.fullmatch(n))}

    kept, heads = numbered(KEPT, "draft"), numbered(HEAD, "head")
    found = [
        Panel(f"loss, {loss_unit}", "Loss", losses),
        Panel("share of rounds", "Draft positions kept, by decoding held-out prompts", kept, True),
        Panel("share of positions", "Heads right about held-out text", heads, True),
        Panel("share of positions", "Agreement with the target on held-out text", of(SHARES)),
        Panel("tokens a pass of the target", "Tau on held-out text", of(TAU)),
        Panel("tokens a second", "Training speed", of(re.compile("tokens_per_second"))),
    ]
    return [panel for panel in found if panel.series]


def words(name: str) -> str:
    """The name of a measure in a legend: ``decoded tau, greedy`` for ``greedy/decoded_tau``."""
    domain, _, measure = name.rpartition("/")
    measure = {"heldout_loss": "held out"}.get(measure, measure.replace("_", " "))
    return f"{measure}, {domain}" if domain else measure


def smooth(points: Points) -> Points:
    """Replaces each value by the mean of the last ``WINDOW`` values."""
    values = [value for _, value in points]
    recent = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [(x, sum(own) / len(own)) for (x, _), own in zip(points, recent, strict=True)]


def plot(axes, panel: Panel) -> None:
    """Draws a panel on a pair of axes."""
    for i, (name, points) in enumerate(panel.series.items()):
        colour = COLOURS[0] if panel.ordered else COLOURS[i % len(COLOURS)]
        shade = 1 - 0.75 * i / max(1, len(panel.series) - 1) if panel.ordered else 1.0
        few = len(points) <= 40
        style = dict(color=colour, alpha=shade, linewidth=1.6, label=name)
        axes.plot(*zip(*points, strict=True), "o-" if few else "-", markersize=3.5, **style)
    axes.set_ylabel(panel.label)
    axes.set_xlabel("step")
    if panel.label.startswith("share"):
        axes.set_ylim(bottom=0)
    _plain(axes)
    if len(panel.series) > 1 or panel.label.startswith("loss"):
        axes.legend(frameon=False, fontsize=8)


def bars(axes, values: dict[str, tuple[float, float, float]], label: str) -> None:
    """Draws horizontal bars with intervals ``(value, low, high)``, on an axis that begins at 1."""
    for row, (value, low, high) in enumerate(values.values()):
        axes.barh(row, value - 1, left=1, height=0.55, color=COLOURS[0])
        axes.plot([low, high], [row, row], color=INK, linewidth=1.2)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.set_xlim(1, max(2, 1.05 * max(high for _, _, high in values.values())))
    axes.set_xlabel(label)
    _plain(axes, "x")


def _plain(axes, grid: str = "both") -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def picture(found: list[Panel], title: str, file) -> None:
    """Writes all panels, one below the other, as a PNG."""
    figure = Figure(figsize=(8, 3.4 * max(1, len(found))), layout="constrained")
    figure.suptitle(title)
    for panel, axes in zip(found, figure.subplots(len(found), 1, squeeze=False)[:, 0], strict=True):
        plot(axes, panel)
    figure.savefig(file, dpi=110)


def svg(draw, name: str, size=(7.2, 3.2)) -> str:
    """Returns the drawing of ``draw(axes)`` as an SVG element.

    Colours are variables of the page (``--c0``, ``--ink``, ``--grid``), and words are text in the
    page's font. ``name`` must be unique on the page.
    """
    settings = {"svg.fonttype": "none", "svg.hashsalt": name, "text.color": INK}
    settings |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color"), INK)
    settings |= {"ytick.color": INK, "font.size": 9}
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for i, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--c{i})")
    text = text.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
