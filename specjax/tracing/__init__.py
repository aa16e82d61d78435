"""``trace`` decodes a text round by round and shows all rounds on one HTML page."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .result import Trace

__all__ = ["Trace"]

_LAZY = {"Trace": "result"}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
