"""Recipe ``depth_width``: draft models of one size, from shallow and wide to deep and narrow.

For each of ``sizes`` and ``depths`` a shape with the same number of parameters is trained by the
recipe ``distill`` with each of ``seeds``, on the same tokens. Then all of them and plain decoding
decode the same prompts in turn. The recipe writes ``table.md`` (acceptance, cost, measured speed-up
and the speed-up that the calculator computes from acceptance and costs), ``picture.png`` (speed
against the latency of a drafted token, and against acceptance), with intervals over the seeds, and
``findings.md``: how much faster each depth is than the deepest, and with what the speed goes along.

Every model has a folder of its own in ``output``, and every timed run is stored at once, so that
the same command resumes a study that was stopped. Timing needs an idle machine: train first
with ``turns=0``, and give the turns when the machine is free.

References: Decoding Speculative Decoding, 2402.01528: throughput goes along with the latency of the
draft model, and that with its depth, more than with its accuracy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import specjax
from specjax._internal import compile_cache
from specjax.analysis import timing
from specjax.models.headers import weight_files
from specjax.models.lm import LM
from specjax.models.model_folder import fingerprint
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare
from specjax.text.task import GenerationTask

from . import checkpoint, decoding, depth_width_report, distill, equal_size, measured, model
from .config import ConfigError, resolved
from .journal import Journal

PLAIN = "plain"
MODEL, TIMES = "model", "times.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthWidthConfig:
    """The grid, and how its models are timed.

    The section ``distill`` holds the settings that all runs share; its ``model`` says how many
    parameters a model has, and how wide its heads and its feed-forward layers are about.
    """

    distill: distill.DistillConfig
    depths: tuple[int, ...] = (1, 2, 4, 8)  # numbers of layers
    sizes: tuple[float, ...] = (1.0,)  # numbers of parameters, in those of distill.model
    seeds: tuple[int, ...] = (0, 1, 2)  # each shape is trained once with each seed
    tolerance: float = 0.01  # the greatest relative difference of numbers of parameters
    num_drafts: tuple[int, ...] = (1, 2, 4)  # lengths of drafts that are timed, each at most 4
    timed_prompts: int = 4  # prompts of distill.decoding that are decoded in each turn
    turns: int = 9  # turns in which all models are timed; 0: none is
    output: str = "runs/depth_width"  # the folder of the study

    def __post_init__(self):
        for name in ("depths", "sizes", "seeds", "num_drafts"):
            values = getattr(self, name)
            if not values or len({*values}) < len(values):
                raise ConfigError(f"{name}={list(values)}; accepted: at least one, each once")
            if name != "seeds" and not min(values) > 0:
                raise ConfigError(f"{name}={list(values)}; accepted: numbers above 0")
        if max(self.num_drafts) > distill.NUM_DRAFT:
            raise ConfigError(
                f"num_drafts={list(self.num_drafts)}; accepted: up to {distill.NUM_DRAFT}, where "
                "acceptance is measured"
            )
        if not 0 < self.tolerance < 1:
            raise ConfigError(f"tolerance={self.tolerance}; accepted: above 0, below 1")
        most = self.distill.decoding.num_prompts
        if not 1 <= self.timed_prompts <= most:
            raise ConfigError(
                f"timed_prompts={self.timed_prompts}; accepted: 1 to distill.decoding.num_prompts="
                f"{most}"
            )
        if self.turns < 0:
            raise ConfigError(f"turns={self.turns}; accepted: at least 0")
        own = {"data.seed": "seeds", "run.seed": "seeds", "run.folder": "output"}
        own["report.plan_prompts"] = "turns"
        for name, instead in own.items():
            section, field = name.split(".")
            part = getattr(self.distill, section)
            if getattr(part, field) != getattr(type(part)(), field):
                raise ConfigError(
                    f"distill.{name}={getattr(part, field)!r}: in a study {instead} says that; "
                    "leave it out"
                )
        if self.distill.init:
            raise ConfigError(
                f"distill.init={self.distill.init!r}: the shapes differ, so all models begin with "
                "random weights; leave it out"
            )


Config = DepthWidthConfig


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model of the study.

    Attributes:
      size: its number of parameters, in those of ``distill.model``.
      seed: of its weights and of the order of its rows.
      config: its run of the recipe ``distill``.
    """

    size: float
    seed: int
    config: distill.DistillConfig

    @property
    def shape(self) -> model.ModelConfig:
        return self.config.model

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_trained(self) -> bool:
        """Whether the model was trained, exported and measured before."""
        checkpoint.check_config(self.folder, resolved(self.config))
        return checkpoint.is_done(self.folder, resolved(self.config))


def cells(config: DepthWidthConfig, vocab_size: int) -> list[Cell]:
    """Returns all models, seed by seed, so that a study that is stopped has whole columns.

    Raises:
      ConfigError: a depth has no shape of that size.
    """
    common, found = config.distill, []
    for seed in config.seeds:
        for size in config.sizes:
            weights = round(size * equal_size.num_weights(common.model, vocab_size))
            for depth in config.depths:
                shape = equal_size.of_depth(
                    common.model, depth, weights, vocab_size, config.tolerance
                )
                folder = f"{config.output}/{depth}x{shape.hidden_size}-{size:g}-{seed}"
                own = dataclasses.replace(
                    common,
                    model=shape,
                    data=dataclasses.replace(common.data, seed=seed),
                    run=dataclasses.replace(common.run, folder=folder, seed=seed),
                    report=dataclasses.replace(common.report, plan_prompts=0),  # timed in turn
                )
                found.append(Cell(size, seed, own))
    return found


