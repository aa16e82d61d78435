"""Recipe ``report``: what a run came to, as one page that needs nothing else, ``report.html``.

Training draws it when it ends; this recipe draws it again, of an interrupted run too: from
``log.jsonl``, ``config.json`` and ``measured.json`` in the run's folder. What was not measured
is said to be so.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from specjax.checkpoints import HeadLM
from specjax.models.lm import LM

from . import card, charts, measured
from .config import ConfigError
from .decoding import Prompts
from .metrics import LOG, read
from .progress import clock
from .scale import by_first

PAGE, PICTURE = "report.html", "loss.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """``folder``: of a run."""

    folder: str


Config = DrawConfig


def run(config: DrawConfig, *, dry_run: bool = False) -> None:
    """Draws the report of a run again. ``dry_run``: says of what."""
    folder = Path(config.folder)
    rows = read(folder / LOG)
    if not rows:
        raise ConfigError(f"folder={config.folder!r} holds no run: there is no {LOG} with steps")
    print(f"{len(rows):,} rows of {folder / LOG}, up to step {rows[-1]['step']:,}")
    if not dry_run:
        draw(folder)


@by_first
def finish(
    config,
    export: card.Export,
    lm: LM | None = None,
    loaded: LM | HeadLM | None = None,
    sets: Mapping[str, Prompts] | None = None,
    num_draft: int | None = None,
) -> None:
    """What follows an export: its measures, if it is a drafter, its card, the report of the run.

    Args:
      config: of the recipe. ``lm``: the target of a drafter. ``sets``: ``decoding.prompt_sets``.
      loaded: what was exported, loaded again. ``num_draft``: see ``measured.measure``.
    """
    folder, facts = Path(config.run.folder), {}
    if sets:
        how = config.decoding, config.report, num_draft
        facts = measured.measure(folder, lm, loaded, sets, *how)
    card.write(export, config.card, facts)
    draw(folder)


def draw(folder: Path) -> Path:
    """Writes ``report.html`` and, of its curves alone, ``loss.png``."""
    rows = read(folder / LOG)
    panels = charts.panels(rows)
    charts.picture(panels, folder.name, folder / PICTURE)
    page = folder / PAGE
    temporary = page.with_suffix(".tmp")
    temporary.write_text(html(folder, rows, panels), encoding="utf-8")
    temporary.replace(page)
    print(f"report: {page}")
    return page


def html(folder: Path, rows: list[dict], panels: list[charts.Panel]) -> str:
    """The page, with its pictures inside."""
    import jinja2

    facts, file = measured.read(folder), folder / "config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    figures = [
        (panel.title, charts.svg(lambda axes, p=panel: charts.plot(axes, p), panel.title))
        for panel in panels
    ]
    domains, bars = facts.get("domains") or {}, None
    if domains:
        values = {name: (d["tau"], d["low"], d["high"]) for name, d in domains.items()}
        label = "tokens a pass of the target (tau); lines: 95 % over the prompts"
        size = 7.2, 0.9 + 0.4 * len(values)
        bars = charts.svg(lambda axes: charts.bars(axes, values, label), "domains", size)
    text = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(text).render(
        name=folder.name,
        facts=facts,
        domains=domains,
        bars=bars,
        candidates=ways(facts.get("plan")),
        tiles=tiles(rows, settings, facts),
        figures=figures,
        settings={name: json.dumps(value) for name, value in settings.items()},
    )


def ways(plan: dict | None) -> list[dict]:
    """The planner's candidates, plain decoding last."""
    found = (plan or {}).get("candidates", [])
    return sorted(found, key=lambda c: (c["drafter"] == "plain", c["num_draft"]))


def tiles(rows: list[dict], settings: dict, facts: dict) -> list[tuple[str, str, str]]:
    """``(what, figure, in words)`` of what one looks at first; only what is known."""
    found, steps = [], max(row["step"] for row in rows) if rows else 0
    for name, domain in (facts.get("domains") or {}).items():
        said = f"{name}, {domain['prompts']} prompts, greedy"
        found.append(("tau", f"{domain['tau']:.2f}", said))
        break  # the others stand in the table
    best = [c for c in ways(facts.get("plan")) if c["drafter"] != "plain"]
    if best:
        best = max(best, key=lambda c: c["ratio"])
        count = best["num_draft"]
        said = f"predicted on this machine, {count} draft{'s' * (count > 1)} a round"
        found.append(("speed-up", f"{best['ratio']:.2f} ×", said))
    losses = [row["heldout_loss"] for row in rows if "heldout_loss" in row]
    if losses:
        found.append(("loss", f"{losses[-1]:.3f}", "nats a token, held out, at the end"))
    asked = settings.get("run.steps")
    found.append(("steps", f"{steps:,}", f"of {asked:,} asked for" if asked else "done"))
    for name, label, show in (
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ("utilisation", "utilisation", "{:.0%}"),
        ("data_wait", "waiting for data", "{:.4f} s"),
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            words = {"utilisation": "of the rate of a matrix product measured in the same run"}
            said = words.get(name, "median of the steps")
            found.append((label, show.format(statistics.median(values)).replace("%", " %"), said))
    spent = [row["seconds"] for row in rows if "seconds" in row]
    if spent:
        found.append(("time", clock(spent[-1]), "of the last session"))
    return found
