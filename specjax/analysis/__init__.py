"""Measurements around the loop: timing, comparison, memory, plans and the search for trees."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .audit import audit_rule, audit_samples
    from .audit_report import AuditReport
    from .calculator import Calculation, calculate
    from .comparison import Comparison, repeated_ngrams
    from .contract_report import ContractReport
    from .drafter_checks import check_drafter
    from .engine_audit import audit_callable
    from .memory import MemoryPlan, plan_memory
    from .plan.api import Plan
    from .quantization import QuantizationError, quantization_error
    from .rule_quality import Quality, quality
    from .target_checks import check_target
    from .transformers_audit import audit_transformers

__all__ = [
    "AuditReport",
    "Calculation",
    "Comparison",
    "ContractReport",
    "MemoryPlan",
    "Plan",
    "Quality",
    "QuantizationError",
    "audit_callable",
    "audit_rule",
    "audit_samples",
    "audit_transformers",
    "calculate",
    "check_drafter",
    "check_target",
    "plan_memory",
    "quality",
    "quantization_error",
    "repeated_ngrams",
]

_LAZY = {
    "AuditReport": "audit_report",
    "audit_callable": "engine_audit",
    "audit_rule": "audit",
    "audit_samples": "audit",
    "audit_transformers": "transformers_audit",
    "Calculation": "calculator",
    "calculate": "calculator",
    "Comparison": "comparison",
    "ContractReport": "contract_report",
    "MemoryPlan": "memory",
    "Plan": "plan.api",
    "QuantizationError": "quantization",
    "check_drafter": "drafter_checks",
    "check_target": "target_checks",
    "Quality": "rule_quality",
    "plan_memory": "memory",
    "quality": "rule_quality",
    "quantization_error": "quantization",
    "repeated_ngrams": "comparison",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
