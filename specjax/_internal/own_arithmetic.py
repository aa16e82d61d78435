"""Settings of JAX under which the loop is traced, whatever the program around it sets.

Under ``jax_enable_x64`` a sum of int32 is int64, so that the counters of the loop would change
their dtype from round to round; strict promotion of ranks refuses ``[N] < [B, 1]``.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

_OWN = {
    "jax_enable_x64": (jax.enable_x64, False),
    "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, "allow"),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
}


def own_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: ``function`` is traced in 32 bits, and ranks and dtypes are promoted in it."""

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        with contextlib.ExitStack() as settings:
            for name, (setting, own) in _OWN.items():
                if getattr(jax.config, name) != own:
                    settings.enter_context(setting(own))
            return function(*args, **given)

    return call
