"""The contract of a law of one's own, and how the loop calls it.

A law sees the tokens before a position, in order: the committed prefix, then the path of the node
through the draft. What it would have to compute from all of them again and again it may carry:
a state a row, one ``step`` a token. The loop folds ``step`` over what was committed and, for a
node, over the path to it; rejected branches leave no trace.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

PyTree = Any


class LogitsProcessor(Protocol):
    """Part of the law p: logits in, logits out. Hashable, without arrays (static under jit).

    A plain function with the signature of ``__call__`` is a law without state. Arrays that it
    needs are ``params["logits_processor"]``, which it finds as ``prefix.params``. Pure and
    deterministic.
    """

    def init(self, params: PyTree, tokens: jax.Array, lengths: jax.Array) -> PyTree:
        """State after the prompts ``tokens`` int32 ``[B, L]``, of which ``lengths`` int32 ``[B]``
        count; every leaf leads with B. Only for laws with a ``step``."""

    def step(self, params: PyTree, state: PyTree, token: jax.Array) -> PyTree:
        """State after one more ``token`` int32 ``[B]``."""

    def __call__(self, logits: jax.Array, prefix) -> jax.Array:
        """float32 ``[B, V]`` to float32 ``[B, V]``; ``prefix`` is a ``sampling.Prefix``, its
        ``state`` that after the whole prefix. A row of -inf ends with ``no token``."""
        ...


def initial_processor_state(
    processor, params: PyTree, tokens: jax.Array, lengths: jax.Array
) -> PyTree:
    """Returns the state of each row after its prompt; None without a processor or a state.

    Raises:
      ValueError: the processor's functions do not fit together or return other shapes (which is
        found while tracing, before anything is compiled).
    """
    if processor is None or not hasattr(processor, "step"):
        return None
    state = processor.init(params, tokens, lengths)
    batch = tokens.shape[0]
    shapes = jax.eval_shape(lambda: state)
    wrong = [x.shape for x in jax.tree.leaves(shapes) if x.shape[:1] != (batch,)]
    if wrong:
        raise ValueError(
            f"logits_processor: {processor_name(processor)}.init returns an array of shape "
            f"{wrong[0]}: every leaf of its state must lead with the batch, {batch} rows"
        )
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    after = jax.eval_shape(processor.step, params, shapes, token)
    same = jax.tree.structure(after) == jax.tree.structure(shapes) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(shapes), strict=True)
    )
    if not same:
        raise ValueError(
            f"logits_processor: {processor_name(processor)}.step returns {after}, its state is "
            f"{shapes}: shapes and dtypes must stay the same"
        )
    return state


def advance_processor(processor, params: PyTree, state: PyTree, path: jax.Array) -> PyTree:
    """The state after the tokens of ``path`` int32 ``[B, K]``, in order; -1: there is none."""

    def step(index, state):
        token = path[:, index]
        after = processor.step(params, state, jnp.maximum(token, 0))

        def choose(new, old):
            there = (token >= 0).reshape((-1,) + (1,) * (new.ndim - 1))
            return jnp.where(there, new, old)

        return jax.tree.map(choose, after, state)

    if not path.shape[1]:
        return state
    return jax.lax.fori_loop(0, path.shape[1], step, state)


def apply_processor(processor, logits: jax.Array, prefix) -> jax.Array:
    """Applies a logits processor to ``logits [B, V]`` after ``prefix``.

    Raises:
      ValueError: the result has another shape, or no floating dtype.
    """
    if hasattr(processor, "step"):
        state = advance_processor(processor, prefix.params, prefix.state, prefix.path)
        prefix = dataclasses.replace(prefix, state=state)
    out = processor(logits, prefix)
    shape, dtype = jnp.shape(out), getattr(out, "dtype", None)
    if shape != logits.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"logits_processor: {processor_name(processor)} returns {dtype} {shape} for logits "
            f"{logits.dtype} {logits.shape}: it must return logits of the same shape"
        )
    return out.astype(logits.dtype)


def processor_name(processor) -> str:
    """A name that tells laws apart: a grammar's own, a function's."""
    return getattr(processor, "name", None) or getattr(
        processor, "__qualname__", type(processor).__qualname__
    )
