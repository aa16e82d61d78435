"""specjax: speculative decoding in JAX.

Text: ``load`` a model, then ``generate``, ``stream_text`` or ``Chat``; ``serve_offline`` for files
of prompts; ``compare``, ``plan`` and ``trace`` to see what speculation does. ``Drafting`` and
``Sampling`` hold the settings that all of these take.

Arrays: ``decode`` and ``stream`` take any ``Target``, ``Drafter`` and ``Rule``; ``draft_step``,
``verify`` and ``accept`` are parts of one round, see ``decoding.stepwise``; ``check_target`` and
``check_drafter`` test a target or drafter of your own; ``audit_rule``, ``audit_samples``,
``audit_callable`` and ``audit_transformers`` hold a rule, or what another engine draws, against an
exact law.

All else lies in namespaces: ``acceptance`` (rules), ``analysis``, ``checkpoints`` (drafters on
disk), ``decoding``, ``drafters``, ``models``, ``sampling`` (logits processors), ``serving``,
``sharding``, ``text``, ``tracing``, ``trees`` (shapes of drafts), ``types`` (what flows between
targets, drafters and rules).
"""

from typing import TYPE_CHECKING

from ._internal import lazy

if TYPE_CHECKING:
    from . import (  # noqa: F401
        acceptance,
        analysis,
        checkpoints,
        decoding,
        drafters,
        models,
        sampling,
        serving,
        sharding,
        text,
        tracing,
        trees,
        types,
    )
    from .analysis.audit import audit_rule, audit_samples
    from .analysis.comparison import compare
    from .analysis.drafter_checks import check_drafter
    from .analysis.engine_audit import audit_callable
    from .analysis.plan.api import plan
    from .analysis.rule_quality import quality
    from .analysis.target_checks import check_target
    from .analysis.transformers_audit import audit_transformers
    from .checkpoints import load_drafter, save_drafter
    from .decoding.loop import decode, stream
    from .decoding.round import accept, draft_step, verify
    from .models.lm import LM, load
    from .models.quantize import Quantization
    from .sampling.distribution import Sampling
    from .serving.offline import serve_offline
    from .text.chat import Chat
    from .text.generation import generate, stream_text
    from .text.options import Drafting
    from .tracing.api import trace
    from .types import Drafter, HeadTarget, Rule, Target

__version__ = "0.2.0"

NAMESPACES = (
    "acceptance",
    "analysis",
    "checkpoints",
    "decoding",
    "drafters",
    "models",
    "sampling",
    "serving",
    "sharding",
    "text",
    "tracing",
    "trees",
    "types",
)

__all__ = [
    "Chat",
    "Drafter",
    "Drafting",
    "HeadTarget",
    "LM",
    "Quantization",
    "Rule",
    "Sampling",
    "Target",
    "accept",
    "audit_callable",
    "audit_rule",
    "audit_samples",
    "audit_transformers",
    "check_drafter",
    "check_target",
    "compare",
    "decode",
    "draft_step",
    "generate",
    "load",
    "load_drafter",
    "plan",
    "quality",
    "save_drafter",
    "serve_offline",
    "stream",
    "stream_text",
    "trace",
    "verify",
]

# Each is imported when it is first asked for: the loop needs no Flax, and a command that was ended
# by Ctrl-C no JAX.
_LAZY = {
    "Chat": "text.chat",
    "Drafter": "types",
    "Drafting": "text.options",
    "HeadTarget": "types",
    "LM": "models.lm",
    "Quantization": "models.quantize",
    "Rule": "types",
    "Sampling": "sampling",
    "Target": "types",
    "accept": "decoding.round",
    "audit_callable": "analysis",
    "audit_rule": "analysis",
    "audit_samples": "analysis",
    "audit_transformers": "analysis",
    "check_drafter": "analysis",
    "check_target": "analysis",
    "compare": "analysis.comparison",
    "decode": "decoding.loop",
    "draft_step": "decoding.round",
    "generate": "text.generation",
    "load": "models.lm",
    "load_drafter": "checkpoints",
    "plan": "analysis.plan.api",
    "quality": "analysis.rule_quality",
    "save_drafter": "checkpoints",
    "serve_offline": "serving.offline",
    "stream": "decoding.loop",
    "stream_text": "text.generation",
    "trace": "tracing.api",
    "verify": "decoding.round",
    # names of the namespaces that are short enough to be written without them, in examples as well
    "Context": "types",
    "Decoded": "decoding",
    "Draft": "types",
    "Scores": "types",
    "Segment": "types",
    "Stats": "decoding",
    "Verdict": "types",
    "VerifiedRound": "decoding",
    "acceptance_keys": "decoding",
    "commit_round": "decoding",
    "contrastive": "models.contrastive",
    "init_state": "decoding",
    "kv_cache": "models",
    "plan_memory": "analysis",
    "quantization_error": "analysis",
    "processors": "sampling",
    "round_context": "decoding",
    "step": "decoding",
    **{name: name for name in NAMESPACES},
}
__getattr__, _ = lazy.attach(__name__, _LAZY)


def __dir__():
    return sorted({*__all__, *NAMESPACES, "__version__"})
