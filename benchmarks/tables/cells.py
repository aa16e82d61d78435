"""The cells of tables: numbers, rates, ratios, shares, and names of drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def table(columns: dict[str, Callable], rows: Iterable) -> str:
    """A Markdown table; each column is a function of a row's arguments."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell(*row)) for cell in columns.values()) + " |")
    return "\n".join(lines)


def ratio(x: dict | None) -> str:
    """A ratio with its interval."""
    return "–" if x is None else f"{x['median']:.2f} [{x['low']:.2f}, {x['high']:.2f}]"


def rate(x: dict) -> str:
    """A median with its quartiles."""
    return f"{number(x['median'])} ({number(x['q25'])}–{number(x['q75'])})"


def number(x: float) -> str:
    """At most three significant digits."""
    digits = 2 if x == 0 else max(0, 2 - math.floor(math.log10(abs(x))))
    return f"{x:,.{digits}f}"


def share(x: float | None) -> str:
    """A share in percent."""
    return "–" if x is None else f"{x:.0%}".replace("%", " %")


def milliseconds(x: dict | float) -> str:
    """Seconds, or the median of seconds, in milliseconds."""
    return number(1e3 * (x["median"] if isinstance(x, dict) else x))


def drafter(row: dict, figures: dict) -> str:
    """The drafter's name, its drafted tokens or tree, and whether it is synthetic."""
    shape = row.get("tree") or row.get("num_draft")
    name = row["drafter"] + (f", {shape}" if shape else "")
    return name + (" (synthetic)" if figures.get("synthetic") else "")


def both(x: dict | None) -> str:
    """Seconds of plain and of speculative decoding, in milliseconds."""
    return "–" if x is None else f"{milliseconds(x['plain'])} / {milliseconds(x['speculative'])}"


def verdict(ratio: dict) -> str:
    """Whether speculation is faster, in words, by the interval of the ratio."""
    if ratio["low"] > 1:
        return "wins"
    return "**loses**" if ratio["high"] < 1 else "no difference shown"
