"""Drafters on disk, in the layouts in which they are published.

``load_drafter`` recognises the layout of a folder and reads it; ``save_drafter`` writes one. Each
layout is one module of this package; ``formats.py`` says what such a module must hold, and
``README.md`` describes the layouts of EAGLE, EAGLE-3, DFlash and their variants tensor by tensor.
"""

from .formats import FORMATS, Layout
from .loading import HeadLM, holds_heads, load_drafter, says_heads
from .saving import save_drafter

__all__ = [
    "FORMATS",
    "HeadLM",
    "Layout",
    "holds_heads",
    "load_drafter",
    "save_drafter",
    "says_heads",
]
