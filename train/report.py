"""Recipe ``report``: draws the report of a run, the self-contained page ``report.html``.

Training draws the report when it ends. This recipe draws it again, also for an interrupted run,
from ``log.jsonl``, ``config.json`` and ``measured.json`` in the folder of the run. The page says
what was not measured.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from specjax.checkpoints import HeadLM
from specjax.models.lm import LM

from . import card, charts, measured
from .checkpoint import recorded
from .config import ConfigError
from .decoding import Prompts
from .metrics import LOG, read
from .progress import clock
from .scale import by_first

PAGE, PICTURE = "report.html", "loss.png"
MEANS = ("mtp", "mtp_heads", "spire")  # recipes whose loss is the weighted mean over heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """The run to draw."""

    folder: str  # run.folder of the run


Config = DrawConfig


def run(config: DrawConfig, *, dry_run: bool = False) -> None:
    """Draws the report of a run again, or with ``dry_run`` prints what it would be drawn from."""
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
    """Measures an exported drafter, and writes the model card and the report of the run.

    Args:
      config: the configuration of the recipe.
      export: what was exported.
      lm: the target of the drafter; None: the export is a target itself.
      loaded: the exported drafter, loaded again.
      sets: held-out prompts, see ``decoding.prompt_sets``.
      num_draft: see ``measured.measure``.
    """
    folder, facts = Path(config.run.folder), {}
    if sets:
        how = config.decoding, config.report, num_draft
        facts = measured.measure(folder, lm, loaded, sets, *how)
    card.write(export, config.card, facts)
    draw(folder)


def draw(folder: Path) -> Path:
    """Writes ``report.html`` and, of its curves alone, ``loss.png``.

    Raises:
      ConfigError: the log has no measure to draw, or the configuration of the run is damaged.
    """
    rows = read(folder / LOG)
    settings = recorded(folder, "mend that file, or remove it and have a report without settings")
    unit, weighting = loss_unit(settings).partition(",")[0], settings.get("weighting", "decay")
    if weighting != "decay":
        unit += f"; in training by weighting={weighting}"
    panels = charts.panels(rows, unit)
    if not panels:
        raise ConfigError(f"{folder / LOG} has no measure to draw: go on with that run first")
    charts.picture(panels, folder.name, folder / PICTURE)
    page = folder / PAGE
    temporary = page.with_suffix(".tmp")
    temporary.write_text(html(folder, rows, settings, panels), encoding="utf-8")
    temporary.replace(page)
    print(f"report: {page}")
    return page


def html(folder: Path, rows: list[dict], settings: dict, panels: list[charts.Panel]) -> str:
    """The page as HTML, its pictures included."""
    import jinja2

    facts = measured.read(folder)
    figures = [
        (panel.title, charts.svg(lambda axes, p=panel: charts.plot(axes, p), panel.title))
        for panel in panels
    ]
    domains, bars = facts.get("domains") or {}, None
    if domains:
        values = {name: (d["tau"], d["low"], d["high"]) for name, d in domains.items()}
        label = "tokens per round (τ); lines: 95 % intervals over the prompts"
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
    """Returns the planner's candidates, with plain decoding last."""
    found = (plan or {}).get("candidates", [])
    return sorted(found, key=lambda c: (c["drafter"] == "plain", c["num_draft"]))


class Tile(NamedTuple):
    """One figure at the top of the page.

    Attributes:
      label: what the figure is.
      figure: the figure with its unit.
      words: what the figure refers to.
      mood: the CSS class of the tile: ``bad``, ``unclear`` or empty.
    """

    label: str
    figure: str
    words: str
    mood: str = ""


def tiles(rows: list[dict], settings: dict, facts: dict) -> list[Tile]:
    """Returns the tiles of the most important figures, as far as they are known."""
    found, steps = [], max(row["step"] for row in rows) if rows else 0
    for name, domain in (facts.get("domains") or {}).items():
        words = f"tokens per round; {name}, {domain['prompts']} prompts, greedy"
        found.append(Tile("acceptance length τ", f"{domain['tau']:.2f}", words))
        break  # the others are in the table
    best = [c for c in ways(facts.get("plan")) if c["drafter"] != "plain"]
    if best:
        found.append(_speed(max(best, key=lambda c: c["ratio"])))
    losses = [row["heldout_loss"] for row in rows if "heldout_loss" in row]
    if losses:
        words = f"held-out text, at the end; {loss_unit(settings)}"
        found.append(Tile("loss", f"{losses[-1]:.3f}", words))
    asked = settings.get("run.steps")
    words = f"of {asked:,} asked for" if asked else "done"
    found.append(Tile("steps", f"{steps:,}", words))
    for name, label, show in (
        ("tokens_per_second", "tokens/s", "{:,.0f}"),
        ("utilisation", "utilisation", "{:.0%}"),
        ("data_wait", "waiting for data", "{:.4f} s"),
    ):
        values = [row[name] for row in rows if name in row]
        if values:
            words = {"utilisation": "of the rate of a matrix product measured in the same run"}
            figure = show.format(statistics.median(values)).replace("%", " %")
            found.append(Tile(label, figure, words.get(name, "median of the steps")))
    spent = [row["seconds"] for row in rows if "seconds" in row]
    if spent:
        found.append(Tile("time", clock(spent[-1]), "of the last session"))
    return found


def _speed(best: dict) -> Tile:
    """The predicted speed of the best candidate, which may be a loss."""
    count, ratio = best["num_draft"], best["ratio"]
    words = f"predicted on this machine, {count} draft{'s' * (count > 1)} per round"
    low, high = best.get("interval") or (ratio, ratio)
    if ratio < 1:
        label, mood = "slower than plain decoding", "bad"
        words += ": do not use this drafter here, use plain decoding"
    elif low <= 1 and high > low:
        label, mood = "speed-up, not certain", "unclear"
        words += f"; the 95 % interval [{low:.2f}, {high:.2f}] includes no speed-up"
    else:
        label, mood = "speed-up over plain decoding", ""
    return Tile(label, f"{ratio:.2f} ×", words, mood)


def loss_unit(settings: dict) -> str:
    """Describes the unit of the held-out loss, from the flattened configuration of its run."""
    heads, decay = settings.get("num_heads"), settings.get("decay")
    decay = 1 if settings.get("sample_head") else decay
    if "decay_length" in settings:
        return f"a weighted mean of nats, over {heads} drafted positions"
    if heads is None or decay is None:
        return "nats per token"
    weight = f", head k weighted by {decay:g}^k" if decay != 1 else ", all weighted alike"
    is_mean = settings.get("recipe") in MEANS
    what = "nats less the accepted share" if settings.get("acceptance_share") else "nats"
    return f"a weighted {'mean' if is_mean else 'sum'} of {what}, over {heads} heads{weight}"
