"""The tables of the kind of row ``cpu peers``."""

from __future__ import annotations

from . import cells


def cpu_peers(rows) -> str:
    """For each pair and precision: what every engine took, and ours against the fastest peer."""
    parts = []
    for row, f in rows:
        pair = f"{row['pair']}{' (synthetic)' if f['synthetic'] else ''}"
        read = ", checkpoints in bfloat16" if row.get("checkpoint") == "bfloat16" else ""
        parts.append(
            f"### {pair}, {row['precision']}{read}\n\n{f['threads']} threads, "
            f"{row['num_draft']} drafts a round. {_load(f)}"
        )
        parts.append(_engines(f))
        parts.append(_against(f["against"]))
        schemes = [f"- {n} {x['version']}: {x['scheme']}" for n, x in f["engines"].items()]
        schemes += [f"- {name} was not measured: {why}" for name, why in f["lacking"].items()]
        parts.append("\n".join(schemes))
    return "\n\n".join(parts)


def _load(f: dict) -> str:
    if not f["quiet"]:
        return "**Other programs may have run beside it: these figures say nothing about speed.**"
    return f"Nothing else ran; {f['disturbed']} turns in which others ran were measured again."


def _engines(f: dict) -> str:
    nodes = list(dict.fromkeys(n for x in f["engines"].values() for n in x.get("passes", {})))
    reads = list(
        dict.fromkeys(n for x in f["engines"].values() for n in x.get("read_tokens_per_second", {}))
    )
    columns = {
        "engine": lambda name, x: name,
        "plain, ms a token": lambda name, x: _round(x, "plain"),
        "draft model, ms a round": lambda name, x: _round(x, "draft"),
        "lookup, ms a round": lambda name, x: _round(x, "lookup"),
        "tokens/s: plain, draft model, lookup": lambda name, x: _three(x, _rate),
        "τ: draft model, lookup": lambda name, x: _three(x, _tau, ("draft", "lookup")),
        f"pass over {', '.join(map(str, nodes))} tokens, ms": lambda name, x: ", ".join(
            cells.milliseconds(x["passes"][n]) if n in x.get("passes", {}) else "–" for n in nodes
        ),
        f"reading {', '.join(map(str, reads))} tokens, tokens/s": lambda name, x: ", ".join(
            cells.number(x["read_tokens_per_second"][n]["median"])
            if n in x.get("read_tokens_per_second", {})
            else "–"
            for n in reads
        ),
        "first token, ms": lambda name, x: cells.milliseconds(x["first_token"]),
        "loading, s": lambda name, x: cells.number(x["load_seconds"]),
        "memory, MB (most)": lambda name, x: (
            f"{x['memory']['resident'] / 1e6:,.0f} ({x['memory']['peak'] / 1e6:,.0f})"
        ),
        "tokens as ours: plain, draft model, lookup": lambda name, x: _three(x, _same),
    }
    return cells.table(columns, f["engines"].items())


def _against(against: dict) -> str:
    columns = {
        "specjax against the fastest peer": lambda name, x: name,
        "peer": lambda name, x: x["peer"],
        "times as fast": lambda name, x: cells.ratio(x["ratio"]),
    }
    return cells.table(columns, against.items())


def _round(x: dict, method: str) -> str:
    seconds = x["methods"].get(method, {}).get("seconds_per_round")
    return "–" if seconds is None else cells.milliseconds(seconds)


def _three(x: dict, cell, methods=("plain", "draft", "lookup")) -> str:
    return ", ".join(cell(x["methods"][m]) if m in x["methods"] else "–" for m in methods)


def _rate(own: dict) -> str:
    return cells.number(own["tokens_per_second"]["median"])


def _tau(own: dict) -> str:
    return "–" if own["tau"] is None else f"{own['tau']:.2f}"


def _same(own: dict) -> str:
    shown = cells.share(own["same_as_ours"])
    plain = own["same_as_plain"]
    return shown if plain == 1 else f"{shown} (its own plain text {cells.share(plain)})"
