"""Held-out measures: weighted means over a few batches, the same at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

Ratio = tuple[jax.Array, jax.Array]  # (total, count), scalars; sums of ratios are exact means


def mean(values: jax.Array, weight: jax.Array) -> Ratio:
    """The weighted mean of ``values [B, T]`` as a ratio that can be added up over batches."""
    return jnp.sum(values * weight), jnp.sum(weight)


def make_evaluate(measure: Callable, sets: Mapping[str, Sequence[tuple]]) -> Callable:
    """``evaluate(params, frozen) -> {set name + measure name: mean}``.

    Args:
      measure: ``measure(params, frozen, tokens [B, T + 1], weight [B, T]) -> {name: Ratio}``, pure.
      sets: by prefix, batches ``(tokens int32 [B, T + 1], weight float [B, T])``; the weights say
        which predictions count.
    """
    compiled = jax.jit(measure)

    def evaluate(params, frozen) -> dict[str, float]:
        measured = {}
        for prefix, batches in sets.items():
            ratios = [compiled(params, frozen, *batch) for batch in batches]
            for name in ratios[0]:
                total, count = (sum(float(ratio[name][i]) for ratio in ratios) for i in (0, 1))
                measured[prefix + name] = total / max(count, 1.0)
        return measured

    return evaluate
