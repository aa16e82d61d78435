"""specjax: speculative decoding in JAX. See ``specjax.decode`` and ``specjax.generate``."""

import importlib
from typing import TYPE_CHECKING

from . import acceptance, cache, drafters, laws, sharding, targets, topology, tree
from .loop import Decoded, decode, stream
from .round import accept, draft_step, verify
from .sampling import Sampling
from .stats import Stats
from .targets import contrastive
from .types import Context, Draft, Drafter, Scores, Segment, Target, Verdict

if TYPE_CHECKING:
    from .chat import Chat
    from .comparison import Comparison, compare
    from .formats import HeadLM, load_drafter, save_drafter
    from .memory import MemoryPlan, plan_memory
    from .models.lm import LM, load
    from .planner import Plan, plan
    from .serving import Served, serve_offline
    from .text import Generation, generate, stream_text
    from .tracing import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Comparison",
    "Context",
    "Decoded",
    "Draft",
    "Drafter",
    "Generation",
    "HeadLM",
    "LM",
    "MemoryPlan",
    "Plan",
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
    "cache",
    "compare",
    "contrastive",
    "decode",
    "draft_step",
    "drafters",
    "generate",
    "laws",
    "load",
    "load_drafter",
    "plan",
    "plan_memory",
    "save_drafter",
    "serve_offline",
    "sharding",
    "stream",
    "stream_text",
    "targets",
    "topology",
    "trace",
    "tree",
    "verify",
]

# what brings Flax along is imported when it is first asked for: the loop does not need it
_LAZY = {
    "Chat": "chat",
    "Comparison": "comparison",
    "compare": "comparison",
    "HeadLM": "formats",
    "load_drafter": "formats",
    "save_drafter": "formats",
    "LM": "models.lm",
    "load": "models.lm",
    "MemoryPlan": "memory",
    "plan_memory": "memory",
    "Plan": "planner",
    "plan": "planner",
    "Served": "serving",
    "serve_offline": "serving",
    "Generation": "text",
    "generate": "text",
    "stream_text": "text",
    "Trace": "tracing",
    "trace": "tracing",
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
