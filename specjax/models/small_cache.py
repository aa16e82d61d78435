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
    target = _decoder(model, "windowed")
    if window is None:
        raise ValueError("window=None: say how many of the last tokens a token sees, such as 512")
    small = target.windowed(window, sinks)
    return _over(model, small, f":window={window},sinks={sinks}")


def low_bit_cache(model: M, kind: str) -> M:
    """Returns a model with a cache in eight bits, over the same weights; see ``low_bits``.

    Lossless: as a drafter, yes. As a target the model is approximate, and every result says so.

    Args:
      model: an ``LM`` of a decoder-only model from ``specjax.load``, or its target.
      kind: ``"int8"``, with one scale for each token and head, or ``"fp8"`` (e4m3).

    Raises:
      TypeError: the model is none of these.
      ValueError: ``kind`` is none of these, or the model has latent attention.
    """
    return _over(model, _decoder(model, "low_bit_cache").low_bit_cache(kind), f":cache={kind}")


def _decoder(model: LM | CausalLM, function: str) -> CausalLM:
    target = model.target if isinstance(model, LM) else model
    if not isinstance(target, CausalLM):
        raise TypeError(
            f"{function}({type(target).__name__}): only decoder-only models of specjax.load, whose "
            "layers are not divided over the mesh axis stage, can have another cache; give one of "
            "them, or its target"
        )
    return target


def _over(model: M, target: CausalLM, said: str) -> M:
    """``model`` with another cache, as ``said`` names it."""
    if not isinstance(model, LM):
        return target
    names = {"name": model.name + said, "fingerprint": model.fingerprint + said}
    return dataclasses.replace(model, target=target, loaded=False, **names)
