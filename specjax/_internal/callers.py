"""Who called this package."""

from __future__ import annotations

import sys

PACKAGE = __name__.partition(".")[0]


def outside() -> int:
    """The ``stacklevel`` with which ``warnings.warn``, called where this function is called, names
    the line outside this package that led there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        frame, level = frame.f_back, level + 1
    return level
