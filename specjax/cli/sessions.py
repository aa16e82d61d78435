"""The sessions and datastores from which the commands' drafters draft."""

from __future__ import annotations

import argparse
import os

from ..drafters import registry
from ..drafters.indexed import IndexedDrafter
from ..text import retrieval
from ..text.retrieval import Retrieval
from ..text.session import Session
from .outputs import check_file
from .renamed import renamed

SESSIONS = ("suffix", "sam")  # drafters that can draft from a session
SESSION_TOKENS = 2**16  # the most tokens that a session holds, by default


def session_of(lm, drafter, path: str, capacity: int | None) -> Session:
    """Returns the session in a file, or a new session if the file does not exist.

    Raises:
      ValueError: the file cannot be written later; the drafter reads no session.
    """
    check_file("--session", path)
    capacity = SESSION_TOKENS if capacity is None else capacity
    if drafter not in SESSIONS and not isinstance(drafter, IndexedDrafter):
        raise ValueError(f"--session: give --drafter {' or '.join(SESSIONS)} with it")
    with renamed(capacity="session_tokens"):
        if os.path.exists(path):
            return Session.load(lm, path, drafter, capacity)
        return Session(lm, drafter, capacity)


def retrieval_of(lm, arguments: argparse.Namespace) -> Retrieval:
    """Returns the drafter that drafts from the datastore of the arguments, and from the session."""
    if arguments.drafter not in (None, *SESSIONS):
        raise ValueError(f"--datastore: leave --drafter out, or give {' or '.join(SESSIONS)}")
    own = registry.drafter_class(arguments.drafter)() if arguments.drafter else None
    session = None
    if arguments.session:
        session = session_of(
            lm, own or retrieval.USUAL, arguments.session, arguments.session_tokens
        )
    rows = max(1, getattr(arguments, "batch", 8))  # a batch of none is refused by its own name
    with renamed(rows="batch"):
        return Retrieval(lm, arguments.datastore, own, rows, session)


def save_session(arguments: argparse.Namespace, options: dict) -> None:
    """Writes the session of ``options.options_of`` back to its file."""
    if arguments.session:
        options["drafter"].save(arguments.session)
