"""Tables of whole runs of decoding: made pairs, real text, peers."""

from __future__ import annotations

from ..heldout import REPETITIONS
from . import cells

KINDS = ("edits", "retrieval", "completion", "open")
DEFAULTS = {"grown": False, "batch": 1}


def decode(rows) -> str:
    first = cells.table(
        {
            "pair": lambda r, f: r["pair"],
            "drafter, tokens a round": cells.drafter,
            "batch": lambda r, f: r.get("batch", 1),
            "context": lambda r, f: f"{r.get('context', 64):,}" + " made up" * (not _read(r)),
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "accepted": lambda r, f: cells.share(f["acceptance"]),
            "plain, tokens/s": lambda r, f: cells.rate(f["plain_tokens_per_second"]),
            "speculative, tokens/s": lambda r, f: cells.rate(f["tokens_per_second"]),
            "ratio, rounds": lambda r, f: cells.ratio(f["ratio_rounds"]),
            "ratio, whole run": lambda r, f: cells.ratio(f.get("ratio_whole")),
            "speculation": lambda r, f: (
                "control" if r["drafter"] == "plain" else cells.verdict(f["ratio_rounds"])
            ),
            "same text": lambda r, f: {True: "yes", False: "NO", None: "T > 0"}[f["identical"]],
        },
        rows,
    )
    second = cells.table(
        {
            "drafter, tokens a round": cells.drafter,
            "batch": lambda r, f: r.get("batch", 1),
            "context": lambda r, f: f"{r.get('context', 64):,}",
            "T": lambda r, f: r.get("temperature", 0),
            "plain step, ms": lambda r, f: cells.milliseconds(f["seconds_per_plain_step"]),
            "of the roofline": lambda r, f: cells.share(f["roofline_fraction"]),
            "round, ms": lambda r, f: cells.milliseconds(f["seconds_per_round"]),
            "a token, plain / speculative, ms": lambda r, f: cells.both(f["seconds_per_token"]),
            "first token, ms": lambda r, f: cells.both(f.get("first_token")),
            "repeated 4-grams": lambda r, f: cells.share(f["repeated_4grams"]),
        },
        rows,
    )
    third = [(r, f) for r, f in rows if "memory" in f]
    parts = [first, "Steps and latencies:", second]
    if third:
        parts += [
            "The parts of a round, each compiled alone; memory; time to compile:",
            _anatomy(third),
        ]
    return "\n\n".join(parts)


