"""The results of a suite for readers: ``results.json``, tables in ``README.md``, plots."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from .tables import TABLES, cells

UNLISTED = {"agreement", "repetitions", "kind", "parts", "new", "ways", "drafters", "caches"}
READING = """\
Each ratio compares speculative with plain decoding of the same target in the same run; above 1
speculation is faster. Both are compiled by this package and run in turn, pair by pair. The interval
covers about 95 %: over the repeated runs of one text, or over the prompts for real text. τ, the
acceptance length, is the number of tokens emitted per round; it is 1.00 where a
drafter found nothing to propose. Rates are medians with their quartiles. *Synthetic* means random
weights and a drafter whose agreement with the target was set and not trained: speed and τ are real,
the text is not."""


def label(row: dict) -> str:
    """A row's kind and settings in a few words."""
    settings = [f"{k} {v}" for k, v in row.items() if k not in UNLISTED]
    return " · ".join([row["kind"], *settings])


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
        "decode": lambda f: f"τ {f['tau']:.2f}, ratio {cells.ratio(f['ratio_rounds'])}",
        "drafters": lambda f: ", ".join(
            f"{way['drafter']} {x['ratio_whole']['median']:.2f}"
            for way, x in zip(row["ways"], f["ways"], strict=True)
        ),
        "tables": lambda f: ", ".join(
            f"{way['drafter'].partition(':')[0]} τ {x['tau']:.2f}"
            for way, x in zip(row["ways"], f["ways"], strict=True)
        ),
        "quality": lambda f: ", ".join(
            f"{one['setting']} τ {one['tau']:.2f} log p {one['loglik']:.2f}" for one in f["points"]
        ),
        "part memory": lambda f: ", ".join(f"{n} {x:.3f}" for n, x in f["over"].items()),
        "resumed pass": lambda f: ", ".join(
            f"E {p['exit']}, N {p['nodes']}: {p['over_share']['median']:.2f}" for p in f["points"]
        ),
        "skip search": lambda f: (
            f"predicted {f['predicted']:.2f}, measured {cells.ratio(f['measured']['ratio_rounds'])}"
        ),
        "early exits": lambda f: ", ".join(
            f"E {w['exit']}, {w['num_draft']}: τ {w['tau']:.2f}, "
            f"ratio {w['ratio_rounds']['median']:.2f}"
            for w in f["ways"]
        ),
        "schedules": lambda f: ", ".join(
            f"{p['method']} {p['ticks']} of {p['plain_ticks']} ticks" for p in f["points"]
        ),
        "drafting": lambda f: f"{cells.share(f['share'])} of a plain step",
        "datastore": lambda f: (
            f"opens in {1e3 * f['opened']:.1f} ms, {f['resident'] / 1e6:.0f} MB resident, "
            f"{cells.share(f['share_asked'])} of a plain step"
        ),
        "requests": lambda f: ", ".join(
            f"{name}: τ {f[name]['tau']:.2f}" for name in ("alone", "first", "second")
        ),
        "long rounds": lambda f: ", ".join(
            f"{way['drafter']} {cells.ratio(way['ratio_rounds'])}" for way in f["ways"]
        ),
        "drafting cost": lambda f: ", ".join(
            f"{name} {cells.ratio(x)}" for name, x in f["over_first"].items()
        ),
        "budgets": lambda f: ", ".join(
            f"{x['cache']} {x['entries'] or 'all'}: τ {x['0.0']['tau']:.2f}" for x in f["points"]
        ),
        "serving": lambda f: f"τ {f['tau']:.2f}, ratio {cells.ratio(f['ratio'])}",
        "regeneration": lambda f: f"τ {f['tau']:.2f}, ratio {cells.ratio(f['ratio'])}",
        "peer": lambda f: ", ".join(
            f"{m} {x['tokens_per_second']['median']:.1f}/s" for m, x in f["methods"].items()
        ),
        "cpu peers": lambda f: ", ".join(
            f"{n} {x['methods']['plain']['tokens_per_second']['median']:.1f}/s"
            for n, x in f["engines"].items()
        ),
        "training": lambda f: (
            f"{f['bytes_per_token'] / 1e3:.1f} kB a token"
            if "bytes_per_token" in f
            else f"{cells.ratio(f['over_parts'])} of its parts"
        ),
        "long context": lambda f: ", ".join(
            f"{c}: τ {f['all'][c]['tau']:.2f}, {f['window'][c]['tau']:.2f}" for c in f["all"]
        ),
    }
    return say.get(row["kind"], lambda f: "done")(figures)


def write(folder: Path, header: dict, outcomes: list[dict]) -> None:
    """Writes all files of a suite anew from its measured rows.

    Args:
      folder: the folder of the results.
      header: where and with what the suite ran, see ``runner.where``.
      outcomes: the rows and their results, each
        ``{"row": ..., "figures" or "skipped" or "failed": ...}``.
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
            "**A rehearsal in miniature: it shows that the suite runs. Its figures mean nothing.**"
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
            "There are no plots, since matplotlib is not installed on the machine of this run. "
            "Where it is installed, "
            f"`python -m benchmarks {name} --redraw` draws them from the rows."
        )
    parts += [f"![{Path(file).stem}]({file})" for file in drawn or ()]
    missing = [o for o in outcomes if "figures" not in o]
    if missing:
        lines = [f"- {label(o['row'])}: {o.get('skipped') or o.get('failed')}" for o in missing]
        parts.append("## Not measured\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _argument(value) -> str:
    return shlex.join(map(str, value if isinstance(value, list | tuple) else [value]))
