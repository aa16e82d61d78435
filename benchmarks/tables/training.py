"""Tables of training: the step of EAGLE-3, and its head beyond the trained context."""

from __future__ import annotations

from . import cells


def training(rows) -> str:
    note = (
        "The compiled step of the recipe: the target's forward pass, all steps of the unroll, the "
        "gradient and the optimiser. Bytes are the working memory, without weights and optimiser "
        "state. *kB a token more* is the slope of the least-squares line through the lengths, "
        "*off the line* the greatest distance from that line."
    )
    size = {
        "target": lambda r, f: r["target"],
        "rows": lambda r, f: r.get("batch", 1),
        "steps": lambda r, f: r["steps"],
        "MB, by tokens of a row": lambda r, f: ", ".join(
            f"{n}: {x / 1e6:.1f}" for n, x in f["bytes"].items()
        ),
        "kB a token more": lambda r, f: cells.number(f["bytes_per_token"] / 1e3),
        "off the line": lambda r, f: f"{f['off_the_line']:.1%}".replace("%", " %"),
    }
    time = {
        "target": lambda r, f: r["target"],
        "rows x tokens": lambda r, f: f"{r.get('batch', 1)} x {r['timed']}",
        "steps": lambda r, f: r["steps"],
        "the step, ms": lambda r, f: cells.milliseconds(f["seconds"]["step"]),
        "target forward, ms": lambda r, f: cells.milliseconds(f["seconds"]["target"]),
        "head forward and backward, ms": lambda r, f: cells.milliseconds(f["seconds"]["head"]),
        "optimiser, ms": lambda r, f: cells.milliseconds(f["seconds"]["update"]),
        "step over target and head": lambda r, f: cells.ratio(f["over_parts"]),
        "over all three": lambda r, f: cells.ratio(f["over_all"]),
    }
    parts, sized = [note], [(r, f) for r, f in rows if "bytes_per_token" in f]
    if sized:
        parts.append(cells.table(size, sized))
    timed = [(r, f) for r, f in rows if "seconds" in f]
    if timed:
        parts.append(
            "Each part is compiled alone and timed in turn with the step; computing the target's "
            "law counts as part of the head. The last two columns are the seconds of the step over "
            "the sum of the parts:"
        )
        parts.append(cells.table(time, timed))
    return "\n\n".join(parts)


def long_context(rows) -> str:
    row, f = rows[0]
    taught, window = (row.get(name, 64) for name in ("taught", "window"))
    note = (
        f"A toy: an EAGLE-3 head trained on rows of {taught} tokens, for a target that is equally "
        "good at any length; greedy, chains of three. *Window* means the same weights limited to "
        f"the last {window} tokens (`window` of the recipe). *Follows* is the share of the "
        "target's tokens that are the next tokens of the toy language."
    )
    flat = [(f, context) for _, f in rows for context in f["all"]]

    def depths(name):
        return lambda f, c: ", ".join(cells.share(x) for x in f[name][c]["accepted_at"])

    return f"{note}\n\n" + cells.table(
        {
            "context": lambda f, c: f"{int(c):,}",
            "follows": lambda f, c: cells.share(f["follows"][c]),
            "τ": lambda f, c: f"{f['all'][c]['tau']:.2f}",
            "accepted at depth 1, 2, 3": depths("all"),
            "τ, window": lambda f, c: f"{f['window'][c]['tau']:.2f}",
            "accepted, window": depths("window"),
        },
        flat,
    )
