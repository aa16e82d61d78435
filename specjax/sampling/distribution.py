"""The law that tokens are drawn from; ``drawing.py`` draws from it.

One function turns raw logits into the law, for the target and for the drafter alike: bias, then
the penalties, then a law of one's own, then temperature, then top-k, top-p, min-p (the order of
Hugging Face). Acceptance rules compare the two laws *after* it, so whatever is set stays exact.
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
      tokens: int32 ``[B, L]``, of which the first ``length`` (int32 ``[B]``) count.
      path: int32 ``[B, K]``, further tokens in their order, -1 where there is none.
      begin: int32 ``[B]`` or None, where what was generated begins in ``tokens``.
      state: what a logits processor carries (see ``processors.LogitsProcessor``): after the
        committed prefix, and within the processor's own call after the whole prefix; None where it
        carries nothing.
      params: ``params["logits_processor"]``, the arrays of a logits processor.
    """

    tokens: jax.Array
    length: jax.Array
    path: jax.Array
    begin: jax.Array | None = None
    state: Any = None
    params: Any = None

    def last(self) -> jax.Array:
        """int32 ``[B]``, the token before the position."""
        root = jnp.take_along_axis(self.tokens, self.length[:, None] - 1, axis=1)
        whole = jnp.concatenate([root, self.path], axis=1)
        at = jnp.max(jnp.where(whole >= 0, jnp.arange(whole.shape[1]), 0), axis=1)
        return jnp.take_along_axis(whole, at[:, None], axis=1)[:, 0]


