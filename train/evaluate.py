"""Held-out measures: weighted means over a few batches, the same at every call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sharding

KEPT = "decoded_kept_"  # and a number, behind a set's name: see ``decoding.make_decoded``


class Mean(NamedTuple):
    """``total / max(count, 1)``, scalars; totals and counts add up over parts of a batch, so that
    the mean over all is exact. ``share``: its factor in a loss of several."""

    total: jax.Array
    count: jax.Array
    share: float = 1.0

    @property
    def value(self) -> jax.Array:
        return self.total / jnp.maximum(self.count, 1.0)


def mean(values: jax.Array, weight: jax.typing.ArrayLike = 1.0, share: float = 1.0) -> Mean:
    """The mean of ``values``, each with a weight of its own, or all with one."""
    weight = jnp.broadcast_to(weight, values.shape)
    return Mean(jnp.sum(values * weight), jnp.sum(weight), share)


def weighed(terms: Mapping[str, Mean]) -> jax.Array:
    """The loss that terms make up: the sum of the means, each times its share."""
    return sum(term.share * term.value for term in terms.values())


def over_all(parts: Sequence[Mean]) -> float:
    """The mean over all parts: totals and counts add up before one is divided by the other."""
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
        """Of all that is measured; nothing is compiled."""
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
                else:  # a batch where nothing counts is no loss of zero
                    measured[prefix + name] = sum(
                        float(term.share) * over_all([found[name][own] for found in means])
                        for own, term in first.items()
                    )
        return measured


def make_evaluate(measure: Callable, sets: Mapping[str, Sequence[tuple]]) -> Evaluate:
    """Held-out measures over some sets of rows.

    Args:
      measure: ``measure(params, frozen, tokens [B, T + 1], weight [B, T]) -> {name: Mean}``, pure;
        or in the place of a mean the terms of a loss, ``{term: Mean}``, see ``weighed``.
      sets: by prefix, batches ``(tokens int32 [B, T + 1], weight float [B, T])`` and whatever else
        ``measure`` takes; the weights say which predictions count.
    """
    return Evaluate(measure, sets)
