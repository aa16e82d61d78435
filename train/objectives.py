"""Recipe ``objectives``: trains the same drafter by each objective, over several seeds.

Every variant is a run of the recipe ``distill`` with the same steps, tokens, rates and shapes;
``VARIANTS`` holds the differences. The measure is acceptance on the target's continuations of
held-out prompts: ``greedy_match`` for greedy ones (T = 0), ``sum min(p, q)`` for sampled ones
(T = 1). A run that was stopped is resumed; the table is written anew after each run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import jax

from specjax._internal import compile_cache

from . import checkpoint, distill, metrics, model, samples, tokenizer
from .config import ConfigError, flatten
from .evaluate import make_evaluate
from .loop import TrainingTask, estimate, fit
from .teacher import load_teacher

# by name: the text (of the corpus, or by the target), and the fields of the recipe ``distill``
VARIANTS = {
    "ce": ("corpus", {"data_share": 1.0}),
    "fkl": ("corpus", {"divergence": "fkl"}),
    "tvd": ("corpus", {"divergence": "tvd"}),
    "lk": ("corpus", {"divergence": "lk"}),
    "jsd": ("corpus", {"divergence": "jsd"}),
    "rkl": ("corpus", {"divergence": "rkl"}),
    "nla": ("corpus", {"divergence": "nla"}),
    "kl_tv": ("corpus", {"divergence": "kl_tv"}),
    "fkl-top16": ("corpus", {"divergence": "fkl", "top_k": 16}),
    "seq-kd-target": ("target", {"data_share": 1.0}),
    "fkl-target": ("target", {"divergence": "fkl"}),
    "fkl-on-policy": ("corpus", {"divergence": "fkl", "on_policy": 0.25}),
}
BASELINE = "ce"
MEASURES = {  # of a run's last evaluation, by the names of its ``eval_samples``
    "greedy": ("greedy/greedy_match", "greedy/greedy_tau"),
    "sampled": ("sampled/acceptance", "sampled/tau"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectivesConfig:
    """The objectives to compare.

    The section ``distill`` holds the settings that all runs share; its ``eval_samples`` are two
    files, named ``greedy.npz`` and ``sampled.npz``.
    """

    distill: distill.DistillConfig
    corpus: str = "runs/objectives_corpus"  # a folder of the recipe `features`, over the corpus
    target: str = "runs/objectives_target"  # a folder of as many rows that the target wrote
    seeds: tuple[int, ...] = (0, 1, 2)  # each variant is trained once with each seed
    variants: tuple[str, ...] = ()  # names of objectives, with the baseline; []: all
    output: str = "runs/objectives"  # the folder of rows.jsonl and table.md

    def __post_init__(self):
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or (self.variants and BASELINE not in self.variants):
            raise ConfigError(
                f"variants={list(self.variants)}; accepted: {BASELINE} and any of "
                f"{', '.join(VARIANTS)}"
            )
        if not self.seeds:
            raise ConfigError("seeds=[]; accepted: at least one")
        names = sorted(Path(path).stem for path in self.distill.eval_samples)
        if names != sorted(MEASURES):
            raise ConfigError(
                f"distill.eval_samples={list(self.distill.eval_samples)}; accepted: two files of "
                "`regenerate`, greedy.npz and sampled.npz"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        return self.variants or tuple(VARIANTS)


Config = ObjectivesConfig


def variant(config: ObjectivesConfig, name: str, seed: int) -> distill.DistillConfig:
    """Returns the run of one objective and seed, which decides weights and the order of rows."""
    text, fields = VARIANTS[name]
    common = config.distill
    folder = str(Path(config.output) / f"{name}-{seed}")
    return dataclasses.replace(
        common,
        features=getattr(config, text),
        data=dataclasses.replace(common.data, seed=seed),
        run=dataclasses.replace(common.run, folder=folder, seed=seed),
        **fields,
    )


def measured(run: distill.DistillConfig) -> dict | None:
    """Returns the last evaluation of a run; None if the run is not finished."""
    rows = metrics.read(Path(run.run.folder) / "log.jsonl")
    found = [row for row in rows if row["step"] == run.run.steps and "greedy/tau" in row]
    return found[-1] if found else None


def spread(values: list[float]) -> str:
    """Formats values as ``mean [least, greatest]``."""
    return f"{statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def table(rows: list[dict]) -> str:
    """Returns a Markdown table: mean and range over seeds, and the gain over the baseline."""
    by_name: dict[str, dict[int, dict]] = {}
    for row in rows:
        by_name.setdefault(row["variant"], {})[row["seed"]] = row
    lines = [
        "| objective | text | seeds | accepted, T = 0 | gain | τ | accepted, T = 1 | gain | τ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in by_name.items():
        cells = [name, VARIANTS[name][0], str(len(runs))]
        for share, tau in MEASURES.values():
            base = {seed: row[share] for seed, row in by_name.get(BASELINE, {}).items()}
            gains = [row[share] / base[seed] - 1 for seed, row in runs.items() if base.get(seed)]
            cells.append(spread([row[share] for row in runs.values()]))
            cells.append(f"{statistics.mean(gains):+.1%}" if gains else "")
            cells.append(f"{statistics.mean(row[tau] for row in runs.values()):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def prepared(config: ObjectivesConfig):
    """Prepares what all runs share; returns ``make_task(run) -> loop.TrainingTask``."""
    common = config.distill
    vocabulary = tokenizer.load(common.data.tokenizer)
    teacher = load_teacher(common.teacher, vocabulary, common.data.length)
    end_of_text = tokenizer.end_of_text(common.data.tokenizer, vocabulary, common.data.end_of_text)
    known, of = teacher.config.vocab_size, samples.fingerprints(teacher, vocabulary)
    shape = common.model.decoder(known, end_of_text)
    pair = distill.Pair(shape, teacher.config, end_of_text)
    states = jax.jit(pair.teacher_states)  # for the rows to measure on, computed once
    read = samples.heldout_batches(common.eval_samples, of, known, common.data)
    sets = {
        prefix: [
            (tokens, weight, states(teacher.params, tokens[:, :-1])) for tokens, weight in batches
        ]
        for prefix, batches in read.items()
    }
    evaluate = make_evaluate(distill.make_measure(pair, chunk=common.chunk), sets)

    def make_task(own: distill.DistillConfig) -> TrainingTask:
        start = model.create(shape, own.run.seed)[1]
        return TrainingTask(
            loss=distill.make_loss(pair, own),
            params=start,
            batches=distill.training_batches(own, teacher, vocabulary),
            evaluate=evaluate,
            frozen=teacher.params,
            measures=lambda: evaluate.names(start, teacher.params),
        )

    return make_task


def run(config: ObjectivesConfig, *, dry_run: bool = False) -> None:
    """Runs all variants that are not finished, seed by seed, and writes rows and table."""
    make_task = prepared(config)
    if not dry_run:
        compile_cache.enable()  # seeds share their programs
    output, rows = Path(config.output), []
    for seed in config.seeds:
        for name in config.chosen:
            own = variant(config, name, seed)
            if dry_run:
                estimate(make_task(own), own.optimizer, own.run, name)
                continue
            checkpoint.record_config(Path(own.run.folder), flatten(own))  # or refuses what is there
            if measured(own) is None:
                print(f"--- {name}, seed {seed}", flush=True)
                fit(make_task(own), flatten(own), own.optimizer, own.run)
            found = {key: value for key, value in measured(own).items() if "/" in key}
            rows.append({"variant": name, "seed": seed, **found})
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (output / "rows.jsonl").write_text(lines, encoding="utf-8")
            (output / "table.md").write_text(table(rows), encoding="utf-8")
        if dry_run:
            print(f"and as much for each of {len(config.seeds)} seeds")
            return
    print(table(rows))
