"""Laws of one's own: what ``Sampling(logits_processor=...)`` and
``generate(logits_processor=...)`` take.

The simplest law is a function of the logits and of what was said before; it becomes a part of p
itself, for the target and (unless ``process_drafts=False``) for the drafter, so it stays exact
under speculation, greedy and sampled::

    def no_repeat(logits, prefix):  # float32 [B, V], see specjax.sampling.Prefix
        last = prefix.last()  # int32 [B]: of the path through the draft, which comes behind
        repeats = jnp.arange(logits.shape[-1]) == last[:, None]
        return jnp.where(repeats, -jnp.inf, logits)  # float32 [B, V]; -inf: it must not come

A law that looks at ``prefix.tokens`` alone and not at ``prefix.path`` would depend on where rounds
happen to begin.
"""

from .base import (
    LogitsProcessor,
    advance_processor,
    apply_processor,
    initial_processor_state,
    processor_name,
)
from .grammar import Automaton, json_text

__all__ = [
    "Automaton",
    "LogitsProcessor",
    "apply_processor",
    "initial_processor_state",
    "advance_processor",
    "json_text",
    "processor_name",
]