class Timer:
    """Times plain decoding and all models in turn.

    Args:
      config: the study.
      lm: the target.
      models: the trained models by the name of their cell.
      prompts: int32 ``[n, T]``, prompts of one length.
      journal: what was timed before, which is not timed again.
    """

    def __init__(
        self, config: DepthWidthConfig, lm: LM, models: dict[str, LM], prompts, journal: Journal
    ):
        self.config, self.lm, self.models, self.journal = config, lm, models, journal
        self.prompts = [[int(token) for token in row] for row in prompts[: config.timed_prompts]]
        self.new = config.distill.decoding.new_tokens
        self.known = {(row["turn"], row["model"], row["drafts"]) for row in journal.rows}

    def ways(self) -> list[tuple[str, int]]:
        """The names of models with their numbers of drafts, plain decoding (0) first."""
        named = [(name, drafts) for name in self.models for drafts in self.config.num_drafts]
        return [(PLAIN, 0), *named]

    def tasks(self, name: str, drafts: int) -> list[GenerationTask]:
        """The requests of a way, one for each prompt."""
        drafter = None if name == PLAIN else self.models[name]
        options = Options(
            drafter=drafter,
            drafting=Drafting(num=drafts or None),
            max_new_tokens=self.new,
            stop=(),
        )
        return [prepare(self.lm, [prompt], options) for prompt in self.prompts]

    def passes(self, name: str) -> dict[int, timing.Call]:
        """The passes of a model over one node, of the target also over the widest draft."""
        length = len(self.prompts[0]) + self.new // 2
        capacity = len(self.prompts[0]) + self.new
        lm = self.lm if name == PLAIN else self.models[name]
        nodes = {1, *(n + 1 for n in self.config.num_drafts)} if name == PLAIN else {1}
        return {n: timing.pass_call(lm, n, length=length, capacity=capacity) for n in nodes}

    def run(self) -> None:
        """Times all ways in each turn that is not complete."""
        ways, turns = self.ways(), range(self.config.turns)
        if all((turn, *way) in self.known for turn in turns for way in ways):
            return
        tasks = {way: self.tasks(*way) for way in ways}
        passes = {name: self.passes(name) for name in (PLAIN, *self.models)}
        for work in tasks.values():
            timing.timed_run(work[0])  # compiles
        for turn in turns:
            for index in np.roll(np.arange(len(ways)), turn):
                way = ways[index]
                if (turn, *way) in self.known:
                    continue
                spent = [timing.timed_run(work) for work in tasks[way]]
                stats = [state.stats for _, _, state in spent]
                self.journal.add(
                    {
                        "turn": turn,
                        "model": way[0],
                        "drafts": way[1],
                        "run": sum(run for _, run, _ in spent),
                        "start": sum(start for start, _, _ in spent),
                        "tokens": int(sum(np.sum(one.emitted) for one in stats)),
                        "rounds": int(sum(np.max(one.rounds) for one in stats)),
                        "passes": {n: call.seconds() for n, call in passes[way[0]].items()},
                    }
                )
            print(f"timed turn {turn + 1} of {self.config.turns}", flush=True)


def facts_of(cell: Cell, vocab_size: int) -> dict:
    """Returns what is known of a trained model besides times, for the report."""
    main = next(iter(measured.read(cell.folder)["domains"].values()))
    before = [1.0, *main["kept"][:-1]]
    return {
        "model": cell.name,
        "size": cell.size,
        "seed": cell.seed,
        "depth": cell.shape.num_layers,
        "width": cell.shape.hidden_size,
        "inner": cell.shape.intermediate_size,
        "parameters": equal_size.num_weights(cell.shape, vocab_size),
        "rates": [k / b if b else 0.0 for k, b in zip(main["kept"], before, strict=True)],
    }


def trained(config: DepthWidthConfig, *, dry_run: bool) -> Iterator[Cell]:
    """Trains the models that are not trained, and yields all of them one by one."""
    lm = specjax.load(config.distill.teacher)
    every = cells(config, lm.config.vocab_size)
    for number, cell in enumerate(every, 1):
        words = f"{cell.name} ({number} of {len(every)}), {cell.shape.num_layers} layers of width"
        if dry_run and cell.seed != config.seeds[0]:
            continue
        if dry_run or not cell.is_trained:
            print(f"--- {words} {cell.shape.hidden_size}", flush=True)
            distill.run(cell.config, dry_run=dry_run)
        yield cell


def run(config: DepthWidthConfig, *, dry_run: bool = False) -> None:
    """Trains and times all models, and writes table, picture and findings."""
    if not dry_run:
        compile_cache.enable()  # seeds share their programs
    study = list(trained(config, dry_run=dry_run))
    if dry_run:
        print(f"and as much for each of {len(config.seeds)} seeds; then {config.turns} timed turns")
        return
    lesson = distill.load_lesson(config.distill)
    lm, folder = lesson.teacher, Path(config.output)
    facts = [facts_of(cell, lm.config.vocab_size) for cell in study]
    prompts = decoding.heldout_prompts(lesson.heldout, config.distill.decoding, lesson.end_of_text)
    about = {"target": lm.checkpoint, "prompts": config.timed_prompts}
    about |= {"new_tokens": config.distill.decoding.new_tokens}
    files = {cell.name: weight_files(cell.folder / MODEL) for cell in study}
    about |= {"models": {name: fingerprint(of) for name, of in files.items()}}
    rows = []
    if config.turns:
        journal = Journal(folder / TIMES, about)
        models = {
            cell.name: specjax.load(cell.folder / MODEL, tokenizer=lm.tokenizer) for cell in study
        }
        Timer(config, lm, models, prompts, journal).run()
        rows = journal.rows
    depth_width_report.write(folder, facts, rows)
