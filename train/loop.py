"""The training loop of every recipe: steps, log, evaluation, checkpoints, stop and resumption."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.types import PyTree

from . import checkpoint, flops, outlook, scale
from .config import ConfigError, OptimizerConfig, RunConfig
from .evaluate import KEPT
from .metrics import LOG, Log, NoLog, read
from .optimizer import make_optimizer
from .progress import Watch
from .step import TrainingTask, make_loss, make_state, make_step, rounded, size_of


class Diverged(RuntimeError):
    """The loss or the gradient is no longer finite."""


class Interrupted(SystemExit):
    """The run was asked to stop and is saved; it can be resumed. Exit status: 128 + signal."""


@contextlib.contextmanager
def _stop_requests():
    """Yields a list to which SIGTERM or Ctrl-C is appended, so that no step is cut short."""
    received: list[int] = []

    def note(number, _frame):
        if received:
            raise KeyboardInterrupt  # the second request stops at once, without saving
        received.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The functions that ``advance`` repeats.

    Attributes:
      init: ``init() -> state`` returns the state before the first step: arrays by name, which
        checkpoints hold; ``"params"`` are the trained parameters.
      step: ``step(state, batch) -> (state, {name: number})``. The numbers include ``loss`` and
        ``gradient_norm`` if the step learned.
      batches: a Grain iterator, whose position checkpoints hold.
      evaluate: ``evaluate(params) -> {name: float}``.
      tokens: ``tokens(batch)``, the number of tokens of a step.
      best: see ``TrainingTask``.
      ideal: ``ideal(state, batch)``, see ``ideal_seconds``; None: it is not known.
      layout: the layout of the arrays.
    """

    init: Callable[[], dict]
    step: Callable
    batches: Iterator
    evaluate: Callable
    tokens: Callable[[PyTree], int]
    best: str = ""
    ideal: Callable | None = None
    layout: scale.MeshLayout = scale.MeshLayout()


def fit(task: TrainingTask, flat_config: dict, optimizer_config: OptimizerConfig, run: RunConfig):
    """Trains to ``run.steps``, from the latest checkpoint in ``run.folder`` if there is one.

    Returns:
      The trained parameters: the last ones, or those with the best ``run.best`` or ``task.best``.

    Raises:
      ConfigError, NotWritten, Diverged, Interrupted: see ``advance``.
    """
    rows = next((n for name, n in flat_config.items() if name.endswith("data.batch")), None)
    layout = scale.layout_of(run, rows)
    if task.measures and run.best not in ("", "last") and KEPT not in run.best:
        checkpoint.check_measure(run.best, task.measures())
    optimizer = task.adjust(make_optimizer(optimizer_config, run.steps))
    compiled = make_step(task, optimizer, run, layout)
    frozen = layout.place(rounded(task.frozen, run))
    steps = Steps(
        init=lambda: make_state(task, optimizer, run.seed, layout),
        step=lambda state, batch: compiled(state, frozen, batch),
        batches=task.batches,
        evaluate=lambda params: task.evaluate(params, frozen),
        tokens=lambda batch: math.prod(size_of(batch)),
        best=task.best,
        ideal=lambda state, batch: ideal_seconds(task, run, state["params"], frozen, batch),
        layout=layout,
    )
    return layout.whole(advance(steps, flat_config, run))


def advance(steps: Steps, flat_config: dict, run: RunConfig) -> PyTree:
    """Repeats a step up to the number ``run.steps``.

    A run that was killed and is started again by the same command is resumed from its last
    checkpoint, and computes what it would have computed without the interruption.

    Returns:
      The parameters in their layout: the last ones, or those with the best ``run.best`` or
      ``steps.best``.

    Raises:
      ConfigError: the folder holds a run with another configuration, or with more steps, or its
        last checkpoint cannot be read, or another run trains there.
      NotWritten: the disk is full; the last checkpoint is whole.
      Diverged: a loss or gradient norm is not finite; checkpoints are from before that step.
      Interrupted: SIGTERM or Ctrl-C was received, and the state was saved.
    """
    folder, layout = Path(run.folder), steps.layout
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpoint.alone(folder))
        checkpoint.check_config(folder, flat_config)
        stack.enter_context(checkpoint.writing(folder))
        manager = stack.enter_context(checkpoint.checkpoints(folder, run.keep))
        stop = stack.enter_context(_stop_requests())
        state, first = checkpoint.restore(manager, steps.init(), steps.batches)
        if first > run.steps:
            raise ConfigError(
                f"run.steps={run.steps}, but the run in {folder} is at step {first} already: give "
                f"run.steps={first} or more, or another run.folder"
            )
        checkpoint.record_config(folder, flat_config)  # a refused request leaves all as it is
        if first == run.steps:
            print(f"{folder} is at step {first} already, its last; a greater run.steps goes on")
        log = Log(folder, first, run.metrics, flat_config) if scale.is_first() else NoLog()
        stack.enter_context(contextlib.closing(log))
        scale.wait("log")
        measure = {"": steps.best, "last": ""}.get(run.best, run.best)
        best = checkpoint.Best(folder, measure, read(folder / LOG))
        watch = stack.enter_context(Watch(folder.name, run, first))
        began, unread = time.monotonic(), None
        saved, patience = began, 60 * run.save_minutes or math.inf
        for number in range(first + 1, run.steps + 1):
            waited = time.monotonic()
            batch = next(steps.batches)
            waited = round(time.monotonic() - waited, 6)
            batch = layout.rows(batch)
            if not watch.tokens:
                watch.tokens = steps.tokens(batch)
                watch.ideal = steps.ideal(state, batch) if steps.ideal else None
            asked = layout.anywhere(bool(stop))  # before the step, so that it does not wait for it
            due = run.save_minutes and layout.anywhere(time.monotonic() - saved >= patience)
            with layout.using():
                state, found = steps.step(state, batch)
            if unread:  # metrics are read one step late, while the next step computes
                watch.loss = _record(log, manager, *unread)
            watch.step(number)
            seconds = round(time.monotonic() - began, 2)
            unread = number, found, {"seconds": seconds, "data_wait": waited, **watch.rates()}

            last, stopped = number == run.steps, bool(asked)
            to_evaluate = last or number % run.eval_every == 0
            to_save = last or stopped or bool(due) or number % run.save_every == 0
            if to_evaluate or to_save:  # save no state before its metrics are known to be finite
                watch.loss = _record(log, manager, *unread)
                unread = None
            if to_evaluate:
                with watch.pace.apart(), layout.using():
                    measured = steps.evaluate(state["params"])
                log.write(number, **measured)
                watch.say(number, measured)
                try:
                    best.offer(number, measured, state["params"])
                except ConfigError:  # run.best is a field that may change when the run goes on
                    checkpoint.save(manager, number, state, steps.batches)
                    raise
            checkpoint.check(manager)
            if to_save:
                checkpoint.save(manager, number, state, steps.batches)
                saved = time.monotonic()
            if stopped:
                raise Interrupted(_farewell(folder, number, stop))
        if layout.anywhere(bool(stop)):  # while the last step was measured and saved
            raise Interrupted(_farewell(folder, run.steps, stop))
        return best.load(state["params"])


