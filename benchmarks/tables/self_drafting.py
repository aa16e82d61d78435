"""The tables of targets that draft for themselves."""

from __future__ import annotations

from . import cells


def part_memory(rows) -> str:
    """Bytes of each drafter's program beside those of plain decoding."""
    note = (
        "Bytes of the program that runs the rounds, as the compiler plans them, for one row of 64 "
        "new tokens."
    )
    listed = [(f, name) for _, f in rows for name in f["bytes"]]
    columns = {
        "drafter": lambda f, name: name,
        "weights, MB": lambda f, name: _mega(f["bytes"][name]["weights"]),
        "caches, MB": lambda f, name: _mega(f["bytes"][name]["cache"]),
        "working set, MB": lambda f, name: _mega(f["bytes"][name]["working_set"]),
        "all / plain": lambda f, name: f"{f['over'].get(name, 1):.3f}",
    }
    return f"{note}\n\n{cells.table(columns, listed)}"


def resumed_pass(rows) -> str:
    """The seconds of the pass that runs the missing layers, beside their share."""
    note = (
        "The target's pass over N nodes whose first E layers ran before. The share is that of the "
        "weights of the other layers, the norm and the LM head; the last column divides the "
        "measured share by it, so that 1 means that the pass costs what the missing layers cost."
    )
    columns = {
        "E": lambda f, p: f"{p['exit']} of {f['layers']}",
        "N": lambda f, p: p["nodes"],
        "whole, ms": lambda f, p: cells.milliseconds(p["whole"]),
        "resumed, ms": lambda f, p: cells.milliseconds(p["resumed"]),
        "first E layers, ms": lambda f, p: cells.milliseconds(p["first"]),
        "share": lambda f, p: cells.share(p["share"]),
        "resumed / (share of whole)": lambda f, p: cells.ratio(p["over_share"]),
    }
    return f"{note}\n\n" + cells.table(columns, [(f, p) for _, f in rows for p in f["points"]])


def skip_search(rows) -> str:
    """The best set, predicted and measured."""
    note = (
        "The set was searched on the texts of some held-out prompts and measured at T = 0 on "
        "others. The target was not trained to skip anything."
    )
    columns = {
        "skipped": lambda r, f: ", ".join(f["skip"]),
        "drafts": lambda r, f: f["num_draft"],
        "sets judged": lambda r, f: f["judged"],
        "predicted": lambda r, f: f"{f['predicted']:.2f}",
        "τ": lambda r, f: f"{f['measured']['tau']:.2f}",
        "ratio in rounds": lambda r, f: cells.ratio(f["measured"]["ratio_rounds"]),
        "ratio of whole runs": lambda r, f: cells.ratio(f["measured"]["ratio_whole"]),
        "texts as plain": lambda r, f: f["measured"]["identical"],
    }
    return f"{note}\n\n{cells.table(columns, rows)}"


def early_exits(rows) -> str:
    """Speed of each exit, and the held-out losses."""
    note = (
        "At T = 0, with targets whose widths are grown to 100M float32 weights: texts, τ and "
        "losses are those of the small models named here, times those of the grown ones. The "
        "losses are in nats a token over held-out files of the standard library."
    )
    lines = []
    for row, f in rows:
        losses, name = f["losses"], row.get("target", "embedded")
        words = f"`{name}`: loss {losses['target']:.4f}"
        if "twin" in losses:
            words += f", its twin `{row['twin']}` {losses['twin']:.4f}: {losses['over_twin']:.4f}"
        lines.append(f"- {words}")
    columns = {
        "target": lambda r, w: r.get("target", "embedded"),
        "E": lambda r, w: w["exit"],
        "drafts": lambda r, w: w["num_draft"],
        "τ": lambda r, w: f"{w['tau']:.2f}",
        "accepted": lambda r, w: cells.share(w["acceptance"]),
        "ratio in rounds": lambda r, w: cells.ratio(w["ratio_rounds"]),
        "ratio of whole runs": lambda r, w: cells.ratio(w["ratio_whole"]),
        "texts as plain": lambda r, w: w["identical"],
        "repeated 4-grams": lambda r, w: cells.share(w["repeated_4grams"]),
    }
    ways = [(r, w) for r, f in rows for w in f["ways"]]
    return "\n\n".join([note, "\n".join(lines), cells.table(columns, ways)])


def schedules(rows) -> str:
    """Ticks, counted and by the formula."""
    note = (
        "Several workers, run in turn on one device: ticks and reads are counted, and the modelled "
        "ratio is that of the ticks. SPEED runs the embedded target's layers several times, for "
        "which it was not trained."
    )
    columns = {
        "schedule": lambda f, p: (
            f"PPD, d = {p['layer']}, {p['guesses']} guesses"
            if p["method"] == "PPD"
            else f"SPEED, {p['repeats']} repeats"
        ),
        "layers": lambda f, p: p["layers"],
        "guessed": lambda f, p: cells.share(p["hit_rate"]),
        "ticks": lambda f, p: f"{p['ticks']:,}",
        "by the formula": lambda f, p: f"{p['expected_ticks']:,}",
        "plain": lambda f, p: f"{p['plain_ticks']:,}",
        "reads of a layer": lambda f, p: f"{p['reads']:,}",
        "modelled ratio": lambda f, p: f"{p['plain_ticks'] / p['ticks']:.2f}",
        "measured, one device": lambda f, p: f"{p['plain_seconds'] / p['seconds']:.2f}",
        "text as plain": lambda f, p: "yes" if p["identical"] else "**no**",
    }
    return f"{note}\n\n" + cells.table(columns, [(f, p) for _, f in rows for p in f["points"]])


def _mega(size: int) -> str:
    return cells.number(size / 1e6)
