"""Rematerialisation: the backward pass recomputes the inside of a layer instead of keeping it.

Training requests it around a whole loss (``rematerialised``); the code that runs layers marks each
of them (``layer``). Decoding has no backward pass and is not affected.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

import jax

_asked = contextvars.ContextVar("rematerialised", default=False)


@contextlib.contextmanager
def rematerialised(asked: bool = True):
    """A context in which functions are traced with their layers rematerialised, if ``asked``."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def layer(function: Callable) -> Callable:
    """Marks a pure ``function`` of arrays as a layer, of which only the inputs are kept.

    Layers inside of it are part of it. Without a request the result is ``function`` itself.
    """
    if not _asked.get():
        return function

    def inside(*args):
        with rematerialised(False):
            return function(*args)

    return jax.checkpoint(inside)