def ideal_seconds(task: TrainingTask, run: RunConfig, params, frozen, batch) -> float:
    """Returns the seconds that the matrix products of a step take at the devices' measured peak.

    ``frozen`` are the frozen parameters in the dtype of the step.
    """
    devices = {d for x in jax.tree.leaves(params) for d in x.sharding.device_set}
    counted = flops.of_step(make_loss(task, run), params, frozen, batch)
    return flops.ideal_seconds(counted, len(devices))


def _record(log: Log, manager, number: int, found: dict, timing: dict) -> float | None:
    """Writes the metrics of a step to the log, and returns its loss, if it has one.

    Raises:
      Diverged: the loss or the gradient norm is not finite.
    """
    values = {name: float(value) for name, value in found.items()}
    log.write(number, **values, **timing)
    loss, norm = values.get("loss"), values.get("gradient_norm")
    if not all(value is None or math.isfinite(value) for value in (loss, norm)):
        last = manager.latest
        raise Diverged(
            f"step {number}: loss {loss}, gradient norm {norm}. The "
            f"last good checkpoint is {'none' if last is None else f'step {last.step}'}; lower "
            "optimizer.rate and optimizer.adam_rate or lengthen optimizer.warmup, under another "
            "run.folder"
        )
    return loss


def _farewell(folder: Path, number: int, stop: list[int]) -> int:
    print(f"stopped after step {number}, saved in {folder}; the same command goes on from there")
    return 128 + (stop[0] if stop else signal.SIGTERM)  # none if another process was asked


def estimate(
    task: TrainingTask, optimizer_config: OptimizerConfig, run: RunConfig, model: str
) -> None:
    """Prints the parameters, bytes and seconds of a run, which are estimated from three steps.

    ``model`` describes in words what is trained.
    """
    optimizer = task.adjust(make_optimizer(optimizer_config, run.steps))
    batch = next(task.batches)
    layout = scale.layout_of(run, size_of(batch)[0] * scale.shard_of(run)[1])
    batch, frozen = layout.rows(batch), layout.place(rounded(task.frozen, run))
    state = make_state(task, optimizer, run.seed, layout)
    outlook.note("compiling a step of training")
    with layout.using():
        step = make_step(task, optimizer, run, layout).lower(state, frozen, batch).compile()
    work = step.memory_analysis()
    memory = {"parameters": outlook.bytes_a_device(state["params"])}
    memory["optimiser"] = outlook.bytes_a_device(state["optimizer"])
    memory["what is frozen"] = outlook.bytes_a_device(jax.tree.map(jnp.asarray, frozen))
    if work is not None:
        memory["work space of a step"] = work.temp_size_in_bytes

    def once():
        nonlocal state
        state, metrics = step(state, frozen, batch)
        return metrics

    seconds = outlook.seconds_of(once, compiled=True)
    outlook.note("measuring the greatest speed of the device")
    rows, length = size_of(batch)
    tokens, words = rows * length, [f"{rows * length / seconds:,.0f} tokens/s"]
    share = ideal_seconds(task, run, state["params"], frozen, batch) / seconds
    words += [f"{seconds:.2f} s a step", f"{100 * share:.0f} % of the device's measured peak"]
    measures = -(-run.steps // run.eval_every)
    outlook.show(
        model=model,
        shapes=f"{rows} rows x {length} tokens a step",
        parameters=f"{outlook.num_parameters(task.params):,} to train",
        memory=memory,
        steps=f"{run.steps:,}, {run.steps * tokens:,} tokens; {', '.join(words)}",
        seconds=run.steps * seconds,
        beside=f"and {measures} times the held-out measures, which are not timed here; after the "
        "last step the export is measured for the report",
        devices=layout.mesh.size if layout.mesh else 1,
    )
