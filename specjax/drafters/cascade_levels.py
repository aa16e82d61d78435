"""Which drafters can be the levels of a ``Cascade``."""

from __future__ import annotations

from collections.abc import Iterator

from .. import trees
from ..models.causal_lm import CausalLM
from ..types import Drafter, DrafterWrapper, Target
from .base import CombinedDrafter
from .draft_model import DraftModel
from .self_draft import SelfDraft
from .translation import TranslatedDraftModel


def levels(drafter: Drafter) -> Iterator[Drafter]:
    """A drafter and all that it is made of, but not the levels of a ``Cascade`` in it, which are
    checked where that is made."""
    yield drafter
    parts: tuple[Drafter, ...] = ()
    if isinstance(drafter, CombinedDrafter):
        parts = drafter.parts
    elif isinstance(drafter, DrafterWrapper):
        parts = (drafter.inner,)
    for part in parts:
        yield from levels(part)


def check_outer(outer) -> None:
    """Raises TypeError or ValueError for what cannot be the outer drafter."""
    if not isinstance(outer, DraftModel):
        raise TypeError(f"Cascade(outer={outer!r}): give a specjax.drafters.DraftModel")
    if isinstance(outer, TranslatedDraftModel):
        raise ValueError(
            f"Cascade(outer={outer.name}): its model has other tokens than the target, and all "
            "levels must share one vocabulary; give a DraftModel"
        )
    if type(outer).draft_step is not DraftModel.draft_step:
        raise ValueError(
            f"Cascade(outer={outer.name}): a {type(outer).__name__} drafts in a way of its own, "
            "and a cascade would run its model without that; give a DraftModel"
        )
    if outer.topology != trees.chain(outer.depth):
        raise ValueError(
            f"Cascade(outer=DraftModel(topology={outer.topology})): the outer model generates a "
            "text, which is a chain; give num_draft instead of a tree, or the DraftModel alone"
        )
    if outer.sibling_sampling not in (None, "iid"):
        raise ValueError(
            f"Cascade(outer=DraftModel(sibling_sampling={outer.sibling_sampling!r})): a text has "
            "no siblings; leave sibling_sampling out"
        )


def check_inner(inner, outer: DraftModel) -> None:
    """Raises TypeError or ValueError for what cannot draft for ``outer``."""
    if not isinstance(inner, Drafter):
        raise TypeError(f"Cascade(inner={inner!r}): give an instance of specjax.Drafter")
    name = inner.name
    if not inner.depth:
        raise ValueError(
            f"Cascade(inner={name}): it drafts nothing; give the DraftModel without a cascade"
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
        if isinstance(part, SelfDraft) and part.target != outer.model:
            raise ValueError(
                f"Cascade(inner={name}): it drafts with layers of another model than the outer "
                "one; give SelfDraft(target=...) the model of outer"
            )
    if inner.vocab_size not in (None, outer.vocab_size):
        raise ValueError(
            f"Cascade: the vocabulary of inner={name} has {inner.vocab_size} tokens and that of "
            f"the outer model {outer.vocab_size}; all levels must share one"
        )


def check_window(drafter: Drafter, capacity: int) -> None:
    """Raises ValueError for a draft model whose cache forgets what it may need again."""
    for model in _models(drafter.model) if isinstance(drafter, DraftModel) else ():
        if not isinstance(model, CausalLM):
            continue
        config = model.config
        windows = [config.window_of(i) or capacity for i in range(config.num_layers)]
        if min(windows) < capacity:
            raise ValueError(
                f"Cascade: the draft model {config.model_type!r} has a sliding window of "
                f"{min(windows)} tokens, and its cache keeps no more, so drafted tokens cannot be "
                f"taken back in a text of up to {capacity} tokens; give the DraftModel without a "
                "cascade, or a model without windows and without a small cache"
            )


def _models(model: Target) -> Iterator[Target]:
    """A model and all that it is made of, as contrastive decoding is made of two."""
    yield model
    for part in model.parts:
        yield from _models(part)
