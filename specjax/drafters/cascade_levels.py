"""Which drafters can be the levels of a ``Cascade``."""

from __future__ import annotations

from collections.abc import Iterator

from .. import trees
from ..types import Drafter, DrafterWrapper, Target
from .base import CombinedDrafter
from .draft_model import DraftModel
from .outer_level import OuterLevel
from .self_draft import SelfDraft
from .switched_self import SwitchedSelfDraft
from .translation import TranslatedDraftModel

OTHER_TOKENS = (
    "its model has other tokens than the target, and all levels must share one vocabulary"
)


class TwoLevels(Drafter):
    """A drafter, ``inner``, that drafts for the model of another one, ``outer``: a ``Cascade``."""

    outer: OuterLevel
    inner: Drafter


def levels(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and all that it is made of for the same model: of a ``Cascade``, the outer level
    alone."""
    yield drafter
    parts: tuple[Drafter, ...] = ()
    if isinstance(drafter, CombinedDrafter):
        parts = drafter.parts
    elif isinstance(drafter, DrafterWrapper):
        parts = (drafter.inner,)
    elif isinstance(drafter, TwoLevels):
        parts = (drafter.outer,)
    for part in parts:
        yield from levels(part)


def draft_models(drafter: Drafter) -> Iterator[Target]:
    """The models of the draft models of which a drafter is made, at all levels of cascades."""
    for part in levels(drafter):
        if isinstance(part, DraftModel):
            yield part.model
        elif isinstance(part, TwoLevels):
            yield from draft_models(part.inner)


def check_outer(outer) -> None:
    """Raises TypeError or ValueError for what cannot be the outer drafter."""
    if not isinstance(outer, OuterLevel):
        raise TypeError(
            f"Cascade(outer={outer!r}): give a specjax.drafters.DraftModel, or a SelfDraft with a "
            "window"
        )
    kind = "SelfDraft" if isinstance(outer, SelfDraft) else "DraftModel"
    if isinstance(outer, TranslatedDraftModel):
        raise ValueError(f"Cascade(outer={outer.name}): {OTHER_TOKENS}; give a DraftModel")
    if type(outer).draft_step not in (DraftModel.draft_step, SelfDraft.draft_step):
        raise ValueError(
            f"Cascade(outer={outer.name}): a {type(outer).__name__} drafts in a way of its own, "
            f"and a cascade would run its model without that; give a {kind}"
        )
    if outer.topology != trees.chain(outer.depth):
        raise ValueError(
            f"Cascade(outer={kind}(topology={outer.topology})): the outer model generates a "
            f"text, which is a chain; give num_draft instead of a tree, or the {kind} alone; "
            "Cascade(tree=specjax.trees.comb(3, 6)) puts tokens beside the text"
        )
    if outer.sibling_sampling not in (None, "iid"):
        raise ValueError(
            f"Cascade(outer={kind}(sibling_sampling={outer.sibling_sampling!r})): a text has "
            "no siblings; leave sibling_sampling out"
        )
    if isinstance(outer, SelfDraft) and outer.stop is not None:
        raise ValueError(
            f"Cascade(outer=SelfDraft(stop={outer.stop})): a cascade ends its drafts itself; give "
            "Cascade(stop=CumulativeStop()) instead"
        )
    try:
        _ = outer.text_model
    except ValueError as error:
        raise ValueError(f"Cascade(outer={outer.name}): {error}") from None


def check_inner(inner, outer: OuterLevel) -> None:
    """Raises TypeError or ValueError for what cannot draft for ``outer``."""
    if not isinstance(inner, Drafter):
        raise TypeError(f"Cascade(inner={inner!r}): give an instance of specjax.Drafter")
    name = inner.name
    if not inner.depth:
        raise ValueError(
            f"Cascade(inner={name}): it drafts nothing; give the outer drafter without a cascade"
        )
    if inner.plans:
        raise ValueError(
            f"Cascade(inner={name}): it plans whole rounds; give the drafter within it, and wrap "
            "the cascade in Adaptive"
        )
    if inner.features or inner.reads_nodes or not inner.can_rewind:
        raise ValueError(
            f"Cascade(inner={name}): it remembers what a model computed of the text, and the text "
            "of the outer model is taken back where the target rejects it; give a table such as "
            "NGram, a DraftModel or a Cascade"
        )
    for part in levels(inner):
        if isinstance(part, TranslatedDraftModel):
            raise ValueError(
                f"Cascade(inner={name}): the text that {part.name} spells in its own tokens cannot "
                "be taken back; give a draft model with the target's vocabulary"
            )
        if isinstance(part, SwitchedSelfDraft):
            raise ValueError(
                f"Cascade(inner={name}): its layers are those of a target, by its weights; give "
                "SelfDraft(target=...) the model of outer"
            )
        if isinstance(part, SelfDraft) and part.target != outer.text_model:
            raise ValueError(
                f"Cascade(inner={name}): it drafts with layers of another model than the outer "
                "one; give SelfDraft(target=...) the model of outer"
            )
    if inner.vocab_size not in (None, outer.vocab_size):
        raise ValueError(
            f"Cascade: the vocabulary of inner={name} has {inner.vocab_size} tokens and that of "
            f"the outer model {outer.vocab_size}; all levels must share one"
        )
