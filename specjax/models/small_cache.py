"""Small caches for drafting: attention sinks and a sliding window, however long the text.

    token i sees token j   if   j <= i   and   (j < sinks   or   j > i - window)

A model with a small cache computes what the model itself would compute if its attention were
masked so in every layer that sees all tokens. (Layers with windows of their own stay as they are:
their caches do not grow.) It keeps ``sinks + window`` entries a layer and row, so neither a pass
nor its memory grows with the text. The first tokens stay because models put attention there that
they have no other use for; without them the law falls apart as soon as the window moves on.

Positions are those of the text: keys are rotated by the position of their token, as everywhere, and
stored so; a query at position i sees a sink j at distance i - j. So the distances are those of the
whole cache, no key is ever rotated again, models with learned positions can have a small cache too,
and what the cache holds follows from the text alone. StreamingLLM, and MagicDec after it, count
positions within the cache instead, which brings the sinks nearer. That is for texts beyond the
context of the model, with distances that were never trained; the text of a target is never beyond
its context. A draft model whose context is shorter than the target's text is outside of its
training, with a small cache as without one. (SPIRe counts as here.)

Lossless: as a drafter, yes: the draft states the law of the masked model, from which it was drawn.
As a target the model is approximate, and every result says so.

Example::

    small = windowed(specjax.load("Qwen/Qwen3-0.6B"), window=512)
    specjax.generate(lm, "...", drafter=small)  # by name: drafter="draft:window=512,sinks=4"
    DraftModel(num_draft=4, model=windowed(small.target, window=512))
    specjax.generate(lm, "...", drafter="self:window=512")  # the target, over its own cache

References: Xiao et al., StreamingLLM, arXiv 2309.17453; Chen et al., MagicDec, arXiv 2408.11049;
SPIRe, arXiv 2504.06419 (window 64, 1 sink).
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from .causal_lm import CausalLM
from .config import SINKS
from .lm import LM

M = TypeVar("M", LM, CausalLM)


def windowed(model: M, window: int, sinks: int = SINKS) -> M:
    """Returns a model with a small cache, over the same weights.

    Args:
      model: an ``LM`` of a decoder-only model from ``specjax.load``, or its target.
      window: how many of the last tokens a token sees, itself included; at least the number of
        nodes of a draft, the root included.
      sinks: how many of the first tokens of the text it sees besides.

    Raises:
      TypeError: the model is none of these.
      ValueError: the numbers are none of tokens, sinks and window would hold the whole context, or
        every layer of the model has a window of its own.
    """
    target = model.target if isinstance(model, LM) else model
    if not isinstance(target, CausalLM):
        raise TypeError(
            f"windowed({type(target).__name__}): only decoder-only models of specjax.load can have "
            "a small cache; give one of them, or its target"
        )
    if window is None:
        raise ValueError("window=None: say how many of the last tokens a token sees, such as 512")
    small = target.windowed(window, sinks)
    if not isinstance(model, LM):
        return small
    said = f":window={window},sinks={sinks}"
    names = {"name": model.name + said, "fingerprint": model.fingerprint + said}
    return dataclasses.replace(model, target=small, loaded=False, **names)
