"""Laws of one's own: what ``Sampling(law=...)`` and ``generate(law=...)`` take.

The simplest law is a function of the logits and of what was said before; it becomes a part of p
itself, for the target and (unless ``law_drafts=False``) for the drafter, so it stays exact under
speculation, greedy and sampled::

    def no_repeat(logits, prefix):  # float32 [B, V], see specjax.sampling.Prefix
        last = jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)
        ...
        return logits  # float32 [B, V]; -inf where a token must not come
"""

from .base import Law, apply, begin, fold
from .grammar import Automaton, json_text

__all__ = ["Automaton", "Law", "apply", "begin", "fold", "json_text"]
