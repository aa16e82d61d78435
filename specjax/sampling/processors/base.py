"""The contract of a logits processor of one's own, and how the loop calls it.

A processor sees the tokens before a position, in order: the committed prefix, then the path of the
node through the draft. What it would have to compute from all of them again and again it may carry
as a state: ``step`` is folded over what was committed and, for a node, over the path to it;
rejected branches leave no trace.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


class LogitsProcessor(abc.ABC):
    """Part of the law p: logits in, logits out. Hashable, without arrays (static under jit).

    Only ``__call__`` must be given; a processor with a state gives ``init`` and ``step`` as well. A
    plain function with the signature of ``__call__`` is a processor without a state. A processor is
    pure and deterministic.

    Attributes:
      name: tells processors apart in results. Default: the name of the class.
      params: arrays that ``generate`` hands over as ``params["logits_processor"]``, arguments of
        the program and no part of it; the processor finds them as ``prefix.params``. None: it needs
        none. It counts neither in ``==`` nor in the hash.
    """

    name: str = ""
    params: PyTree = None

    def init(self, params: PyTree, tokens: jax.Array, lengths: jax.Array) -> PyTree:
        """Returns the state after the prompts ``tokens`` int32 ``[B, L]``, of which ``lengths``
        int32 ``[B]`` count; every leaf leads with B. Default: None, which means no state."""
        return None

    def step(self, params: PyTree, state: PyTree, token: jax.Array) -> PyTree:
        """Returns the state after one more ``token`` int32 ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__}: init returns a state, so implement step")

    @abc.abstractmethod
    def __call__(self, logits: jax.Array, prefix) -> jax.Array:
        """float32 ``[B, V]`` to float32 ``[B, V]``; ``prefix`` is a ``sampling.Prefix``, its
        ``state`` that after the whole prefix. A row of -inf ends with ``no token``."""
        ...


def check_processor(processor) -> None:
    """Raises ``ValueError`` for what is neither a ``LogitsProcessor`` nor a function nor None."""
    function = inspect.isroutine(processor) or isinstance(
        processor, functools.partial | jax.stages.Wrapped
    )
    if processor is None or function or isinstance(processor, LogitsProcessor):
        return
    if isinstance(processor, type) and issubclass(processor, LogitsProcessor):
        raise ValueError(
            f"logits_processor={processor.__name__} is a class: give an instance of it"
        )
    raise ValueError(
        f"logits_processor={processor!r:.60}: give a function (logits, prefix) -> logits, or an "
        "instance of a subclass of specjax.processors.LogitsProcessor, for instance "
        "specjax.processors.json_text(lm)"
    )


def initial_processor_state(
    processor, params: PyTree, tokens: jax.Array, lengths: jax.Array
) -> PyTree:
    """Returns the state of each row after its prompt; None without a processor or a state.

    Raises:
      ValueError: the processor's functions do not fit together or return other shapes (which is
        found while tracing, before anything is compiled).
    """
    if not isinstance(processor, LogitsProcessor):
        return None
    state = processor.init(params, tokens, lengths)
    if state is None:
        return None
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
    if prefix is not None and prefix.state is not None:
        state = advance_processor(processor, prefix.params, prefix.state, prefix.path)
        prefix = dataclasses.replace(prefix, state=state)
    out = processor(logits, prefix)
    array = isinstance(out, jax.Array | np.ndarray)
    if not array or out.shape != logits.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        returned = f"{out.dtype} {out.shape}" if array else f"a {type(out).__name__}"
        raise ValueError(
            f"logits_processor: {processor_name(processor)} returns {returned} for logits "
            f"{logits.dtype} {logits.shape}: it must return logits of the same shape"
        )
    return jnp.asarray(out, logits.dtype)


def processor_name(processor) -> str:
    """A name that tells processors apart: a processor's own, or that of a function."""
    if isinstance(processor, LogitsProcessor):
        return processor.name or type(processor).__qualname__
    if isinstance(processor, functools.partial):
        return processor_name(processor.func)
    return "none" if processor is None else processor.__qualname__


def processor_params(processor) -> PyTree:
    """``{"logits_processor": arrays}`` of a processor that has some, for ``params``."""
    own = isinstance(processor, LogitsProcessor) and processor.params is not None
    return {"logits_processor": processor.params} if own else {}
