"""Draws the results of the calculator as an SVG picture, which needs no other package."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from .calculator import Calculation, Outlook

COLOURS = ("#4c6fbf", "#d9822b", "#3a8f5c", "#9a3fb0", "#84690a", "#bd2f4f")
INK, GRID = "#222", "#ddd"
WIDE, HIGH, LEFT, TOP, BOTTOM = 400, 300, 62, 40, 48  # of one panel, in pixels
TICKS = 5


def picture(found: Sequence[Calculation]) -> str:
    """Returns an SVG picture with one curve for each result.

    The left panel has the speed-up of the rounds against the number of drafted tokens, the right
    one the throughput of whole requests against the time per token of a row. A ring marks the
    draft that was asked for, and a dot the best chain.

    Args:
      found: results that differ in the batch size.

    Raises:
      ValueError: there are no results, or more than there are colours.
    """
    if not 1 <= len(found) <= len(COLOURS):
        raise ValueError(f"found: give from 1 to {len(COLOURS)} results, not {len(found)}")
    times, unit = (1e3, "ms") if found[0].unit == "s" else (1.0, "passes")
    rate = "tokens/s" if unit == "ms" else "tokens a pass"
    panels = [
        _panel(found, "drafted tokens a round", "× plain", lambda o: (o.num_draft, o.speedup)),
        _panel(found, f"TPOT, {unit}", rate, lambda o: (times * o.tpot, o.throughput)),
    ]
    body = [
        f'<g transform="translate({i * (WIDE + LEFT + 30)} 0)">{"".join(panel)}</g>'
        for i, panel in enumerate(panels)
    ]
    for i, one in enumerate(found):
        y = TOP + HIGH + BOTTOM + 20 * (i + 1)
        body.append(f'<path d="M{LEFT} {y - 5}h24" stroke="{COLOURS[i]}" stroke-width="3"/>')
        body.append(_text(LEFT + 32, y, f"batch {one.batch}: {one.verdict}", "start"))
    width, height = 2 * (WIDE + LEFT + 30), TOP + HIGH + BOTTOM + 20 * len(found) + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13" role="img"><title>Speed of '
        f'speculative decoding, computed</title><rect width="{width}" height="{height}" '
        'fill="#fff"/>'
    )
    return "\n".join([head, *body, "</svg>\n"])


def _panel(
    found: Sequence[Calculation], across: str, up: str, of: Callable[[Outlook], tuple[float, float]]
) -> list[str]:
    """Returns the parts of a panel; ``of`` gives the place of an outlook."""
    curves = [[of(one) for one in result.chains] for result in found]
    marked = [of(one) for result in found for one in (result.asked, result.best)]
    every = [*marked, *(place for curve in curves for place in curve)]
    most = [1.05 * max(place[axis] for place in every) or 1.0 for axis in (0, 1)]

    def x(value: float) -> float:
        return LEFT + WIDE * value / most[0]

    def y(value: float) -> float:
        return TOP + HIGH * (1 - value / most[1])

    parts = []
    for i in range(TICKS + 1):
        at = [most[axis] * i / TICKS for axis in (0, 1)]
        parts.append(f'<path d="M{LEFT} {y(at[1]):.1f}h{WIDE}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 6, y(at[1]) + 4, f"{at[1]:.3g}", "end"))
        parts.append(_text(x(at[0]), TOP + HIGH + 18, f"{at[0]:.3g}"))
    parts.append(_text(LEFT + WIDE / 2, TOP + HIGH + 38, across))
    parts.append(_text(LEFT, TOP - 14, up, "start"))
    for curve, result, colour in zip(curves, found, COLOURS, strict=False):
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for one, fill, size in ((result.best, colour, 4), (result.asked, "none", 7)):
            a, b = of(one)
            parts.append(
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{size}" fill="{fill}" '
                f'stroke="{colour}" stroke-width="2"/>'
            )
    return parts


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    words = html.escape(words)  # they may hold the name of a file
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{words}</text>'