def _anatomy(rows) -> str:
    def part(name):
        return lambda r, f: cells.milliseconds(f["parts"][name]) if "parts" in f else "–"

    def megabytes(name):
        return lambda r, f: cells.number(f["memory"][name] / 1e6)

    names = ("draft", "verify", "accept", "commit", "observe", "round")
    return cells.table(
        {
            "drafter, tokens a round": cells.drafter,
            "T": lambda r, f: r.get("temperature", 0),
            **{f"{name}, ms": part(name) for name in names},
            "loop efficiency": lambda r, f: cells.ratio(f.get("loop_efficiency")),
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


def each_way(rows) -> list:
    """A row for each drafter of rows of the kinds ``drafters`` and ``tables``."""
    return [
        (row | way, figures)
        for row, found in rows
        for way, figures in zip(row["ways"], found["ways"], strict=True)
    ]


def drafters(rows) -> str:
    return _real_text(each_way(rows), f"{_counts(rows)} held-out prompts")


def _counts(rows) -> str:
    return " or ".join(map(str, sorted({row["prompts"] for row, _ in rows})))


def tables(rows) -> str:
    count, every = f"{_counts(rows)} prompts", each_way(rows)
    given = [(r, f) for r, f in every if r.get("given")]
    own = [(r, f) for r, f in every if not r.get("given")]
    parts = [_real_text(own, count)] if own else []
    if given:
        parts.append(
            "The same with *true answers*: the embedded target is too small to copy what it has "
            "read. Here it is made to say the true answer (the edited piece; the piece from the "
            "line on), so that the rounds are those of a target that copies: its passes are "
            "computed, and what it would have said is not used.\n\n" + _real_text(given, count, "")
        )
    if any("planned" in row for row, _ in rows):  # of cascades, which have no such aims
        return "\n\n".join(parts)
    return "\n\n".join([*parts, "What was to be reached:", _goals(own, given)])


def _goals(own, given) -> str:
    """The aims of the tables, and what was measured."""

    def tau(rows, **wanted):
        found = [f for r, f in rows if wanted.items() <= (DEFAULTS | r).items()]
        return found[0]["tau"] if found else None

    lines = []
    for name, rows, kinds in (("own text", own, KINDS), ("true answers", given, KINDS[:2])):
        for t in (0.0, 1.0) if name == "own text" else (0.0,):
            for kind in kinds:
                of = dict(workload=kind, temperature=t, grown=name == "true answers", batch=1)
                pair = [tau(rows, **of, drafter=d) for d in ("suffix", "ngram")]
                if None not in pair:
                    aim = "at least 1.2" if kind in KINDS[:2] else "at least level"
                    what = f"τ of `suffix` over `ngram`, {kind}, {name}, T = {t:g}"
                    lines.append((what, aim, f"{pair[0] / pair[1]:.2f}"))
    found = tau(own, workload="open", temperature=0.0, batch=1, drafter="recycling", grown=False)
    if found is not None:
        lines.append(("τ of `recycling`, open, T = 0", "at least 1.5", f"{found:.2f}"))
    for name, rows in (("own text", own), ("true answers", given)):
        of = dict(workload="edits", temperature=0.0, grown=True, batch=1)
        best = [(r, f) for r, f in rows if of.items() <= (DEFAULTS | r).items()]
        if best:
            row, f = max(best, key=lambda x: x[1]["ratio_rounds"]["median"])
            drafter = row["drafter"]
            what = f"ratio in rounds of the best table (`{drafter}`), edits, grown, {name}, T = 0"
            lines.append((what, "at least 2.5", cells.ratio(f["ratio_rounds"])))
    return cells.table(
        {
            "what": lambda what, aim, found: what,
            "aim": lambda what, aim, found: aim,
            "measured": lambda what, aim, found: found,
        },
        lines,
    )


def _real_text(rows, count: str, note: str | None = None) -> str:
    if note is None:
        note = _note(rows, count)
    target = {}
    if any(row.get("grown") or row.get("quantize") for row, _ in rows):
        target = {"target": _target}
    kinds = {}
    if any("workload" in row for row, _ in rows):
        kinds = {"text": lambda r, f: r.get("workload", "completion")}
    planned = {}
    if any("planned" in figures for _, figures in rows):
        planned = {"rounds by `plan`": lambda r, f: _planned(f.get("planned"))}
    found = cells.table(
        {
            **kinds,
            **target,
            "T": lambda r, f: r["temperature"],
            "batch": lambda r, f: r.get("batch", 1),
            "drafter, tokens a round": cells.drafter,
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "accepted": lambda r, f: cells.share(f["acceptance"]),
            "plain, tokens/s": lambda r, f: cells.number(f["plain_tokens_per_second_rounds"]),
            "speculative, tokens/s": lambda r, f: cells.number(f["tokens_per_second_rounds"]),
            "ratio, rounds": lambda r, f: cells.ratio(f["ratio_rounds"]),
            "ratio, whole run": lambda r, f: cells.ratio(f["ratio_whole"]),
            **planned,
            "speculation": lambda r, f: cells.verdict(f["ratio_rounds"]),
            "repeated 4-grams": lambda r, f: cells.share(f["repeated_4grams"]),
            "same text": lambda r, f: f["identical"] or "T > 0",
        },
        rows,
    )
    return f"{note}\n\n{found}" if note else found


def _planned(said: dict | None) -> str:
    """What the planner says of the rounds, from few prompts."""
    if said is None:
        return ""
    return f"{said['ratio_rounds']:.2f}" + ("" if said["predicted"] else ", as it ran")


def _target(row, figures) -> str:
    del figures
    if row.get("grown"):
        return "grown to 100M"
    return ", ".join(filter(None, ("embedded", row.get("quantize"))))


def _note(rows, count: str) -> str:
    often = sorted({row.get("repetitions", REPETITIONS) for row, _ in rows})
    times = " or ".join({1: "once", 2: "twice"}.get(n, f"{n} times") for n in often)
    note = (
        f"The embedded, trained models on {count}. Each batch is run {times} and its fastest "
        "run counts; intervals are over the batches."
    )
    if any(row.get("grown") for row, _ in rows):
        note += (
            " *Grown* models have 100M float32 weights and write the same text as the embedded "
            "ones, and so do their heads: texts, drafts and τ are those of the small models, the "
            "time is that of a target whose weights come from memory (`benchmarks/grown.py`)."
        )
    if any("workload" in row for row, _ in rows):
        note += (
            " The texts: *edits*, a piece of a file and the beginning of the same piece with one "
            "name changed; *retrieval*, a piece of a file and a question whose answer quotes it; "
            "*completion*, the held-out prompts; *open*, the beginning of a docstring "
            "(`benchmarks/workloads.py`). `rest` is `suffix` with a datastore of the files on "
            "which the target was trained."
        )
    return note


def peers(rows) -> str:
    parts = []
    for row, f in rows:
        versions = ", ".join(f"{k} {v}" for k, v in f["versions"].items())
        parts.append(
            f"Pair {row['pair']}{' (synthetic)' if f['synthetic'] else ' (trained)'}, "
            f"{row['num_draft']} tokens a round, whole requests of {row.get('new', 64)} tokens, "
            f"batch 1, {f['threads']} thread(s) for each library, run in turn ({versions}). *Over "
            "peer* compares specjax with the same method of the other library; the plain decoding "
            "of the other library is its plain `generate`."
        )
        parts.append(
            cells.table(
                {
                    "method": lambda m, x: f"specjax {m}" if "peer" in x else m,
                    "tokens/s": lambda m, x: cells.rate(x["tokens_per_second"]),
                    "τ": lambda m, x: f"{x['tau']:.2f}",
                    "a round, ms": lambda m, x: cells.milliseconds(x["seconds_per_round"]),
                    "first token, ms": lambda m, x: (
                        cells.milliseconds(x["first_token"]) if x["first_token"] else "–"
                    ),
                    "over its own plain": lambda m, x: cells.ratio(x["over_own_plain"]),
                    "over peer, whole": lambda m, x: cells.ratio(x.get("over_peer")),
                    "over peer, a round": lambda m, x: cells.ratio(x.get("round_over_peer")),
                    "text as specjax plain": lambda m, x: cells.share(x["same_text"]),
                },
                f["methods"].items(),
            )
        )
    return "\n\n".join(parts)
