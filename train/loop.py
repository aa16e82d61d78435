"""The training loop of every recipe: step, log, evaluate, save, stop, go on."""

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
import optax

from . import checkpoint, flops, outlook
from .config import OptimizerConfig, RunConfig
from .evaluate import weighed
from .metrics import LOG, Log, read
from .optimizer import make_optimizer
from .progress import Watch


class Diverged(RuntimeError):
    """The loss or the gradient is no longer finite."""


class Interrupted(SystemExit):
    """The run was asked to stop, has saved, and can go on. The exit status is 128 + signal."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a recipe brings to the loop.

    Attributes:
      loss: ``loss(params, frozen, batch, key) -> {name: evaluate.Mean}``, pure; it is the sum of
        these means, each times its share. Their totals and counts add up over parts of a batch.
      params: what is trained, a pytree of float arrays.
      batches: a Grain iterator of int32 ``[batch, length + 1]``, or of dictionaries that hold
        these as ``"tokens"``.
      evaluate: ``evaluate(params, frozen) -> {"heldout_loss": float, ...}``.
      frozen: arrays the loss reads (a teacher), passed through jit as an argument.
      best: a measure of ``evaluate``; the run ends with the parameters at its greatest. Empty:
        with the last ones.
      adjust: makes another optimiser of the configured one (other rates for a part).
    """

    loss: Callable
    params: object
    batches: Iterator
    evaluate: Callable
    frozen: object = None
    best: str = ""
    adjust: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda o: o


def size_of(batch) -> tuple[int, int]:
    """Rows of a batch, and the tokens of each that are predicted from."""
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return tokens.shape[0], tokens.shape[1] - 1


def make_loss(job: Job):
    """``loss(params, frozen, batch, key) -> (loss, {name: mean})``."""

    def loss(params, frozen, batch, key):
        terms = job.loss(params, frozen, batch, key)
        return weighed(terms), {name: term.value for name, term in terms.items()}

    return loss


def make_step(job: Job, optimizer: optax.GradientTransformation):
    """``step(state, frozen, batch) -> (state, metrics)``, compiled; ``state`` is donated."""
    loss_and_gradients = jax.value_and_grad(make_loss(job), has_aux=True)

    def step(state, frozen, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        (loss, metrics), gradients = loss_and_gradients(state["params"], frozen, batch, key)
        norm = optax.tree.norm(gradients)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        state = {
            "params": optax.apply_updates(state["params"], updates),
            "optimizer": moments,
            "key": state["key"],
            "step": state["step"] + 1,
        }
        return state, {"loss": loss, "gradient_norm": norm, **metrics}

    return jax.jit(step, donate_argnums=0)


def make_state(job: Job, optimizer, seed: int) -> dict:
    """The state before the first step. The parameters are copied, since steps donate them."""
    params = jax.tree.map(jnp.array, job.params)
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "key": jax.random.key(seed),
        "step": jnp.int32(0),
    }


@contextlib.contextmanager
def _stop_requests():
    """Yields a list that SIGTERM or Ctrl-C is put into, so that a step is never torn."""
    received: list[int] = []

    def note(number, _frame):
        if received:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        received.append(number)

    previous = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def fit(job: Job, flat_config: dict, optimizer_config: OptimizerConfig, run: RunConfig):
    """Trains to ``run.steps``, from the latest checkpoint in ``run.folder`` where there is one.

    A run that is killed and started again by the same command goes on from its last checkpoint and
    computes what it would have computed.

    Returns:
      The trained parameters, the last ones or those at the greatest of ``job.best``.

    Raises:
      ConfigError: the folder holds a run with another configuration.
      Diverged: a loss or gradient norm that is not finite; checkpoints are from before that step.
      Interrupted: after SIGTERM or Ctrl-C, the state being saved.
    """
    folder = Path(run.folder)
    checkpoint.record_config(folder, flat_config)
    optimizer = job.adjust(make_optimizer(optimizer_config, run.steps))
    step_function = make_step(job, optimizer)
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(checkpoint.checkpoints(folder, run.keep))
        stop = stack.enter_context(_stop_requests())
        state, first = checkpoint.restore(
            manager, make_state(job, optimizer, run.seed), job.batches
        )
        log = Log(folder, first, run.metrics, flat_config)
        stack.enter_context(contextlib.closing(log))
        best = checkpoint.Best(folder, job.best, read(folder / LOG))
        watch = stack.enter_context(Watch(folder.name, run, first))
        began, unread = time.monotonic(), None
        for number in range(first + 1, run.steps + 1):
            waited = time.monotonic()
            batch = next(job.batches)
            waited = round(time.monotonic() - waited, 6)
            if watch.ideal is None:
                watch.tokens = math.prod(size_of(batch))
                watch.ideal = ideal_seconds(job, state["params"], batch)
            state, found = step_function(state, job.frozen, batch)
            if unread:  # read a step late, while the next one computes
                watch.loss = _record(log, manager, *unread)
            watch.step(number)
            seconds = round(time.monotonic() - began, 2)
            unread = number, found, {"seconds": seconds, "data_wait": waited, **watch.rates()}

            last, stopped = number == run.steps, bool(stop)
            to_evaluate = last or number % run.eval_every == 0
            to_save = last or stopped or number % run.save_every == 0
            if to_evaluate or to_save:  # never save what has not been found finite
                watch.loss = _record(log, manager, *unread)
                unread = None
            if to_evaluate:
                with watch.pace.apart():
                    measured = job.evaluate(state["params"], job.frozen)
                log.write(number, **measured)
                watch.say(number, measured)
                best.offer(number, measured, state["params"])
            if to_save:
                checkpoint.save(manager, number, state, job.batches)
            if stopped:
                raise Interrupted(_farewell(folder, number, stop[0]))
        return best.load(state["params"])


