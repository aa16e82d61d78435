"""What a suite found, for readers: ``results.json``, tables in ``README.md``, plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

UNSAID = {"agreement", "repetitions", "kind", "parts", "new"}
READING = """\
Each ratio is to the same target's own compiled plain decoding in the same run, of pairs of runs
made in turn, with an interval of about 95 % over the repeated runs of one text (of real text: over
the prompts); above 1 speculation is faster. τ: tokens a pass of the target; 1.00 where a drafter
found nothing to propose. Rates are medians with their quartiles. *Synthetic*: random weights, and
a drafter whose agreement with the target was set, not trained; speed and τ are real, the text is
not."""


def label(row: dict) -> str:
    """A row's kind and settings in a few words."""
    said = [f"{k} {v}" for k, v in row.items() if k not in UNSAID]
    return " · ".join([row["kind"], *said])


def verdict(ratio: dict) -> str:
    """In words, from a ratio with its interval."""
    if ratio["low"] > 1:
        return "wins"
    return "**loses**" if ratio["high"] < 1 else "no difference shown"


def summary(row: dict, figures: dict) -> str:
    """The chief figure of a row, for one line on a terminal."""
    say = {
        "bandwidth": lambda f: f"{f['best'] / 1e9:.1f} GB/s",
        "passes": lambda f: ", ".join(
            f"T({n}) {1e3 * s['median']:.2f} ms" for n, s in f["seconds"].items()
        ),
        "buffers": lambda f: ", ".join(
            f"{c} slots {x['median']:.2f}x" for c, x in f["over_first"].items()
        ),
        "decode": lambda f: f"τ {f['tau']:.2f}, ratio {_ratio(f['ratio_rounds'])}",
        "heldout": lambda f: f"τ {f['tau']:.2f}, ratio {_ratio(f['ratio_rounds'])}",
        "serving": lambda f: f"τ {f['tau']:.2f}, ratio {_ratio(f['ratio'])}",
        "regeneration": lambda f: f"τ {f['tau']:.2f}, ratio {_ratio(f['ratio'])}",
        "peer": lambda f: ", ".join(
            f"{m} {x['tokens_per_second']['median']:.1f}/s" for m, x in f["methods"].items()
        ),
        "training": lambda f: (
            f"{f['bytes_per_token'] / 1e3:.1f} kB a token"
            if "bytes_per_token" in f
            else f"{_ratio(f['over_parts'])} of its parts"
        ),
        "long context": lambda f: ", ".join(
            f"{c}: τ {f['all'][c]['tau']:.2f}, {f['window'][c]['tau']:.2f}" for c in f["all"]
        ),
    }
    return say.get(row["kind"], lambda f: "done")(figures)


def write(folder: Path, header: dict, outcomes: list[dict]) -> None:
    """Writes everything anew from the kept rows.

    Args:
      header: where and with what it ran, see ``runner.where``.
      outcomes: ``{"row": ..., "figures" or "skipped" or "failed": ...}``.
    """
    whole = {"header": header, "rows": outcomes}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    try:
        from .plots import draw

        drawn = draw(folder, outcomes)
    except ModuleNotFoundError:
        drawn = None
    (folder / "README.md").write_text(_page(header, outcomes, drawn))


