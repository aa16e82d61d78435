"""Rematerialisation: on the way back, what is inside a layer is computed anew, not kept.

Training asks for it around a whole loss (``rematerialised``); what the layers are is said where
they are run (``layer``). Decoding has no way back, and is not touched.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable

import jax

_asked = contextvars.ContextVar("rematerialised", default=False)


@contextlib.contextmanager
def rematerialised(asked: bool = True):
    """Within it, functions are traced with their layers rematerialised, if ``asked``."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def layer(function: Callable) -> Callable:
    """A pure ``function`` of arrays, of which what goes in is kept; layers within it are part of
    it. Where nobody has asked: ``function`` itself."""
    if not _asked.get():
        return function

    def inside(*args):
        with rematerialised(False):
            return function(*args)

    return jax.checkpoint(inside)
