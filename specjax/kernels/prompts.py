"""Whether a pass that is being traced reads a prompt, so that no round repeats its results."""

from __future__ import annotations

import contextlib

import jax

_reading = jax.make_user_context(default_value=False)  # part of the key of compiled functions


@contextlib.contextmanager
def reading():
    """A context in which passes are traced that read prompts.

    Plain and speculative decoding read a prompt alike, but may see one token alone or beside
    others afterwards. A backend may therefore read prompts by operations whose last bits depend on
    the width of a pass, where these are faster.
    """
    with _reading(True):
        yield


def are_read() -> bool:
    """Whether the pass that is being traced reads a prompt."""
    return _reading.value
