"""The law that tokens are drawn from; ``drawing.py`` draws from it.

One function turns raw logits into the law, for the target and for the drafter alike. It applies
the bias, then the penalties, then a logits processor, then temperature, then top-k, top-p and min-p
(the order of Hugging Face). Acceptance rules compare the laws of target and drafter *after* these
steps, so the output is exact under every setting.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .. import sharding
from .._internal.keywords import checks_arguments
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass, static
from ..sharding import DATA, MODEL
from . import drawing, processors

COLDEST = 1e-30  # a temperature below this is 0: a division by it could overflow

IMPOSSIBLE = -1e30  # a logit whose probability is exactly zero in float32, and no NaN


@pytree_dataclass
class Prefix:
    """The tokens before a position: a committed prefix, then a path through a draft.

    Attributes:
      tokens: int32 ``[B, L]``, the token buffer.
      length: int32 ``[B]``, the number of committed tokens in ``tokens``.
      path: int32 ``[B, K]``, the drafted tokens after them, in order; -1 where there is none.
      begin: int32 ``[B]`` or None, the position of the first generated token in ``tokens``.
      state: the state of a logits processor (see ``processors.LogitsProcessor``): the state after
        the committed tokens or, within the processor's own call, after the whole prefix; None for a
        processor without a state.
      params: ``params["logits_processor"]``, the arrays of a logits processor.
    """

    tokens: jax.Array
    length: jax.Array
    path: jax.Array
    begin: jax.Array | None = None
    state: Any = None
    params: Any = None

    def last(self) -> jax.Array:
        """Returns int32 ``[B]``, the token just before the position."""
        root = jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)
        whole = jnp.concatenate([root, self.path], axis=1)
        at = jnp.max(jnp.where(whole >= 0, jnp.arange(whole.shape[1]), 0), axis=1)
        return jnp.take_along_axis(whole, at[:, None], axis=1)[:, 0]


@checks_arguments
@pytree_dataclass
class Sampling:
    """Settings of how tokens are drawn, each a scalar or an array with one value for each row.

    Example::

        Sampling(temperature=0.8, top_p=0.95)
        Sampling(temperature=[0.0, 0.8])  # the first row is greedy

    Attributes:
      temperature: at least 0. The Python number 0 (default) selects greedy decoding, compiled
        without any softmax. An array selects the sampled program, in which rows with temperature 0
        are greedy too.
      top_k: keeps the ``top_k`` most probable tokens (ties at the threshold are kept); 0 or None
        keeps all.
      top_p: in (0, 1]; keeps the smallest set of most probable tokens whose probabilities sum to at
        least ``top_p`` (ties with the last of them are kept).
      min_p: in [0, 1]; keeps tokens at least ``min_p`` times as probable as the most probable one.
      logit_bias: float32 ``[V]`` or ``[B, V]``, added to the logits.
      repetition_penalty: above 0. Positive logits of tokens in the prompt or the generated text are
        divided by the penalty, negative logits are multiplied by it (1909.05858).
      presence_penalty: subtracted from the logits of tokens that were generated before. Tokens of
        the prompt do not count (the definition of OpenAI and vLLM).
      frequency_penalty: subtracted from a token's logit once for each time the token was generated
        before. Tokens of the prompt do not count (the definition of OpenAI and vLLM).
      logits_processor: a function ``(logits [B, V], prefix) -> logits`` or a
        ``processors.LogitsProcessor``; hashable, because it is a part of the compiled program. It
        is applied after the penalties.
      process_drafts: whether the logits processor also changes the drafter's logits. The law of the
        output is the same either way.
      greedy: derived from ``temperature``; pass False only to force the sampled program at
        temperature 0.

    Raises:
      ValueError: a value is out of its range. Python and NumPy values are checked here, device
        arrays by ``check``, which ``decode`` calls.
      TypeError: there is no setting of a name; the error names the nearest one.
    """

    temperature: jax.typing.ArrayLike = 0.0
    top_k: jax.typing.ArrayLike | None = None
    top_p: jax.typing.ArrayLike | None = None
    min_p: jax.typing.ArrayLike | None = None
    repetition_penalty: jax.typing.ArrayLike | None = None
    logit_bias: jax.typing.ArrayLike | None = None
    presence_penalty: jax.typing.ArrayLike | None = None
    frequency_penalty: jax.typing.ArrayLike | None = None
    logits_processor: Any = static(default=None)
    process_drafts: bool = static(default=True)
    greedy: bool = static(default=None)  # ``__post_init__`` derives it

    def __post_init__(self):
        number = isinstance(self.temperature, numbers.Real | np.generic)
        if number:  # also where `dataclasses.replace` brings an earlier answer along
            cold = bool(self.temperature == 0)
            object.__setattr__(self, "greedy", cold and self.greedy is not False)
        elif self.greedy is None:
            object.__setattr__(self, "greedy", False)
        # device arrays wait for `check`: a pytree is rebuilt with any values, and nothing may sync
        self._check_values(lambda x: not isinstance(x, jax.Array))

    def __repr__(self) -> str:
        """Returns the call that makes this object, with the settings that are not the default."""
        fields = [field for field in dataclasses.fields(self) if field.name != "greedy"]
        given = [(field, getattr(self, field.name)) for field in fields]
        # an array is always shown: it may be traced, and it selects the sampled program
        changed = [
            f"{field.name}={value!r}"
            for field, value in given
            if not (isinstance(value, numbers.Real) and value == field.default)
            and value is not field.default
        ]
        if isinstance(self.temperature, numbers.Real) and self.greedy != (self.temperature == 0):
            changed.append(f"greedy={self.greedy}")
        return f"Sampling({', '.join(changed)})"

    def check(self) -> None:
        """Checks all settings, those in device arrays as well.

        Raises:
          ValueError: a value is out of its range, or ``logits_processor`` is not a logits
            processor.
        """
        self._check_values(lambda x: True)
        if self.temperature is None:
            raise ValueError(
                "temperature=None: give a number or one value for each row; 0 is greedy decoding"
            )
        processors.check_processor(self.logits_processor)
        if self.greedy:
            _check("temperature", self.temperature, lambda x: x == 0, "0 where greedy=True")

    def _check_values(self, wanted) -> None:
        for name, accept, accepted in (
            ("temperature", lambda x: (x >= 0) & np.isfinite(x), "at least 0, and finite"),
            ("top_k", _is_count, "a whole number of at least 0 (0 keeps all), below 2**31"),
            ("top_p", lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
            ("min_p", lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
            ("repetition_penalty", lambda x: (x > 0) & np.isfinite(x), "above 0, and finite"),
            ("presence_penalty", np.isfinite, "finite; above 0 it makes repeats less likely"),
            ("frequency_penalty", np.isfinite, "finite; above 0 it makes repeats less likely"),
            ("logit_bias", lambda x: ~np.isnan(x) & (x < np.inf), "finite numbers or -inf"),
        ):
            if wanted(getattr(self, name)):
                _check(name, getattr(self, name), accept, accepted)

    def rows(self, batch: int) -> Sampling:
        """Returns these settings as arrays with one value for each row.

        Args:
          batch: B, the number of rows.

        Returns:
          a ``Sampling`` whose settings are arrays ``[B]``, ``logit_bias`` float32 ``[B, V]``;
          settings that are None stay None.

        Raises:
          ValueError: an array has another number of rows or another rank.
        """

        def row(name: str, dtype=jnp.float32, rank=1) -> jax.Array | None:
            if getattr(self, name) is None:
                return None
            x = jnp.asarray(getattr(self, name), dtype)
            accepted = "a scalar or [B]" if rank == 1 else "[V] or [B, V]"
            if not rank - 1 <= x.ndim <= rank:
                raise ValueError(f"{name} has shape {x.shape}: give {accepted}")
            shape = (batch,) + x.shape[x.ndim - rank + 1 :]
            if x.ndim == rank and x.shape[0] != batch:
                raise ValueError(
                    f"{name} has {x.shape[0]} rows, the batch has {batch}: give {accepted}"
                )
            return jnp.broadcast_to(x, shape)

        return dataclasses.replace(
            self,
            temperature=row("temperature"),
            top_k=row("top_k", jnp.int32),
            top_p=row("top_p"),
            min_p=row("min_p"),
            repetition_penalty=row("repetition_penalty"),
            logit_bias=row("logit_bias", rank=2),
            presence_penalty=row("presence_penalty"),
            frequency_penalty=row("frequency_penalty"),
        )

    def per_row(self) -> list[str]:
        """The names of the settings that have one value for each row."""
        names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
        names = *names, "presence_penalty", "frequency_penalty", "logit_bias"
        given = {name: np.ndim(getattr(self, name)) for name in names}
        return [name for name, axes in given.items() if axes > (name == "logit_bias")]

    @property
    def needs_prefix(self) -> bool:
        """Whether the law at a node depends on more than its logits."""
        given = (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            self.logits_processor,
        )
        return any(setting is not None for setting in given)

    @property
    def adjusts(self) -> bool:
        """Whether ``adjust`` changes anything."""
        return self.needs_prefix or self.logit_bias is not None

    @property
    def for_drafts(self) -> Sampling:
        """The settings of drafters: these ones, without the logits processor if ``process_drafts``
        is False."""
        return self if self.process_drafts else dataclasses.replace(self, logits_processor=None)

    def adjust(self, logits: jax.Array, prefix: Prefix | None) -> jax.Array:
        """Applies bias, penalties and logits processor, the steps that greedy decoding needs.

        The settings must be arrays of rows (see ``rows``).

        Args:
          logits: float32 ``[B, V]``, the model's logits.
          prefix: the tokens before the position; needed where ``needs_prefix``.

        Returns:
          logits float32 ``[B, V]``.
        """
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if self.repetition_penalty is not None:
            penalty = _column(self.repetition_penalty)
            penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(_count(prefix, logits.shape[-1]) > 0, penalised, logits)
        if self.presence_penalty is not None or self.frequency_penalty is not None:
            said = _count(prefix, logits.shape[-1], generated=True)
            if self.frequency_penalty is not None:
                logits = logits - _column(self.frequency_penalty) * said
            if self.presence_penalty is not None:
                logits = logits - _column(self.presence_penalty) * (said > 0)
        return (
            logits
            if self.logits_processor is None
            else processors.apply_processor(self.logits_processor, logits, prefix)
        )

    def probabilities(self, logits: jax.Array, prefix: Prefix | None = None) -> jax.Array:
        """Returns the law of the next token.

        The settings must be arrays of rows (see ``rows``). A token whose logit is NaN has
        probability 0.

        Args:
          logits: float32 ``[B, V]``, the model's logits.
          prefix: the tokens before the position; needed where ``needs_prefix``.

        Returns:
          probabilities float32 ``[B, V]``; a row of zeros where no token has a finite logit, which
          ends the text of that row.
        """
        logits = self.adjust(logits, prefix)
        logits = jnp.where(logits == logits, logits, -jnp.inf)
        temperature = jnp.asarray(self.temperature)
        cold = temperature < COLDEST
        # the greatest logit is subtracted before the division: after it, the two roundings of a
        # large number, one of them perhaps in a fused multiply-add, could differ too much for exp
        top = jnp.max(logits, axis=-1, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        scaled = (logits - top) / jnp.where(cold, 1.0, temperature)[:, None]
        if self.top_k is not None:
            vocab = logits.shape[-1]
            top_k = jnp.asarray(self.top_k)
            wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
            ordered = _ordered(scaled)
            edge = _threshold(ordered, lambda kept: jnp.sum(kept, axis=-1) >= wanted)
            scaled = jnp.where(ordered >= edge[:, None], scaled, -jnp.inf)
        weights = jnp.exp(scaled)
        p = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if self.top_p is not None:
            ordered = _ordered(p)
            mass = jnp.minimum(self.top_p, 1.0)

            def enough(kept):
                return jnp.sum(jnp.where(kept, p, 0.0), axis=-1) >= mass

            edge = _threshold(ordered, enough)
            p = jnp.where((ordered >= edge[:, None]) | (mass >= 1)[:, None], p, 0.0)
        if self.min_p is not None:
            p = jnp.where(p >= _column(self.min_p) * jnp.max(p, axis=-1, keepdims=True), p, 0.0)
        if self.top_p is not None or self.min_p is not None:
            p = p / jnp.sum(p, axis=-1, keepdims=True)
        best = drawing.argmax(logits)[:, None]
        one_hot = jnp.arange(logits.shape[-1]) == best
        p = jnp.where(cold[:, None], one_hot.astype(p.dtype), p)
        return sharding.spread(jnp.where(best < 0, 0.0, p), DATA, MODEL)


def _column(setting: jax.typing.ArrayLike) -> jax.Array:
    """Returns a setting ``[B]`` as ``[B, 1]``, which broadcasts with logits."""
    return jnp.asarray(setting)[:, None]


def _count(prefix: Prefix | None, vocab: int, generated: bool = False) -> jax.Array:
    """Returns float32 ``[B, V]``: how often each token is in the prefix or, with ``generated``, in
    the part of the prefix that was generated."""
    prefix = required(prefix, "prefix")
    batch, size = prefix.tokens.shape
    index = jnp.arange(size)
    valid = index < prefix.length[:, None]
    if generated and prefix.begin is not None:
        valid &= index >= prefix.begin[:, None]
    tokens = jnp.concatenate([jnp.where(valid, prefix.tokens, -1), prefix.path], axis=1)
    where = jnp.where(tokens >= 0, tokens, vocab)
    rows = jnp.arange(batch)[:, None]
    return jnp.zeros((batch, vocab), jnp.float32).at[rows, where].add(1.0, mode="drop")


def _ordered(x: jax.Array) -> jax.Array:
    """Returns float32 numbers as uint32 numbers of the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(ordered: jax.Array, enough) -> jax.Array:
    """Returns uint32 ``[B]``, the largest ``t`` with ``enough(ordered >= t)``: bit by bit, without
    a sort."""

    def step(i, edge):
        trial = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(ordered >= trial[:, None]), trial, edge)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(ordered.shape[0], jnp.uint32))


def _is_count(x):
    return (x >= 0) & (x < 2**31) & (x == np.floor(x))


def _check(name, value, accept, accepted):
    """Raises ``ValueError`` for a concrete value out of range; traced values are not checked."""
    if isinstance(value, str):  # NumPy would read a text such as "1" as a number
        raise ValueError(f"{name}={value!r} is a text: it must be {accepted}")
    numeric = numbers.Number | np.generic | np.ndarray | jax.Array | list | tuple
    if not isinstance(value, numeric) or isinstance(value, Tracer):
        return
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return  # another process holds a part of it
    value = np.asarray(value)
    # numbers that no other dtype can hold, such as integers of more than 64 bits, become objects
    real = jnp.issubdtype(value.dtype, np.number) and not np.iscomplexobj(value)
    if not (real or value.dtype == bool) or not np.all(accept(value)):
        raise ValueError(f"{name}={value} is out of range: it must be {accepted}")
