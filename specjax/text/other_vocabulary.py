"""What ``drafter="tli:PATH"`` and ``"slem:PATH"`` mean: a draft model with other tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from pathlib import Path

from ..checkpoints import HeadLM
from ..drafters.slem import SLEM, SLEMTables
from ..drafters.sparse_draft import SparseDraftModel
from ..drafters.strings import string_tables
from ..drafters.tli import TLI
from ..drafters.translation import TranslatedDraftModel, vocabulary_tables
from ..models.causal_lm import CausalLM
from ..models.lm import LM, check_reading, load
from ..models.tokenizer import Tokenizer
from ..models.vocabularies import Spellings, shared_tokens, spellings
from .options import NUM_DRAFT
from .own_drafters import folder_stamp, once_in_a_row

METHODS = {"tli": TLI, "slem": SLEM}


def method_of(name: str) -> str:
    """The method that a drafter's name begins with; empty: none."""
    method, colon, _ = name.partition(":")
    return method if colon and method in METHODS else ""


def short(name: str) -> str:
    """A drafter's name as tables show it: of a folder its last part alone."""
    method = method_of(name)
    path = name.removeprefix(f"{method}:") if method else name
    return f"{method}:{Path(path).name}" if method else Path(path).name


def shortened(names: Collection[str]) -> dict[str, str]:
    """Names of drafters as one table shows them: ``short``, unless two would look the same."""
    found = {name: short(name) for name in names}
    counts = collections.Counter(found.values())
    return {name: one if counts[one] == 1 else name for name, one in found.items()}


def named_translated(lm: LM, name: str, settings: dict) -> HeadLM:
    """The drafter of ``"tli:PATH"`` or ``"slem:PATH"``.

    Args:
      lm: the target.
      name: the method, and after a colon the folder or hub name of a draft model.
      settings: what ``load`` takes besides.

    Raises:
      ValueError, FileNotFoundError, OSError: as ``load`` and ``translated`` do.
    """
    method, _, path = name.partition(":")
    if not path:
        raise ValueError(
            f"drafter={name!r}: give the folder or hub name of a draft model after the colon, such "
            f"as '{method}:owner/name'"
        )
    settings = {"dtype": lm.dtype.name} | settings
    return _loaded(lm, path, method, folder_stamp(path), **settings)


@once_in_a_row
def _loaded(lm: LM, path: str, method: str, stamp: object, **settings) -> HeadLM:
    """``translated`` of the model in a folder, which is as ``stamp`` says, or of a hub name."""
    return translated(lm, load(path, **settings), method)


def translated(lm: LM, draft: LM, method: str = "tli") -> HeadLM:
    """Makes a drafter of a draft model whose tokens are not those of the target.

    Args:
      lm: the target.
      draft: a smaller decoder-only model with a tokenizer of its own.
      method: ``"tli"`` drafts tokens that both share, with their law; ``"slem"`` drafts a string,
        which is cut into tokens of the target.

    Returns:
      what ``generate(drafter=)`` takes.

    Raises:
      ValueError: an unknown method; a model without a tokenizer, or with one that does not say
        which bytes its tokens stand for; models that read inputs, or lie on different meshes; the
        two have no token of text in common (``tli``), or the target cannot spell what the drafter
        writes (``slem``).

    Example::

        small = specjax.load("owner/model-of-another-family")
        specjax.generate(lm, "...", drafter=specjax.text.translated(lm, small, "slem"))
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; accepted: {', '.join(METHODS)}")
    name = f"{method}:{draft.name}"
    for model in (lm, draft):
        if model.tokenizer is None:
            raise ValueError(
                f"drafter={name!r}: {model.name} was loaded without a tokenizer, and what its "
                "tokens spell must be known; load it with its tokenizer"
            )
        if model.target.reads is not None:
            raise ValueError(
                f"drafter={name!r}: {model.name} reads {model.target.reads}; between vocabularies "
                "only decoder-only models draft; take drafter='ngram'"
            )
    check_reading(lm, draft)
    both = _tokenizer(lm), _tokenizer(draft)
    sizes = lm.target.vocab_size, draft.target.vocab_size
    try:
        spelling = spellings(*both)
        _check_common(lm, draft, method, spelling)
        tables = vocabulary_tables(*both, *sizes, spelling)
        if method == "slem":
            strings = string_tables(*both, *sizes, spelling)
            tables = SLEMTables(**vars(tables), strings=strings)
    except ValueError as error:
        raise ValueError(f"drafter={name!r}: {error}") from None
    model = draft.target
    if isinstance(model, CausalLM) and draft.mesh is None:
        model = dataclasses.replace(model, axis=None)
    return HeadLM(
        drafter=METHODS[method](num_draft=NUM_DRAFT, model=model, ratio=tables.ratio),
        params={"model": draft.params, "tables": tables},
        name=name,
        fingerprint=f"{method}:{draft.fingerprint}",
        target=lm.checkpoint,
    )


def is_draft_model(drafter: object) -> bool:
    """Whether what was loaded is a draft model, with the target's tokenizer or another one."""
    if isinstance(drafter, LM):
        return True
    made = isinstance(drafter, HeadLM) and drafter.drafter
    return isinstance(made, TranslatedDraftModel | SparseDraftModel)


def _tokenizer(lm: LM) -> Tokenizer:
    """Returns the tokenizer of a model that ``translated`` has found to have one."""
    assert lm.tokenizer is not None
    return lm.tokenizer


def _check_common(lm: LM, draft: LM, method: str, spelling: Spellings) -> None:
    """Raises ValueError where a method could never draft anything."""
    ours, theirs = _tokenizer(lm), _tokenizer(draft)
    if method == "tli":
        if shared_tokens(ours, theirs, spelling).words:
            return
        lack = "share no token of text: take another drafter"
    else:
        if any(spelling[0].match(word) for word in spelling[1].ids):
            return
        lack = "have no string in common: take another drafter"
    raise ValueError(
        f"the vocabularies of {lm.name} ({len(ours.vocabulary)} tokens) and {draft.name} "
        f"({len(theirs.vocabulary)}) {lack}, such as 'ngram'"
    )
