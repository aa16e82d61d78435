"""The compiled loop: prompt reading, rounds, the state that rounds carry, and what they count."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from . import reference
    from .inputs import DecodeInputs
    from .loop import Decoded
    from .state import State
    from .stats import Stats

__all__ = ["DecodeInputs", "Decoded", "State", "Stats", "reference"]

_LAZY = {
    "DecodeInputs": "inputs",
    "Decoded": "loop",
    "State": "state",
    "Stats": "stats",
    "reference": "reference",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
