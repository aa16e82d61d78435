"""Tables of single parts: passes of the target, buffers, products, attention, bandwidth."""

from __future__ import annotations

from collections.abc import Callable

from . import cells


def passes(rows) -> str:
    """The seconds of the target's pass over N nodes, in a table for each row."""
    parts = []
    for row, f in rows:
        parts.append(
            f"Pair {row['pair']}, batch {row.get('batch', 1)}, {row.get('length', 255)} tokens "
            f"committed. The floor F is the time in which the fastest product reads the weights: "
            f"{cells.milliseconds(f['floor'])} ms ({f['bandwidth'] / 1e9:.1f} GB/s), "
            "timed in turn with the passes."
        )
        parts.append(
            cells.table(
                {
                    "N": lambda n, s, f=f: n,
                    "T(N), ms": lambda n, s, f=f: cells.rate(
                        {name: 1e3 * s[name] for name in ("median", "q25", "q75")}
                    ),
                    "T(N) / F": lambda n, s, f=f: cells.ratio(f["over_floor"][n]),
                    "T(N) / T(1)": lambda n, s, f=f: cells.ratio(f["over_one"].get(n)),
                },
                f["seconds"].items(),
            )
        )
    return "\n\n".join(parts)


def buffers(rows) -> str:
    flat = [(r, f, c) for r, f in rows for c in f["seconds"]]
    return cells.table(
        {
            "slots of the buffer": lambda r, f, c: f"{int(c):,}",
            "a pass at length 255, ms": lambda r, f, c: cells.milliseconds(f["seconds"][c]),
            "against the smallest": lambda r, f, c: cells.ratio(f["over_first"][c]),
        },
        flat,
    )


def micro(head: str) -> Callable:
    """Returns the table of a kind of row that times several ways to compute one operation.

    Args:
      head: the title of the first column, which has the sizes of the operation.
    """

    def table(rows) -> str:
        flat = [(key, times) for _, f in rows for key, times in f["milliseconds"].items()]
        columns = {head: lambda key, times: key}
        for name in flat[0][1]:
            columns[f"{name}, ms"] = lambda key, times, name=name: cells.number(
                times[name]["median"]
            )
        return cells.table(columns, flat)

    return table


def bandwidth(rows) -> str:
    return "\n".join(
        f"{f['best'] / 1e9:.1f} GB/s of weights ({f['weights'] / 1e6:.0f} MB); by activations: "
        + ", ".join(f"{m}: {x / 1e9:.1f}" for m, x in f["by_columns"].items())
        for _, f in rows
    )
