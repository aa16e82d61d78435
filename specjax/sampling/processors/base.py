"""The contract of logits processors, and the functions by which the loop calls them.

A processor sees the tokens before a position, in order: the committed tokens, then the path of the
node through the draft. A processor may carry a state, so that it need not read all earlier tokens
again at every position: the loop applies ``step`` to each committed token and, for a node, to the
tokens on the path to it. Tokens of rejected branches do not enter the state.
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
    """Changes the logits from which the law p is formed.

    A subclass must define ``__call__``; a processor with a state also defines ``init`` and
    ``step``. A plain function with the signature of ``__call__`` is a processor without a state. A
    processor is pure and deterministic, hashable, and holds no arrays apart from ``params``,
    because it is a static argument under jit.

    Attributes:
      name: the name that tells processors apart in results. Default: the name of the class.
      params: arrays that ``generate`` passes as ``params["logits_processor"]``. They are arguments
        of the compiled program, not constants in it, and count neither in ``==`` nor in the hash.
        The processor finds them as ``prefix.params``. None: the processor needs no arrays.
    """

    name: str = ""
    params: PyTree = None

    def init(self, params: PyTree, tokens: jax.Array, lengths: jax.Array) -> PyTree:
        """Returns the state after the prompts. Default: None, which means no state.

        Args:
          params: ``params["logits_processor"]``.
          tokens: int32 ``[B, L]``, the token buffer with the prompts.
          lengths: int32 ``[B]``, the number of tokens in each prompt.

        Returns:
          a pytree whose leaves all have B as their first axis, or None.
        """
        return None

    def step(self, params: PyTree, state: PyTree, token: jax.Array) -> PyTree:
        """Returns the state after one more token.

        Args:
          params: ``params["logits_processor"]``.
          state: the state before the token.
          token: int32 ``[B]``.

        Returns:
          a state with the same shapes and dtypes.
        """
        raise NotImplementedError(f"{type(self).__name__}: init returns a state, so implement step")

    @abc.abstractmethod
    def __call__(self, logits: jax.Array, prefix) -> jax.Array:
        """Returns the changed logits.

        Args:
          logits: float32 ``[B, V]``, after bias and penalties.
          prefix: a ``sampling.Prefix``, the tokens before the position; its ``state`` is the state
            after all of them.

        Returns:
          logits float32 ``[B, V]``; -inf forbids a token. A row in which all logits are -inf ends
          with the reason ``no token``.
        """
        ...


def check_processor(processor) -> None:
    """Raises ``ValueError`` if ``processor`` is not None, a function or a ``LogitsProcessor``."""
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

    Args:
      processor: a ``LogitsProcessor``, a function, or None.
      params: ``params["logits_processor"]``.
      tokens: int32 ``[B, L]``, the token buffer with the prompts.
      lengths: int32 ``[B]``, the number of tokens in each prompt.

    Raises:
      ValueError: a leaf of the state does not have B as its first axis, or ``step`` returns other
        shapes or dtypes than ``init``. The check is made while tracing, before anything is
        compiled.
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
            f"logits_processor: {processor_name(processor)}.step returns {after}, but init returns "
            f"{shapes}: shapes and dtypes must stay the same"
        )
    return state


def advance_processor(processor, params: PyTree, state: PyTree, path: jax.Array) -> PyTree:
    """Returns the state after the tokens of a path.

    Args:
      processor: a ``LogitsProcessor`` with a state.
      params: ``params["logits_processor"]``.
      state: the state before the path.
      path: int32 ``[B, K]``, the tokens in order; -1 where there is none.
    """

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
    """Returns the logits that a processor makes of ``logits``.

    Args:
      processor: a ``LogitsProcessor`` or a function.
      logits: float32 ``[B, V]``.
      prefix: the tokens before the position, a ``sampling.Prefix``.

    Returns:
      logits ``[B, V]`` with the dtype of ``logits``.

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
    """Returns a name that tells processors apart: that of the object, its class or the function."""
    if isinstance(processor, LogitsProcessor):
        return processor.name or type(processor).__qualname__
    if isinstance(processor, functools.partial):
        return processor_name(processor.func)
    return "none" if processor is None else processor.__qualname__


def processor_params(processor) -> PyTree:
    """Returns ``{"logits_processor": arrays}`` for ``params``; ``{}`` for a processor without
    arrays."""
    own = isinstance(processor, LogitsProcessor) and processor.params is not None
    return {"logits_processor": processor.params} if own else {}
