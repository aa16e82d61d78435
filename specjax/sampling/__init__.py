"""The law that tokens are drawn from, draws from laws, and logits processors."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from . import processors
    from .distribution import Prefix, Sampling

__all__ = ["Prefix", "Sampling", "processors"]

_LAZY = {"Prefix": "distribution", "Sampling": "distribution", "processors": "processors"}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
