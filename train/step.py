"""The training task of a recipe, and one step of it as a pure, compiled function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import optax

from specjax import sharding
from specjax._internal.pytree import pytree_dataclass
from specjax.models import remat
from specjax.models.hf import dtype_of
from specjax.sharding import DATA
from specjax.types import PyTree

from .config import RunConfig
from .evaluate import weighed
from .scale import MeshLayout


@dataclasses.dataclass(frozen=True)
class TrainingTask:
    """What a recipe passes to the training loop.

    Attributes:
      loss: a pure function ``loss(params, frozen, batch, keys) -> {name: evaluate.Mean}``. The loss
        is the sum of these means, each times its share; totals and counts are summed over parts of
        a batch. ``keys``: see ``Keys``.
      params: the trained parameters, a pytree of float arrays.
      batches: a Grain iterator of int32 ``[batch, length + 1]``, or of dictionaries that hold
        these as ``"tokens"``. Each process has its own rows, see ``scale.shard_of``.
      evaluate: ``evaluate(params, frozen) -> {"heldout_loss": float, ...}``.
      frozen: the arrays that the loss reads (a teacher), passed to ``jit`` as an argument.
      measures: ``measures()`` returns the names that ``evaluate`` returns, without running it;
        None: they are not known.
      best: a measure of ``evaluate``; the run returns the parameters with its best value, see
        ``checkpoint.Best``. Empty: the run returns the last parameters.
      adjust: makes another optimizer from the configured one (other rates for some parameters).
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
    """The random keys of a loss.

    Attributes:
      step: the key for draws that are the same for all parts of a batch.
      rows: keys ``[B]``, for draws of each row.
      index: int32 ``[B]``, the numbers of the rows in the batch as one process reads it. The keys
        of rows follow from these numbers, so that neither mesh nor processes nor parts change the
        draws.
      number: int32, the number of the step, from 0.
    """

    step: jax.Array
    rows: jax.Array
    index: jax.Array
    number: jax.Array | int = 0


def make_keys(key: jax.Array, index: jax.Array, number: jax.Array | int = 0) -> Keys:
    """Makes the keys of the rows ``index`` from the ``key`` of the step ``number``."""
    once, each = jax.random.split(key)
    rows = jax.vmap(jax.random.fold_in, (None, 0))(each, index)
    return Keys(step=once, rows=rows, index=index, number=number)


def size_of(batch) -> tuple[int, int]:
    """Returns the number of rows of a batch, and of predictions in each row."""
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return tokens.shape[0], tokens.shape[1] - 1


def rounded(tree: PyTree, run: RunConfig) -> PyTree:
    """Casts float32 weights to ``run.precision``, in which the run computes.

    Weights that a model of any type has in float32 (see ``hf.IN_FLOAT32``) stay as they are.
    """
    if run.precision == "float32":
        return tree
    dtype = jnp.dtype(run.precision)

    def cast(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return x.astype(dtype_of(name, dtype)) if x.dtype == jnp.float32 else x

    return jax.tree.map_with_path(cast, tree)


def make_terms(task: TrainingTask, run: RunConfig):
    """Returns ``task.loss`` on cast weights, rematerialised if ``run.remat`` is set."""

    def terms(params, frozen, batch, keys):
        with remat.rematerialised(run.remat):
            return task.loss(rounded(params, run), frozen, batch, keys)

    return terms


def make_loss(task: TrainingTask, run: RunConfig = RunConfig()):
    """Returns ``loss(params, frozen, batch, keys, counts=None) -> (loss, {name: mean})``.

    Totals are divided by ``counts``, by name. With the counts of a whole batch, the losses and
    gradients of its parts sum to those of the batch. ``counts=None`` stands for the batch's own.
    """
    terms_of = make_terms(task, run)

    def loss(params, frozen, batch, keys, counts=None):
        terms = terms_of(params, frozen, batch, keys)
        if counts is not None:
            terms = {name: term._replace(count=counts[name]) for name, term in terms.items()}
        return weighed(terms), {name: term.value for name, term in terms.items()}

    return loss


def make_gradients(task: TrainingTask, run: RunConfig = RunConfig()):
    """Returns ``gradients(params, frozen, batch, key, index, number=0) -> ((loss, means),
    gradients)``.

    ``means`` are means by name, ``key`` is that of the step ``number``, and ``index`` holds the
    numbers of the rows (see ``Keys``).

    With ``run.accumulate`` the batch is computed in that number of parts, one after the other, and
    their float32 gradients are summed. Every mean is taken over the whole batch: the counts are
    computed first, without running a model if they depend on the text only.
    """
    terms_of = make_terms(task, run)
    gradients_of = jax.value_and_grad(make_loss(task, run), has_aux=True)

    def at_once(params, frozen, batch, key, index, number=0):
        return gradients_of(params, frozen, batch, make_keys(key, index, number))

    if run.accumulate == 1:
        return at_once

    def part(x):
        """Splits ``[B, ...]`` to ``[parts, B / parts, ...]``; part ``i`` has rows ``i::parts``.

        With such strides rows stay on the devices that hold them.
        """
        x = x.reshape(-1, run.accumulate, *x.shape[1:]).swapaxes(0, 1)
        return sharding.spread(x, None, DATA, *[None] * (x.ndim - 2))

    def gradients(params, frozen, batch, key, index, number=0):
        parts = jax.tree.map(part, batch), part(index)

        def count(part):
            terms = terms_of(params, frozen, part[0], make_keys(key, part[1], number))
            return {name: term.count for name, term in terms.items()}

        counts = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(count, parts))

        def add(total, part):
            keys = make_keys(key, part[1], number)
            found = gradients_of(params, frozen, part[0], keys, counts)
            return jax.tree.map(jnp.add, total, found), None

        first = jax.tree.map(lambda x: x[0], parts)
        keys = make_keys(key, first[1], number)
        shapes = jax.eval_shape(gradients_of, params, frozen, first[0], keys, counts)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    return gradients


def make_step(
    task: TrainingTask,
    optimizer: optax.GradientTransformation,
    run: RunConfig = RunConfig(),
    layout: MeshLayout = MeshLayout(),
):
    """Returns a compiled ``step(state, frozen, batch) -> (state, metrics)``; donates ``state``."""
    gradients_of = make_gradients(task, run)

    def step(state, frozen, batch):
        key = jax.random.fold_in(state["key"], state["step"])
        index = layout.index(size_of(batch)[0])
        found = gradients_of(state["params"], frozen, batch, key, index, state["step"])
        (loss, metrics), gradients = found
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


def make_state(task: TrainingTask, optimizer, seed: int, layout: MeshLayout = MeshLayout()) -> dict:
    """Makes the state before the first step, with a copy of the parameters, since steps donate."""
    params, init = layout.place(jax.tree.map(jnp.array, task.params)), optimizer.init
    if layout.mesh is not None:  # each device makes its own part of the moments
        init = jax.jit(init, out_shardings=layout.shardings(jax.eval_shape(init, params)))
    rest = {"key": jax.random.key(seed), "step": jnp.int32(0)}
    return {"params": params, "optimizer": init(params), **layout.place(rest)}
