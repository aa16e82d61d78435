"""Decodes files of prompts by continuous batching: new prompts take the place of finished rows."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .jsonl_input import Broken
    from .offline import Progress, Served
    from .scheduler import Row

__all__ = ["Broken", "Progress", "Row", "Served"]

_LAZY = {"Broken": "jsonl_input", "Progress": "offline", "Row": "scheduler", "Served": "offline"}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
