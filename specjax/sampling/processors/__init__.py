"""Logits processors: functions or objects of your own for ``Sampling(logits_processor=...)``.

The simplest processor is a function of the logits and of the tokens before them. It becomes a part
of the target's law p and, unless ``process_drafts=False``, of the drafter's law q, so speculation
stays exact, greedy and sampled::

    def no_repeat(logits, prefix):  # float32 [B, V], see specjax.sampling.Prefix
        last = prefix.last()  # int32 [B]: the last token of the path through the draft
        repeats = jnp.arange(logits.shape[-1]) == last[:, None]
        return jnp.where(repeats, -jnp.inf, logits)  # float32 [B, V]; -inf forbids a token

A processor must read ``prefix.path`` as well as ``prefix.tokens``: otherwise its output would
depend on where rounds happen to begin.
"""

from .base import (
    LogitsProcessor,
    advance_processor,
    apply_processor,
    check_processor,
    initial_processor_state,
    processor_name,
    processor_params,
)
from .grammar import Automaton, json_text

__all__ = [
    "Automaton",
    "LogitsProcessor",
    "apply_processor",
    "initial_processor_state",
    "advance_processor",
    "check_processor",
    "json_text",
    "processor_name",
    "processor_params",
]
