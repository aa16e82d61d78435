"""Tables of what drafting costs: single tables, datastores, and tables of earlier answers."""

from __future__ import annotations

from . import cells


def drafting(rows) -> str:
    note = (
        "Drafting and observing are compiled alone and timed over consecutive rounds after a "
        "random text, batch 1; a plain step is timed in the same run."
    )
    return f"{note}\n\n" + cells.table(
        {
            "drafter": cells.drafter,
            "context": lambda r, f: f"{r.get('context', 256):,}",
            "plain step, ms": lambda r, f: cells.milliseconds(f["plain_step"]),
            "drafting, ms": lambda r, f: cells.milliseconds(f["draft"]),
            "observing, ms": lambda r, f: cells.milliseconds(f["observe"]),
            "drafting of a step": lambda r, f: _percent(f["share"]),
            "both of a step": lambda r, f: _percent(f["share_observed"]),
        },
        rows,
    )


def datastore(rows) -> str:
    note = (
        "Random texts in a temporary folder, of which all chunks are alike (one is sorted). A "
        "process of its own opens the datastore and searches it; resident memory is what it has "
        "more then. A draft is a search with the table that is made of what it found; the files "
        "are in the page cache."
    )
    return f"{note}\n\n" + cells.table(
        {
            "tokens": lambda r, f: f"{f['tokens']:,}",
            "opening, ms": lambda r, f: cells.milliseconds(f["opened"]),
            "resident, MB": lambda r, f: cells.number(f["resident"] / 1e6),
            "a search, ms": lambda r, f: cells.milliseconds(f["search"]),
            "a draft, ms": lambda r, f: cells.milliseconds(f["ask"]),
            "plain step, ms": lambda r, f: cells.milliseconds(f["plain_step"]),
            "search of a step": lambda r, f: _percent(f["share"]),
            "draft of a step": lambda r, f: _percent(f["share_asked"]),
        },
        rows,
    )


def requests(rows) -> str:
    note = (
        "Requests one after the other, batch 1, with a `Session`. *Alone*: the table stays empty. "
        "*First*: each answer is added to it. *Second*: the same requests again, above temperature "
        "0 with other seeds. Ratios are those of the tokens a second in rounds to plain decoding; "
        "each request ran once."
    )

    def of(name, figure):
        return lambda r, f: f"{f[name][figure]:.2f}"

    return f"{note}\n\n" + cells.table(
        {
            "text": lambda r, f: r["workload"],
            "T": lambda r, f: r.get("temperature", 0.0),
            "drafter": lambda r, f: r.get("drafter", "suffix"),
            **{f"τ {name}": of(name, "tau") for name in ("alone", "first", "second")},
            **{f"ratio {name}": of(name, "ratio") for name in ("alone", "first", "second")},
            "same text": lambda r, f: {True: "yes", False: "NO", None: "T > 0"}[f["identical"]],
        },
        rows,
    )


def _percent(x: float) -> str:
    """A share in percent with one decimal."""
    return f"{100 * x:.1f} %"
