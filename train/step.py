"""What a recipe brings, and one step of its training as a pure, compiled function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import optax

from specjax import sharding
from specjax._internal.pytree import pytree_dataclass
from specjax.models import remat
from specjax.sharding import DATA
from specjax.types import PyTree

from .config import RunConfig
from .evaluate import weighed
from .scale import Layout


@dataclasses.dataclass(frozen=True)
class TrainingTask:
    """What a recipe brings to the loop.

    Attributes:
      loss: ``loss(params, frozen, batch, keys) -> {name: evaluate.Mean}``, pure; it is the sum of
        these means, each times its share. Their totals and counts add up over parts of a batch.
        ``keys``: see ``Keys``.
      params: what is trained, a pytree of float arrays.
      batches: a Grain iterator of int32 ``[batch, length + 1]``, or of dictionaries that hold
        these as ``"tokens"``. Of several processes each has its own rows, see ``scale.shard_of``.
      evaluate: ``evaluate(params, frozen) -> {"heldout_loss": float, ...}``.
      frozen: arrays the loss reads (a teacher), passed through jit as an argument.
      measures: ``measures()``, the names of what ``evaluate`` finds, without running anything;
        None: they are not known before.
      best: a measure of ``evaluate``; the run ends with the parameters at its best, see
        ``checkpoint.Best``. Empty: with the last ones.
      adjust: makes another optimiser of the configured one (other rates for a part).
    """

    loss: Callable
    params: object
    batches: Iterator
    evaluate: Callable
    frozen: object = None
    measures: Callable[[], Iterable[str]] | None = None
    best: str = ""
    adjust: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda o: o


@pytree_dataclass
class Keys:
    """What a loss draws with.

    Attributes:
      step: a key for what is drawn once, whatever part of the batch the loss is of.
      rows: keys ``[B]``, for what is drawn row by row.
      index: int32 ``[B]``, the rows' numbers in the batch as one process would read it. Their keys
        follow from these, so that neither mesh nor processes nor parts change what is drawn.
    """

    step: jax.Array
    rows: jax.Array
    index: jax.Array


def make_keys(key: jax.Array, index: jax.Array) -> Keys:
    """The keys of a step, whose own ``key`` is, for the rows ``index``."""
    once, each = jax.random.split(key)
    rows = jax.vmap(jax.random.fold_in, (None, 0))(each, index)
    return Keys(step=once, rows=rows, index=index)


def size_of(batch) -> tuple[int, int]:
    """Rows of a batch, and the tokens of each that are predicted from."""
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return tokens.shape[0], tokens.shape[1] - 1


def rounded(tree: PyTree, run: RunConfig) -> PyTree:
    """Weights in the numbers that a run computes in: float32 ones in ``run.precision``."""
    if run.precision == "float32":
        return tree

    def cast(x):
        return x.astype(run.precision) if x.dtype == jnp.float32 else x

    return jax.tree.map(cast, tree)


def make_terms(task: TrainingTask, run: RunConfig):
    """``task.loss`` on rounded weights, and rematerialised if the run says so."""

    def terms(params, frozen, batch, keys):
        with remat.rematerialised(run.remat):
            return task.loss(rounded(params, run), frozen, batch, keys)

    return terms


def make_loss(task: TrainingTask, run: RunConfig = RunConfig()):
    """``loss(params, frozen, batch, keys, counts=None) -> (loss, {name: mean})``.

    ``counts``: by name, what totals are divided by: those of all the parts that ``batch`` is one
    of, so that the parts' losses, and gradients, add up to the whole's. None: its own.
    """
    terms_of = make_terms(task, run)

    def loss(params, frozen, batch, keys, counts=None):
        terms = terms_of(params, frozen, batch, keys)
        if counts is not None:
            terms = {name: term._replace(count=counts[name]) for name, term in terms.items()}
        return weighed(terms), {name: term.value for name, term in terms.items()}

    return loss


def make_gradients(task: TrainingTask, run: RunConfig = RunConfig()):
    """``gradients(params, frozen, batch, key, index) -> ((loss, {name: mean}), gradients)``.

    ``key``: of the step. ``index``: of the rows, see ``Keys``.

    With ``run.accumulate`` the batch goes through in so many parts, one after the other, and the
    gradients, float32, are summed. Every mean is that over the whole batch: its counts are found
    first, for which, where they follow from the text alone, no model is run.
    """
    terms_of = make_terms(task, run)
    gradients_of = jax.value_and_grad(make_loss(task, run), has_aux=True)

    def at_once(params, frozen, batch, key, index):
        return gradients_of(params, frozen, batch, make_keys(key, index))

    if run.accumulate == 1:
        return at_once

    def part(x):
        """``[B, ...] -> [parts, B / parts, ...]``: every so manieth row, so that rows stay on the
        devices that have them."""
        x = x.reshape(-1, run.accumulate, *x.shape[1:]).swapaxes(0, 1)
        return sharding.spread(x, None, DATA, *[None] * (x.ndim - 2))

    def gradients(params, frozen, batch, key, index):
        parts = jax.tree.map(part, batch), part(index)

        def count(part):
            terms = terms_of(params, frozen, part[0], make_keys(key, part[1]))
            return {name: term.count for name, term in terms.items()}

        counts = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(count, parts))

        def add(total, part):
            found = gradients_of(params, frozen, part[0], make_keys(key, part[1]), counts)
            return jax.tree.map(jnp.add, total, found), None

        first = jax.tree.map(lambda x: x[0], parts)
        keys = make_keys(key, first[1])
        shapes = jax.eval_shape(gradients_of, params, frozen, first[0], keys, counts)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    return gradients


def make_step(
    task: TrainingTask,
    optimizer: optax.GradientTransformation,
    run: RunConfig = RunConfig(),
    layout: Layout = Layout(),
):
    """``step(state, frozen, batch) -> (state, metrics)``, compiled; ``state`` is donated."""
    gradients_of = make_gradients(task, run)

    def step(state, frozen, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        index = layout.index(size_of(batch)[0])
        (loss, metrics), gradients = gradients_of(state["params"], frozen, batch, key, index)
        gradients = layout.constrain(gradients)
        norm = optax.tree.norm(gradients)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        state = {
            "params": layout.constrain(optax.apply_updates(state["params"], updates)),
            "optimizer": layout.constrain(moments),
            "key": state["key"],
            "step": state["step"] + 1,
        }
        return state, {"loss": loss, "gradient_norm": norm, **metrics}

    return jax.jit(step, donate_argnums=0)


def make_state(task: TrainingTask, optimizer, seed: int, layout: Layout = Layout()) -> dict:
    """The state before the first step. The parameters are copied, since steps donate them."""
    params, init = layout.place(jax.tree.map(jnp.array, task.params)), optimizer.init
    if layout.mesh is not None:  # each device makes its part of the moments
        init = jax.jit(init, out_shardings=layout.shardings(jax.eval_shape(init, params)))
    rest = {"key": jax.random.key(seed), "step": jnp.int32(0)}
    return {"params": params, "optimizer": init(params), **layout.place(rest)}