@pytree_dataclass
class Sampling:
    """Settings of how tokens are drawn, each a scalar or an array with one value for each row.

    Attributes:
      temperature: at least 0. The Python number 0 (default) selects greedy decoding, compiled
        without any softmax; an array selects the sampled program, exact for its rows at zero.
      top_k: keep the ``top_k`` most probable tokens (ties at the threshold are kept); 0: all.
      top_p: keep the smallest set of most probable tokens whose mass reaches ``top_p``, in (0, 1];
        ties with the last of them are kept.
      min_p: keep tokens at least ``min_p`` times as probable as the most probable, in [0, 1].
      logit_bias: float32 ``[V]`` or ``[B, V]``, added to the logits.
      repetition_penalty: above 0; positive logits of tokens already present (prompt included) are
        divided by it, negative ones multiplied (1909.05858).
      presence_penalty, frequency_penalty: subtracted from the logits of tokens that were generated
        before (the prompt does not count): once, and as often as they were (the definitions of
        OpenAI and vLLM).
      logits_processor: a function ``(logits [B, V], prefix) -> logits`` or a
        ``processors.LogitsProcessor``; hashable, a part of the compiled program. It
        applies after the penalties.
      process_drafts: whether drafters draw from it as well. The output's law is the same either
        way.
      greedy: derived; give it only to force the sampled program at temperature 0.

    Raises:
      ValueError: a value outside of its range: here for Python and NumPy values, by ``check``
        (which ``decode`` calls) for device arrays.
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
        """The call that makes it: only the settings that differ from their default."""
        fields = [field for field in dataclasses.fields(self) if field.name != "greedy"]
        given = [(field, getattr(self, field.name)) for field in fields]
        # an array is shown whatever it holds: it may be traced, and it selects the sampled program
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
        """Raises ``ValueError`` for values out of range, of device arrays as well, and for a
        logits processor that is none."""
        self._check_values(lambda x: True)
        if self.temperature is None:
            raise ValueError("temperature=None: give a number or one value a row; 0 is greedy")
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
            ("presence_penalty", np.isfinite, "finite; above 0 it discourages"),
            ("frequency_penalty", np.isfinite, "finite; above 0 it discourages"),
            ("logit_bias", lambda x: ~np.isnan(x) & (x < np.inf), "numbers or -inf"),
        ):
            if wanted(getattr(self, name)):
                _check(name, getattr(self, name), accept, accepted)

    def rows(self, batch: int) -> Sampling:
        """Every setting as an array ``[B]`` (the bias ``[B, V]``)."""

        def row(x: jax.typing.ArrayLike, dtype, rank=1) -> jax.Array:
            x = jnp.asarray(x, dtype)
            if not rank - 1 <= x.ndim <= rank:
                accepted = "a scalar or [B]" if rank == 1 else "[V] or [B, V]"
                raise ValueError(f"a sampling setting has shape {x.shape}: give {accepted}")
            shape = (batch,) + x.shape[x.ndim - rank + 1 :]
            if x.ndim == rank and x.shape[0] != batch:
                raise ValueError(
                    f"a sampling setting has {x.shape[0]} rows, the batch has {batch}: "
                    "give a scalar or one value a row"
                )
            return jnp.broadcast_to(x, shape)

        def given(x: jax.typing.ArrayLike | None, dtype, rank=1) -> jax.Array | None:
            return None if x is None else row(x, dtype, rank)

        f32 = jnp.float32
        return Sampling(
            temperature=row(self.temperature, f32),
            top_k=given(self.top_k, jnp.int32),
            top_p=given(self.top_p, f32),
            min_p=given(self.min_p, f32),
            repetition_penalty=given(self.repetition_penalty, f32),
            logit_bias=given(self.logit_bias, f32, rank=2),
            presence_penalty=given(self.presence_penalty, f32),
            frequency_penalty=given(self.frequency_penalty, f32),
            logits_processor=self.logits_processor,
            process_drafts=self.process_drafts,
            greedy=self.greedy,
        )

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
        """What drafters draw by: the same, unless they are to leave the law out."""
        return self if self.process_drafts else dataclasses.replace(self, logits_processor=None)

    def adjust(self, logits: jax.Array, prefix: Prefix | None) -> jax.Array:
        """Logits float32 ``[B, V]`` after bias, penalties and logits processor, of raw ``logits``
        float32 ``[B, V]``: the part of the law that greedy decoding needs; after ``rows``."""
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
        """The law: raw float32 logits ``[B, V]`` to probabilities ``[B, V]``; after ``rows``.

        A logit that is NaN has no probability. Zeros where nothing has: the law ends the text.
        """
        logits = self.adjust(logits, prefix)
        logits = jnp.where(logits == logits, logits, -jnp.inf)
        temperature = jnp.asarray(self.temperature)
        cold = temperature < COLDEST
        # the greatest logit goes first: after the division the two roundings of a large number, one
        # of which may be within a fused multiply-add, differ by more than exp can take
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
    """``[B, 1]``, a setting ``[B]`` beside logits."""
    return jnp.asarray(setting)[:, None]


def _count(prefix: Prefix | None, vocab: int, generated: bool = False) -> jax.Array:
    """float32 ``[B, V]``: how often a token is in the prefix, or in its ``generated`` part."""
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
    """float32 to uint32, keeping the order of the numbers."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(ordered: jax.Array, enough) -> jax.Array:
    """uint32 ``[B]``: the largest ``t`` for which ``enough(ordered >= t)``, bit by bit, no sort."""

    def step(i, edge):
        trial = edge | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(ordered >= trial[:, None]), trial, edge)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(ordered.shape[0], jnp.uint32))


def _is_count(x):
    return (x >= 0) & (x < 2**31) & (x == np.floor(x))


def _check(name, value, accept, accepted):
    """Raises for a concrete value out of range; traced values are the caller's word."""
    if isinstance(value, str):  # which NumPy would read as a number
        raise ValueError(f"{name}={value!r} is a text: give {accepted}")
    numeric = numbers.Number | np.generic | np.ndarray | jax.Array | list | tuple
    if not isinstance(value, numeric) or isinstance(value, Tracer):
        return
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return  # another process holds a part of it
    value = np.asarray(value)
    # objects are what no array holds, such as integers of more than 64 bits
    if value.dtype == object or not np.all(accept(value)):
        raise ValueError(f"{name}={value} is out of range: it must be {accepted}")
