"""Measurements around the loop: timing, comparison, memory, plans and the search for trees."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .comparison import Comparison, repeated_ngrams
    from .contract_report import ContractReport
    from .drafter_checks import check_drafter
    from .memory import MemoryPlan, plan_memory
    from .plan.api import Plan
    from .target_checks import check_target

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
    "ContractReport": "contract_report",
    "MemoryPlan": "memory",
    "Plan": "plan.api",
    "check_drafter": "drafter_checks",
    "check_target": "target_checks",
    "plan_memory": "memory",
    "repeated_ngrams": "comparison",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
