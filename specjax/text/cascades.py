"""What ``drafter="cascade:OUTER:INNER"`` means: a model that another drafter drafts for.

A setting, such as ``window=64,budget=512``, belongs to the name that stands before it, so in
``cascade:self:window=64,budget=512:draft:window=256`` the outer level is
``self:window=64,budget=512``, and the inner one ``draft:window=256``.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import trees
from ..checkpoints import HeadLM
from ..drafters import Cascade, DraftModel
from ..drafters.cascade_levels import OTHER_TOKENS
from ..drafters.self_draft import SelfDraft
from ..drafters.sparse_draft import SparseDraftModel
from ..models.lm import LM, as_drafter
from ..models.vocabularies import OtherTokenizer
from ..types import Drafter, PyTree
from . import other_vocabulary, own_layers

NAME = "cascade"
NUM_DRAFT = 6  # tokens of the outer model; more than a draft model alone, since they cost less
INNER_DRAFT = 3  # tokens of a cascade within a cascade


def is_cascade(name: str) -> bool:
    """Returns whether a drafter's name is that of a cascade, whether or not it says its levels."""
    own, colon, _ = name.partition(":")
    return bool(colon) and own == NAME


def check_levels(name: str) -> None:
    """Raises ``ValueError`` for the name of a cascade that does not say both levels, or whose outer
    one has other tokens."""
    _, outer, inner = _levels(name)
    if not outer or not inner:
        raise ValueError(
            f"drafter={name!r} does not say which drafters: write 'cascade:OUTER:INNER', where "
            "OUTER is 'draft', the folder or hub name of a draft model, or 'self:window=512', and "
            "INNER drafts for it: a table such as 'ngram', a smaller draft model, or a cascade"
        )
    if other_vocabulary.method_of(outer):
        raise ValueError(
            f"drafter={name!r}: {outer!r} cannot be the outer level: {OTHER_TOKENS}; give a draft "
            f"model with the target's tokenizer, or {outer!r} without a cascade"
        )


def named_cascade(
    lm: LM,
    name: str,
    find: Callable[[str], object],
    resolve: Callable[[LM, object, int | None], tuple[Drafter, PyTree]],
) -> HeadLM:
    """Returns the drafter of ``"cascade:OUTER:INNER"``.

    Args:
      lm: the target.
      name: the name; ``INNER`` is any name that ``find`` takes, a cascade's among them.
      find: loads what the name of a level stands for.
      resolve: makes the inner drafter and its weights, for the target, of what was found and a
        number of drafts or None.

    Raises:
      ValueError: a level is missing, the outer one is neither a draft model nor the target over a
        window, or the inner one cannot draft for it; a level has another tokenizer.
    """
    check_levels(name)
    try:
        return _of_levels(lm, name, find, resolve)
    except OtherTokenizer as error:
        raise error.without_ways_across() from None


def _of_levels(lm: LM, name: str, find, resolve) -> HeadLM:
    """See ``named_cascade``."""
    _, first, rest = _levels(name)
    model = find(first)
    if isinstance(model, SelfDraft):
        outer = own_layers.shaped(lm, model, None, NUM_DRAFT, None)
        weights, who = None, model.words
    elif isinstance(model, LM):
        outer = DraftModel(num_draft=NUM_DRAFT, model=as_drafter(lm, model))
        weights, who = model.params, model.fingerprint
    elif isinstance(model, HeadLM) and isinstance(model.drafter, SparseDraftModel):
        outer = model.drafter.with_topology(trees.chain(NUM_DRAFT))
        weights, who = model.params, model.fingerprint
    else:
        raise ValueError(
            f"drafter={name!r}: {first!r} is no draft model, which the outer level of a cascade "
            "is; give 'draft', the folder or hub name of a draft model, or 'self:window=512', the "
            "target over its last tokens"
        )
    found = find(rest)
    inner, below = resolve(lm, found, INNER_DRAFT if is_cascade(rest) else None)
    held = found
    while not isinstance(held, LM | HeadLM) and hasattr(held, "inner"):  # ngram+NAME
        held = held.inner
    told = held.fingerprint if isinstance(held, LM | HeadLM) else rest
    told = told if held is found else f"{rest}={told}"
    return HeadLM(
        drafter=Cascade(outer, inner),
        params={"outer": weights, "inner": below},
        name=name,
        fingerprint=f"{who}:{told}",
        target=lm.checkpoint,
    )


def _levels(name: str) -> tuple[str, str, str]:
    """Returns ``cascade``, the outer name with its settings, and the inner name."""
    own, *words = name.split(":")
    num = 2 if words[0] in other_vocabulary.METHODS else 1
    while num < len(words) and words[num].partition("=")[0].isidentifier() and "=" in words[num]:
        num += 1
    return own, ":".join(words[:num]), ":".join(words[num:])
