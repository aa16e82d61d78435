"""The compiled loop: prompt reading, rounds, the state that rounds carry, and what they count."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from . import reference
    from .inputs import DecodeInputs
    from .round import VerifiedRound, acceptance_keys, commit_round, round_context
    from .state import Decoded, State
    from .stats import Stats
    from .stepwise import init_state, step

__all__ = [
    "DecodeInputs",
    "Decoded",
    "State",
    "Stats",
    "VerifiedRound",
    "acceptance_keys",
    "commit_round",
    "init_state",
    "reference",
    "round_context",
    "step",
]

_LAZY = {
    "DecodeInputs": "inputs",
    "Decoded": "state",
    "State": "state",
    "Stats": "stats",
    "VerifiedRound": "round",
    "acceptance_keys": "round",
    "commit_round": "round",
    "init_state": "stepwise",
    "reference": "reference",
    "round_context": "round",
    "step": "stepwise",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
