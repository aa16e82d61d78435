"""specjax: speculative decoding in JAX. See ``specjax.decode`` and ``specjax.generate``."""

import importlib
from typing import TYPE_CHECKING

from . import acceptance, drafters, sharding, trees
from .decoding.loop import Decoded, decode, stream
from .decoding.round import accept, draft_step, verify
from .decoding.stats import Stats
from .sampling import processors
from .sampling.distribution import Sampling
from .types import (
    Context,
    Draft,
    Drafter,
    HeadTarget,
    Rule,
    Scores,
    Segment,
    Target,
    Verdict,
)

if TYPE_CHECKING:
    from .analysis.comparison import Comparison, compare
    from .analysis.memory import MemoryPlan, plan_memory
    from .analysis.plan.api import Plan, plan
    from .checkpoints import HeadLM, load_drafter, save_drafter
    from .models import kv_cache
    from .models.contrastive import contrastive
    from .models.lm import LM, load
    from .serving.offline import Served, serve_offline
    from .text.chat import Chat
    from .text.generation import Generation, generate, stream_text
    from .text.options import Drafting
    from .tracing.api import Trace, trace

__version__ = "0.2.0"

__all__ = [
    "Chat",
    "Comparison",
    "Context",
    "Decoded",
    "Draft",
    "Drafter",
    "Drafting",
    "Generation",
    "HeadLM",
    "HeadTarget",
    "LM",
    "MemoryPlan",
    "Plan",
    "Rule",
    "Sampling",
    "Scores",
    "Segment",
    "Served",
    "Stats",
    "Target",
    "Trace",
    "Verdict",
    "accept",
    "acceptance",
    "kv_cache",
    "compare",
    "contrastive",
    "decode",
    "draft_step",
    "drafters",
    "generate",
    "processors",
    "load",
    "load_drafter",
    "plan",
    "plan_memory",
    "save_drafter",
    "serve_offline",
    "sharding",
    "stream",
    "stream_text",
    "trace",
    "trees",
    "verify",
]

# what brings Flax along is imported when it is first asked for: the loop does not need it
_LAZY = {
    "Chat": "text.chat",
    "Comparison": "analysis.comparison",
    "compare": "analysis.comparison",
    "HeadLM": "checkpoints",
    "load_drafter": "checkpoints",
    "save_drafter": "checkpoints",
    "LM": "models.lm",
    "kv_cache": "models",
    "contrastive": "models.contrastive",
    "load": "models.lm",
    "MemoryPlan": "analysis.memory",
    "plan_memory": "analysis.memory",
    "Plan": "analysis.plan.api",
    "plan": "analysis.plan.api",
    "Served": "serving.offline",
    "serve_offline": "serving.offline",
    "Drafting": "text.options",
    "Generation": "text.generation",
    "generate": "text.generation",
    "stream_text": "text.generation",
    "Trace": "tracing.api",
    "trace": "tracing.api",
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
