"""Measurements around the loop: timing, comparison, memory, plans and the search for trees."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .comparison import Comparison, repeated_ngrams
    from .memory import MemoryPlan, plan_memory
    from .plan.api import Plan

__all__ = ["Comparison", "MemoryPlan", "Plan", "plan_memory", "repeated_ngrams"]

_LAZY = {
    "Comparison": "comparison",
    "MemoryPlan": "memory",
    "Plan": "plan.api",
    "plan_memory": "memory",
    "repeated_ngrams": "comparison",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
