"""specjax: speculative decoding in JAX. See ``specjax.decode`` and ``specjax.generate``."""

from . import acceptance, drafters, tree
from .loop import Decoded, accept, decode, draft_step, stream, verify
from .sampling import Sampling
from .stats import Stats
from .types import Context, Draft, Drafter, Scores, Segment, Target, Verdict

__version__ = "0.1.0"

__all__ = [
    "Context",
    "Decoded",
    "Draft",
    "Drafter",
    "Sampling",
    "Scores",
    "Segment",
    "Stats",
    "Target",
    "Verdict",
    "accept",
    "acceptance",
    "decode",
    "draft_step",
    "drafters",
    "stream",
    "tree",
    "verify",
]
