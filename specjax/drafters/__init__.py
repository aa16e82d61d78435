"""Drafters: what proposes tokens. One method, one file; ``registry.py`` lists them all.

Tables and lookups draft from the text, draft models and a part of the target's own layers by
passes of their own, heads from the target's hidden states (``heads.py``), and ``Adaptive``,
``Hybrid``, ``Cascade``, ``Union`` and their like are made of other drafters. A drafter is imported
when it is first asked for: heads need Flax, and ``import specjax`` does not.
"""

from . import registry
from .draft_length import (
    POLICIES,
    DraftLengthPolicy,
    ExLlama,
    Goodput,
    HuggingFace,
    Schedule,
    SuffixMatch,
)

__all__ = ["POLICIES", "DraftLengthPolicy", "ExLlama", "Goodput", "HuggingFace", "Schedule"]
__all__ += ["SuffixMatch", "registry"]
__all__ += sorted(entry.class_name for entry in registry.entries())


def __getattr__(name: str):
    for entry in registry.entries():
        if entry.class_name == name:
            return entry.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *(entry.class_name for entry in registry.entries())})
