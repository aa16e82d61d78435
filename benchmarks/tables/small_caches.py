"""Tables of drafting over small caches: acceptance by budget, cost, speed in long contexts."""

from __future__ import annotations

from . import cells


def by_drafter(rows) -> list:
    """The rows of each drafter as one, whose whole cache is told once."""
    found: dict[str, tuple[dict, dict]] = {}
    for row, figures in rows:
        whole, *points = [p | {"commit": figures.get("commit", "")} for p in figures["points"]]
        if row["drafter"] not in found:
            found[row["drafter"]] = row | {"caches": []}, {"points": [whole]}
        one, kept = found[row["drafter"]]
        one["caches"] += row["caches"]
        kept["points"] += points
    return list(found.values())


def budgets(rows) -> str:
    note = (
        "Pieces of 448 tokens of held-out files, unless stated, and what the embedded target "
        "writes after them; half of the rows at each temperature. *First*: the share of rounds "
        "whose first drafted token was accepted. The whole cache of `self` is the target itself. "
        "*Settings*: the last tokens, the first ones, and how many were chosen between them; 512 "
        "entries would be the whole text. `python -m benchmarks small-caches --only budgets` "
        "measures these rows alone; those of another commit than the page's were measured later, "
        "one by one, with the same functions and prompts."
    )
    points = [(row, point) for row, figures in by_drafter(rows) for point in figures["points"]]

    def at(temperature, figure, say):
        return lambda r, f: say(f[temperature][figure])

    return f"{note}\n\n" + cells.table(
        {
            "drafter": lambda r, f: r["drafter"],
            "cache": lambda r, f: f["cache"],
            "entries": lambda r, f: f["entries"] or "all",
            "settings": lambda r, f: (
                f["drafter"].partition(":")[2].replace(",", ", ") if f["entries"] else ""
            ),
            "first, T = 0": at("0.0", "first", cells.share),
            "τ, T = 0": at("0.0", "tau", "{:.2f}".format),
            "first, T = 1": at("1.0", "first", cells.share),
            "τ, T = 1": at("1.0", "tau", "{:.2f}".format),
            "same greedy text": lambda r, f: "yes" if f["identical"] else "NO",
            "commit": lambda r, f: f["commit"],
        },
        points,
    )


def drafting_cost(rows) -> str:
    note = (
        "The drafts of consecutive rounds, compiled alone, batch 1, after contexts that are made "
        "up; `step` is a plain pass of the target."
    )
    parts = []
    for row, figures in rows:
        contexts = [str(c) for c in row["contexts"]]
        lines = [({"drafter": name}, found) for name, found in figures["seconds"].items()]
        columns = {"drafter": lambda r, f: r["drafter"]}
        for c in contexts:
            columns[f"{int(c):,}, ms"] = lambda r, f, c=c: cells.milliseconds(f[c])
        over = figures["over_first"]
        columns["last over first"] = lambda r, f, over=over: cells.ratio(over[r["drafter"]])
        parts.append(cells.table(columns, lines))
    return f"{note}\n\n" + "\n\n".join(parts)


def long_rounds(rows) -> str:
    note = (
        "All drafters of a row run in turn with plain decoding after a context that is made up. "
        "Random weights attend to tokens anywhere in it, so that a window or a few chunks see next "
        "to nothing of what the target says: their τ is that of a useless drafter. What trained "
        "models accept is in *Acceptance by what is seen*; the time of a round does not depend on "
        "the weights. *At τ of the first* is computed: the ratio that the time of the round gives "
        "with the τ of the first drafter of the row. The drafter of a pair `local` is its first "
        "layer, which sees a window of 508 tokens in the target as well; the target's other layers "
        "attend to the whole context."
    )
    ways = [
        (row, way | figures | {"first": figures["ways"][0]["tau"]})
        for row, figures in rows
        for way in figures["ways"]
    ]
    return f"{note}\n\n" + cells.table(
        {
            "drafter, tokens a round": lambda r, f: (
                f"{f['drafter']}, {r['num_draft']}" if "num_draft" in r else f["drafter"]
            ),
            "pair": lambda r, f: r["pair"],
            "batch": lambda r, f: r.get("batch", 1),
            "context": lambda r, f: f"{r['context']:,}",
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "plain step, ms": lambda r, f: cells.milliseconds(f["plain_step"]),
            "round, ms": lambda r, f: cells.milliseconds(f["round"]),
            "ratio, rounds": lambda r, f: cells.ratio(f["ratio_rounds"]),
            "at τ of the first": lambda r, f: (
                f"{f['first'] * f['plain_step'] / f['round']:.2f}" if r.get("batch", 1) == 1 else ""
            ),
            "speculation": lambda r, f: cells.verdict(f["ratio_rounds"]),
            "same text": lambda r, f: "yes" if f["identical"] else "NO",
            "commit": lambda r, f: f.get("commit", "that of the page"),
        },
        ways,
    )
