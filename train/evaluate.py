"""Held-out measures: weighted means over a few batches, the same at every call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sharding

KEPT = "decoded_kept_"  # followed by a number, after a set's name: see ``decoding.make_decoded``


class Mean(NamedTuple):
    """The mean ``total / max(count, 1)``, of scalars.

    Totals and counts are summed over parts of a batch, so that the mean over all parts is exact.
    ``share`` is the factor of this mean in a loss of several means.
    """

    total: jax.Array
    count: jax.Array
    share: float = 1.0

    @property
    def value(self) -> jax.Array:
        return self.total / jnp.maximum(self.count, 1.0)


def mean(values: jax.Array, weight: jax.typing.ArrayLike = 1.0, share: float = 1.0) -> Mean:
    """Returns the mean of ``values``, weighted by an array or by one number."""
    weight = jnp.broadcast_to(weight, values.shape)
    return Mean(jnp.sum(values * weight), jnp.sum(weight), share)


def weighed(terms: Mapping[str, Mean]) -> jax.Array:
    """Returns the loss of several terms: the sum of the means, each times its share."""
    return sum(term.share * term.value for term in terms.values())


def over_all(parts: Sequence[Mean]) -> float:
    """Returns the mean over all parts: the sum of the totals divided by the sum of the counts."""
    total, count = (sum(float(part[i]) for part in parts) for i in (0, 1))
    return total / max(count, 1.0)


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """``evaluate(params, frozen) -> {set name + measure name: mean}``, see ``make_evaluate``."""

    measure: Callable
    sets: Mapping[str, Sequence[tuple]]

    @functools.cached_property
    def _compiled(self):
        @jax.jit
        def compiled(params, frozen, *batch):
            return self.measure(params, frozen, *sharding.rows(batch))

        return compiled

    def names(self, params, frozen) -> list[str]:
        """Returns the names of all measures without compiling anything."""
        return [
            prefix + name
            for prefix, batches in self.sets.items()
            for name in jax.eval_shape(self.measure, params, frozen, *batches[0])
        ]

    def __call__(self, params, frozen) -> dict[str, float]:
        measured = {}
        for prefix, batches in self.sets.items():
            means = [self._compiled(params, frozen, *batch) for batch in batches]
            for name, first in means[0].items():
                if isinstance(first, Mean):
                    measured[prefix + name] = over_all([found[name] for found in means])
                else:  # a batch in which no prediction counts has no loss, rather than zero
                    measured[prefix + name] = sum(
                        float(term.share) * over_all([found[name][own] for found in means])
                        for own, term in first.items()
                    )
        return measured


def make_evaluate(measure: Callable, sets: Mapping[str, Sequence[tuple]]) -> Evaluate:
    """Held-out measures over some sets of rows.

    Args:
      measure: a pure function ``measure(params, frozen, tokens [B, T + 1], weight [B, T]) ->
        {name: Mean}``. Instead of a mean it may return the terms of a loss, ``{term: Mean}``, see
        ``weighed``.
      sets: the batches of each prefix, ``(tokens int32 [B, T + 1], weight float [B, T])`` and
        further arguments of ``measure``; the weights say which predictions count.
    """
    return Evaluate(measure, sets)
