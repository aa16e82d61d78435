"""What a run leaves to be read: ``log.jsonl``, and ``loss.png`` drawn from it."""

from __future__ import annotations

import re
from pathlib import Path

from .metrics import read
from .scale import by_first

SHARES = re.compile(r"acceptance|greedy_match|accuracy_\d+")
PANELS = {"share of positions, held out": SHARES, "tokens a round, held out": re.compile(r"\w*tau")}


@by_first
def draw_curves(log: Path, picture: Path, title: str) -> None:
    """Training loss (smoothed) and held-out loss over steps; below, the other held-out measures."""
    from matplotlib.figure import Figure  # not pyplot, whose state is the user's (notebooks)

    rows = read(log)
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    heldout = [row for row in rows if "heldout_loss" in row]
    measured = sorted({key for row in heldout for key in row})
    panels = {
        label: [key for key in measured if names.fullmatch(key.rpartition("/")[2])]
        for label, names in PANELS.items()
    }
    panels = {label: keys for label, keys in panels.items() if keys}
    height = 4 + 3 * len(panels)
    figure = Figure(figsize=(8, height))
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False)
    top, *others = axes[:, 0]
    if train:
        steps, losses = zip(*train, strict=True)
        top.plot(steps, _smooth(losses), label="training (moving mean)", linewidth=1)
    steps = [row["step"] for row in heldout]
    losses = [row["heldout_loss"] for row in heldout]
    top.plot(steps, losses, "o-", label="held out", markersize=3)
    top.set(ylabel="loss, nats a token", title=title)
    for axis, (label, keys) in zip(others, panels.items(), strict=True):
        for key in keys:
            axis.plot(steps, [row[key] for row in heldout], "o-", label=key, markersize=3)
        axis.set(ylabel=label)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
        axis.legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _smooth(values, window: int = 25) -> list[float]:
    """Mean over the last ``window`` values."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out