def ideal_seconds(job: Job, params, batch) -> float:
    """How long the matrix products of a step would take at the measured best rate of the devices
    that hold the parameters."""
    devices = {d for x in jax.tree.leaves(params) for d in x.sharding.device_set}
    counted = flops.of_step(make_loss(job), params, job.frozen, batch)
    return flops.ideal_seconds(counted, len(devices))


def _record(log: Log, manager, number: int, found: dict, timing: dict) -> float:
    """Writes a step's metrics to the log; returns its loss. Raises Diverged where they are not
    finite."""
    values = {name: float(value) for name, value in found.items()}
    log.write(number, **values, **timing)
    if not all(math.isfinite(values[name]) for name in ("loss", "gradient_norm")):
        last = manager.latest
        raise Diverged(
            f"step {number}: loss {values['loss']}, gradient norm {values['gradient_norm']}. The "
            f"last good checkpoint is {'none' if last is None else f'step {last.step}'}; lower "
            "optimizer.rate and optimizer.adam_rate or lengthen optimizer.warmup, under another "
            "run.folder"
        )
    return values["loss"]


def _farewell(folder: Path, number: int, signal_number: int) -> int:
    print(f"stopped after step {number}, saved in {folder}; the same command goes on from there")
    return 128 + signal_number


def estimate(job: Job, optimizer_config: OptimizerConfig, run: RunConfig, model: str) -> None:
    """Prints what a run would take: parameters, bytes, seconds (from three real steps).

    ``model``: what is trained, in words."""
    optimizer = job.adjust(make_optimizer(optimizer_config, run.steps))
    state = make_state(job, optimizer, run.seed)
    batch = next(job.batches)
    step = make_step(job, optimizer).lower(state, job.frozen, batch).compile()
    work = step.memory_analysis()
    memory = {"parameters": outlook.num_bytes(job.params)}
    memory["optimiser"] = outlook.num_bytes(state["optimizer"])
    memory["what is frozen"] = outlook.num_bytes(job.frozen)
    if work is not None:
        memory["work space of a step"] = work.temp_size_in_bytes

    def once():
        nonlocal state
        state, metrics = step(state, job.frozen, batch)
        return metrics

    seconds = outlook.seconds_of(once)
    rows, length = size_of(batch)
    tokens, words = rows * length, [f"{rows * length / seconds:,.0f} tokens/s"]
    share = ideal_seconds(job, state["params"], batch) / seconds
    words += [f"{seconds:.2f} s a step", f"{100 * share:.0f} % of the device's measured peak"]
    measures = -(-run.steps // run.eval_every)
    outlook.show(
        model=model,
        shapes=f"{rows} rows x {length} tokens a step",
        parameters=f"{outlook.num_parameters(job.params):,} to train",
        memory=memory,
        steps=f"{run.steps:,}, {run.steps * tokens:,} tokens; {', '.join(words)}",
        seconds=run.steps * seconds,
        beside=f"and {measures} times the held-out measures",
    )