def _page(header: dict, outcomes: list[dict], drawn: list[str] | None) -> str:
    name = header["suite"]
    options = "".join(f" --{k} {_argument(v)}" for k, v in header["options"].items())
    command = f"python -m benchmarks {name}{options}"
    if header["rehearsal"]:
        command = f"python -m benchmarks {name} --rehearse"
    facts = ", ".join(
        f"{k} {v}" for k, v in header.items() if k not in ("suite", "options", "rehearsal") and v
    )
    parts = [f"# Suite {name}\n\n`{command}`\n\n{facts}."]
    if header["rehearsal"]:
        parts.append(
            "**A rehearsal in miniature: it shows that the suite runs. Its figures say nothing "
            "about a GPU.**"
        )
    parts.append(READING)
    done = [o for o in outcomes if "figures" in o]
    pairs = {o["figures"].get("pair_found") for o in done} - {None}
    parts += [f"Pair {text}." for text in sorted(pairs)]
    for kind, (title, table) in TABLES.items():
        found = [(o["row"], o["figures"]) for o in done if o["row"]["kind"] == kind]
        if found:
            parts.append(f"## {title}\n\n{table(found)}")
    if drawn is None:
        parts.append(
            "No plots: matplotlib is not installed where this ran; where it is, "
            f"`python -m benchmarks {name} --redraw` makes them from the kept rows."
        )
    parts += [f"![{Path(file).stem}]({file})" for file in drawn or ()]
    missing = [o for o in outcomes if "figures" not in o]
    if missing:
        lines = [f"- {label(o['row'])}: {o.get('skipped') or o.get('failed')}" for o in missing]
        parts.append("## Not measured\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _argument(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# ---------------------------------------------------------------- tables


def _table(columns: dict[str, Callable], rows: Iterable) -> str:
    """Markdown; each column is a function of a row's arguments."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(str(cell(*row)) for cell in columns.values()) + " |")
    return "\n".join(lines)


def _ratio(x: dict | None) -> str:
    return "–" if x is None else f"{x['median']:.2f} [{x['low']:.2f}, {x['high']:.2f}]"


def _rate(x: dict) -> str:
    return f"{_number(x['median'])} ({_number(x['q25'])}–{_number(x['q75'])})"


def _number(x: float) -> str:
    """Three significant digits, no more."""
    digits = 2 if x == 0 else max(0, 2 - math.floor(math.log10(abs(x))))
    return f"{x:,.{digits}f}"


def _share(x: float | None) -> str:
    return "–" if x is None else f"{x:.0%}".replace("%", " %")


def _ms(x: dict | float) -> str:
    return _number(1e3 * (x["median"] if isinstance(x, dict) else x))


def _drafter(row: dict, figures: dict) -> str:
    shape = row.get("tree") or row.get("num_draft")
    name = row["drafter"] + (f", {shape}" if shape else "")
    return name + (" (synthetic)" if figures.get("synthetic") else "")


def _decode(rows) -> str:
    first = _table(
        {
            "pair": lambda r, f: r["pair"],
            "drafter, tokens a round": _drafter,
            "batch": lambda r, f: r.get("batch", 1),
            "context": lambda r, f: f"{r.get('context', 64):,}" + " made up" * (not _read(r)),
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "accepted": lambda r, f: _share(f["acceptance"]),
            "plain, tokens/s": lambda r, f: _rate(f["plain_tokens_per_second"]),
            "speculative, tokens/s": lambda r, f: _rate(f["tokens_per_second"]),
            "ratio, rounds": lambda r, f: _ratio(f["ratio_rounds"]),
            "ratio, whole run": lambda r, f: _ratio(f.get("ratio_whole")),
            "speculation": lambda r, f: (
                "control" if r["drafter"] == "plain" else verdict(f["ratio_rounds"])
            ),
            "same text": lambda r, f: {True: "yes", False: "NO", None: "T > 0"}[f["identical"]],
        },
        rows,
    )
    second = _table(
        {
            "drafter, tokens a round": _drafter,
            "batch": lambda r, f: r.get("batch", 1),
            "context": lambda r, f: f"{r.get('context', 64):,}",
            "T": lambda r, f: r.get("temperature", 0),
            "plain step, ms": lambda r, f: _ms(f["seconds_per_plain_step"]),
            "of the roofline": lambda r, f: _share(f["roofline_fraction"]),
            "round, ms": lambda r, f: _ms(f["seconds_per_round"]),
            "a token, plain / speculative, ms": lambda r, f: _both(f["seconds_per_token"]),
            "first token, ms": lambda r, f: _both(f.get("first_token")),
            "repeated 4-grams": lambda r, f: _share(f["repeated_4grams"]),
        },
        rows,
    )
    third = [(r, f) for r, f in rows if "memory" in f]
    parts = [first, "Steps and latencies:", second]
    if third:
        parts += ["Inside a round, each part compiled alone; memory; compilation:", _anatomy(third)]
    return "\n\n".join(parts)


def _anatomy(rows) -> str:
    def part(name):
        return lambda r, f: _ms(f["parts"][name]) if "parts" in f else "–"

    def megabytes(name):
        return lambda r, f: _number(f["memory"][name] / 1e6)

    names = ("draft", "verify", "accept", "commit", "observe", "round")
    return _table(
        {
            "drafter, tokens a round": _drafter,
            "T": lambda r, f: r.get("temperature", 0),
            **{f"{name}, ms": part(name) for name in names},
            "loop efficiency": lambda r, f: _ratio(f.get("loop_efficiency")),
            "peak, MB": megabytes("peak"),
            "weights": megabytes("weights"),
            "cache": megabytes("cache"),
            "working set": megabytes("working_set"),
            "compile, s": lambda r, f: (
                f"{f['memory']['compile_start'] + f['memory']['compile_burst']:.1f}"
            ),
        },
        rows,
    )


def _read(row: dict) -> bool:
    return row.get("read", True)


def _both(x: dict | None) -> str:
    return "–" if x is None else f"{_ms(x['plain'])} / {_ms(x['speculative'])}"


def _passes(rows) -> str:
    parts = []
    for row, f in rows:
        parts.append(
            f"Pair {row['pair']}, batch {row.get('batch', 1)}, {row.get('length', 255)} tokens "
            f"committed. Floor F, the time in which the best product reads the weights: "
            f"{_ms(f['floor'])} ms ({f['bandwidth'] / 1e9:.1f} GB/s), timed in turn."
        )
        parts.append(
            _table(
                {
                    "N": lambda n, s, f=f: n,
                    "T(N), ms": lambda n, s, f=f: (
                        f"{_ms(s)} ({_number(1e3 * s['q25'])}–{_number(1e3 * s['q75'])})"
                    ),
                    "T(N) / F": lambda n, s, f=f: _ratio(f["over_floor"][n]),
                    "T(N) / T(1)": lambda n, s, f=f: _ratio(f["over_one"].get(n)),
                },
                f["seconds"].items(),
            )
        )
    return "\n\n".join(parts)


def _buffers(rows) -> str:
    flat = [(r, f, c) for r, f in rows for c in f["seconds"]]
    return _table(
        {
            "slots of the buffer": lambda r, f, c: f"{int(c):,}",
            "a pass at length 255, ms": lambda r, f, c: _ms(f["seconds"][c]),
            "against the smallest": lambda r, f, c: _ratio(f["over_first"][c]),
        },
        flat,
    )


def _micro(head: str) -> Callable:
    def table(rows) -> str:
        flat = [(key, times) for _, f in rows for key, times in f["milliseconds"].items()]
        columns = {head: lambda key, times: key}
        for name in flat[0][1]:
            columns[f"{name}, ms"] = lambda key, times, name=name: _number(times[name]["median"])
        return _table(columns, flat)

    return table


def _heldout(rows) -> str:
    count = f"{rows[0][0]['prompts']} held-out prompts"
    note = (
        f"The embedded, trained models on {count}; of the runs of each batch the fastest "
        "counts, intervals are over the batches."
    )
    target = {}
    if any(row.get("grown") for row, _ in rows):
        target = {"target": lambda r, f: "grown to 100M" if r.get("grown") else "embedded"}
        note += (
            " *Grown*: to 100M float32 weights, the heads likewise, that say what the small ones "
            "say; texts, drafts and τ are theirs, the time is that of a target whose weights come "
            "from memory (`benchmarks/grown.py`); of their runs there are two, else three."
        )
    return f"{note}\n\n" + _table(
        {
            **target,
            "T": lambda r, f: r["temperature"],
            "batch": lambda r, f: r.get("batch", 1),
            "drafter, tokens a round": _drafter,
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "accepted": lambda r, f: _share(f["acceptance"]),
            "plain, tokens/s": lambda r, f: _number(f["plain_tokens_per_second_rounds"]),
            "speculative, tokens/s": lambda r, f: _number(f["tokens_per_second_rounds"]),
            "ratio, rounds": lambda r, f: _ratio(f["ratio_rounds"]),
            "ratio, whole run": lambda r, f: _ratio(f["ratio_whole"]),
            "speculation": lambda r, f: verdict(f["ratio_rounds"]),
            "repeated 4-grams": lambda r, f: _share(f["repeated_4grams"]),
            "same text": lambda r, f: f["identical"] or "T > 0",
        },
        rows,
    )


def _serving(rows) -> str:
    row, f = rows[0]
    note = (
        f"The embedded, trained pair; {row['prompts']} held-out prompts, cut to 1 to "
        f"{row['longest']} tokens ({f['prompt_tokens']:,} in all, whose reading is included), "
        f"each asking for 1 to {row['longest']} ({f['tokens']:,} in all). *Whole*: the next "
        "prompts wait until the whole batch is done; *continuous*: until an eighth of its rows "
        "is. Both are `specjax.serve_offline`, in turn; the ratio is that of the two, and its "
        "interval is over the repeated runs."
    )
    return f"{note}\n\n" + _table(
        {
            "drafter, tokens a round": _drafter,
            "batch": lambda r, f: r["batch"],
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "whole batches, tokens/s": lambda r, f: _rate(f["tokens_per_second"]["whole"]),
            "continuous rows, tokens/s": lambda r, f: _rate(f["tokens_per_second"]["continuous"]),
            "continuous over whole": lambda r, f: _ratio(f["ratio"]),
            "same texts": lambda r, f: "yes" if f["identical"] else "NO",
        },
        rows,
    )


def _regeneration(rows) -> str:
    note = (
        "The embedded target goes on from prompts of its corpus, as in the recipe `regenerate`, "
        "whose reading is included. Both ways are `specjax.serve_offline` in turn, with as many "
        "rows at a time; the interval is over the repeated runs."
    )
    return f"{note}\n\n" + _table(
        {
            "drafter, tokens a round": _drafter,
            "batch": lambda r, f: r["batch"],
            "rows": lambda r, f: r["rows"],
            "new tokens": lambda r, f: f"{f['tokens']:,}",
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "plain, tokens/s": lambda r, f: _rate(f["tokens_per_second"]["plain"]),
            "drafted, tokens/s": lambda r, f: _rate(f["tokens_per_second"]["drafted"]),
            "ratio": lambda r, f: _ratio(f["ratio"]),
            "drafting": lambda r, f: verdict(f["ratio"]),
            "same rows": lambda r, f: {None: "T > 0", True: "yes", False: "NO"}[f["identical"]],
        },
        rows,
    )


def _peers(rows) -> str:
    parts = []
    for row, f in rows:
        versions = ", ".join(f"{k} {v}" for k, v in f["versions"].items())
        parts.append(
            f"Pair {row['pair']}{' (synthetic)' if f['synthetic'] else ' (trained)'}, "
            f"{row['num_draft']} tokens a round, whole requests of {row.get('new', 64)} tokens, "
            f"batch 1, {f['threads']} thread(s) on each side, in turn ({versions}). *Over peer*: "
            "ours against theirs of the same method; a peer's own plain is its plain `generate`."
        )
        parts.append(
            _table(
                {
                    "method": lambda m, x: f"specjax {m}" if "peer" in x else m,
                    "tokens/s": lambda m, x: _rate(x["tokens_per_second"]),
                    "τ": lambda m, x: f"{x['tau']:.2f}",
                    "a round, ms": lambda m, x: _ms(x["seconds_per_round"]),
                    "first token, ms": lambda m, x: (
                        _ms(x["first_token"]) if x["first_token"] else "–"
                    ),
                    "over its own plain": lambda m, x: _ratio(x["over_own_plain"]),
                    "over peer, whole": lambda m, x: _ratio(x.get("over_peer")),
                    "over peer, a round": lambda m, x: _ratio(x.get("round_over_peer")),
                    "text as specjax plain": lambda m, x: _share(x["same_text"]),
                },
                f["methods"].items(),
            )
        )
    return "\n\n".join(parts)


def _training(rows) -> str:
    note = (
        "The recipe's compiled step: the target's forward pass, all steps of the unroll, gradient, "
        "optimiser. Bytes are those that it works in (weights and state besides); the line is the "
        "least-squares one through the lengths, *off the line* the greatest distance from it."
    )
    size = {
        "target": lambda r, f: r["target"],
        "rows": lambda r, f: r.get("batch", 1),
        "steps": lambda r, f: r["steps"],
        "MB, by tokens of a row": lambda r, f: ", ".join(
            f"{n}: {x / 1e6:.1f}" for n, x in f["bytes"].items()
        ),
        "kB a token more": lambda r, f: _number(f["bytes_per_token"] / 1e3),
        "off the line": lambda r, f: f"{f['off_the_line']:.1%}".replace("%", " %"),
    }
    time = {
        "target": lambda r, f: r["target"],
        "rows x tokens": lambda r, f: f"{r.get('batch', 1)} x {r['timed']}",
        "steps": lambda r, f: r["steps"],
        "the step, ms": lambda r, f: _ms(f["seconds"]["step"]),
        "target forward, ms": lambda r, f: _ms(f["seconds"]["target"]),
        "head forward and backward, ms": lambda r, f: _ms(f["seconds"]["head"]),
        "optimiser, ms": lambda r, f: _ms(f["seconds"]["update"]),
        "step over target and head": lambda r, f: _ratio(f["over_parts"]),
        "over all three": lambda r, f: _ratio(f["over_all"]),
    }
    parts, sized = [note], [(r, f) for r, f in rows if "bytes_per_token" in f]
    if sized:
        parts.append(_table(size, sized))
    timed = [(r, f) for r, f in rows if "seconds" in f]
    if timed:
        parts.append(
            "Each part compiled alone, in turn with the step; the target's law counts as the "
            "head's. The last two columns are the step's seconds over the sum of the parts':"
        )
        parts.append(_table(time, timed))
    return "\n\n".join(parts)


def _long_context(rows) -> str:
    row, f = rows[0]
    taught, window = (row.get(name, 64) for name in ("taught", "window"))
    note = (
        f"A toy: an EAGLE-3 head taught on rows of {taught} tokens, on a target that is as good at "
        "any length; greedy, chains of three. *Window*: the same weights, seeing no more than the "
        f"last {window} tokens (`window` of the recipe). *Follows*: of what the target says, the "
        "share that its language says too."
    )
    flat = [(f, context) for _, f in rows for context in f["all"]]

    def depths(name):
        return lambda f, c: ", ".join(_share(x) for x in f[name][c]["accepted_at"])

    return f"{note}\n\n" + _table(
        {
            "context": lambda f, c: f"{int(c):,}",
            "follows": lambda f, c: _share(f["follows"][c]),
            "τ": lambda f, c: f"{f['all'][c]['tau']:.2f}",
            "accepted at depth 1, 2, 3": depths("all"),
            "τ, window": lambda f, c: f"{f['window'][c]['tau']:.2f}",
            "accepted, window": depths("window"),
        },
        flat,
    )


def _bandwidth(rows) -> str:
    return "\n".join(
        f"{f['best'] / 1e9:.1f} GB/s of weights ({f['weights'] / 1e6:.0f} MB); by activations: "
        + ", ".join(f"{m}: {x / 1e9:.1f}" for m, x in f["by_columns"].items())
        for _, f in rows
    )


TABLES = {
    "decode": ("Plain and speculative decoding", _decode),
    "peer": ("Peers", _peers),
    "heldout": ("Real text", _heldout),
    "serving": ("Continuous rows", _serving),
    "regeneration": ("Regeneration", _regeneration),
    "passes": ("A pass over N nodes", _passes),
    "buffers": ("The size of the buffer", _buffers),
    "bandwidth": ("Bandwidth", _bandwidth),
    "product": ("Products with M activations", _micro("M")),
    "attention": ("Attention over a cache, one layer", _micro("cached, N")),
    "training": ("EAGLE-3's training step", _training),
    "long context": ("EAGLE-3 beyond its context", _long_context),
}
