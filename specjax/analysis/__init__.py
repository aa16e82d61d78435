"""Measurements around the loop: timing, comparison, memory, plans and the search for trees."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .check_contract import ContractReport, check_drafter, check_target
    from .comparison import Comparison, repeated_ngrams
    from .memory import MemoryPlan, plan_memory
    from .plan.api import Plan

__all__ = [
    "Comparison",
    "ContractReport",
    "MemoryPlan",
    "Plan",
    "check_drafter",
    "check_target",
    "plan_memory",
    "repeated_ngrams",
]

_LAZY = {
    "Comparison": "comparison",
    "ContractReport": "check_contract",
    "MemoryPlan": "memory",
    "Plan": "plan.api",
    "check_drafter": "check_contract",
    "check_target": "check_contract",
    "plan_memory": "memory",
    "repeated_ngrams": "comparison",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
