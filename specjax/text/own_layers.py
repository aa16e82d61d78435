"""The drafter ``"self:..."``: a part of the target's own layers, chosen by the text of its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .. import trees
from ..checkpoints.sub_network import default_path, load_layers
from ..drafters.confidence_stop import ConfidenceStop
from ..drafters.self_draft import SelfDraft
from ..models.lm import LM
from ..models.sub_network import skipped_sublayers
from . import small_caches

SELF = "self"  # the target's own layers; the text after a colon chooses them


def named_layers(lm: LM, name: str, num_draft: int) -> SelfDraft:
    """Returns the drafter of a name such as ``"self:exit=4"``.

    After ``self:``, ``exit=4``, ``skip=attention.3-5,mlp.7`` or ``from=FILE`` choose the layers
    that draft. Without a choice, the layers are those of the file that ``specjax layers`` saved in
    the model's folder. ``:window=512,sinks=4`` lets a drafted token see only these tokens of the
    text, and ``:window=64,budget=512,chunk=8,every=8`` also those chunks that it wants most (see
    ``models.top_chunks``), or ``:window=64,budget=512,observe=32`` the tokens of the prompt that
    its end wanted most (see ``models.snap_kv``); without a choice all layers then draft.
    ``:stop=0.6`` sets the probability at which a chain ends (see ``drafters.confidence_stop``).

    Args:
      lm: the target.
      name: ``"self"`` or ``"self:..."``.
      num_draft: the number of tokens of a chain, unless a file states it.

    Raises:
      ValueError: the name has another form, or the model has no such layers.
      FileNotFoundError: the file does not exist.
    """
    words = [word.partition("=") for word in name.split(":")[1:]]
    given: dict[str, str] = {key: value for key, _, value in words}
    if len(given) < len(words):
        twice = next(key for key in given if [word[0] for word in words].count(key) > 1)
        raise ValueError(f"drafter={name!r}: {twice!r} is given twice")
    stop, small = given.pop("stop", None), dict[str, Any]()
    if own := [f"{s}={given.pop(s)}" for s in small_caches.OWN_SETTINGS if s in given]:
        small = small_caches.parse(name, ",".join(own), SELF, small_caches.OWN_SETTINGS)
    which = len(given)
    saved: str | Path | None = given.pop("from", None)
    if not which and not small and (own := default_path(lm)) is not None and own.is_file():
        saved = own
    exit, skip = given.pop("exit", None), given.pop("skip", "")
    if exit is not None and not (exit.isascii() and exit.isdigit() and int(exit)):
        raise ValueError(
            f"drafter={name!r}: exit={exit!r} is no whole number of layers from 1 on; give "
            "'self:exit=2' to draft with the first 2 layers and the LM head"
        )
    if wrong := [key for key in given if key]:
        accepted = "exit", "skip", "from", "stop", *small_caches.OWN_SETTINGS
        raise ValueError(
            f"drafter={name!r}: {wrong[0]!r} is no setting of the target's own layers; accepted "
            f"are {', '.join(accepted)}"
        )
    if given or which > 1 or not (saved or exit or skip or small):
        raise ValueError(
            f"drafter={name!r}: it does not say which layers draft; give 'self:exit=E' (the first "
            "E layers and the LM head), 'self:skip=attention.3-5,mlp.7' (all layers except for "
            "these sublayers), 'self:from=FILE' (a file from specjax layers) or 'self:window=512' "
            "(all layers over the last 512 tokens), on the command "
            "line --drafter self with --exit or --skip; 'self' alone reads self.json in the "
            "model's folder"
        )
    if saved:
        drafter = dataclasses.replace(load_layers(saved, lm), **small)
    else:
        exit, skipped = None if exit is None else int(exit), skipped_sublayers(skip)
        drafter = SelfDraft(num_draft=num_draft, target=lm.target, exit=exit, skip=skipped, **small)
    if stop is None:
        return drafter
    try:
        return dataclasses.replace(drafter, stop=ConfidenceStop(threshold=float(stop)))
    except ValueError as error:
        raise ValueError(f"drafter={name!r}: stop= must be a probability: {error}") from None


def shaped(lm: LM, drafter: SelfDraft, shape, num_draft: int | None, how: str | None) -> SelfDraft:
    """Returns ``drafter`` with another shape of draft and another way to sample siblings.

    Args:
      lm: the target.
      drafter: the drafter; its target must be that of ``lm``.
      shape: a topology, or None.
      num_draft: the number of tokens of a chain, or None.
      how: the way to sample siblings that the rule needs, or None.

    Raises:
      ValueError: the drafter was made for another target.
    """
    if drafter.target != lm.target:
        raise ValueError(
            f"drafter={drafter!r}: it was made for another target than {lm.name}; give target="
            "lm.target of the model that decodes"
        )
    if shape is None and num_draft is not None:
        shape = trees.chain(num_draft)
    if shape is not None:
        drafter = dataclasses.replace(drafter, topology=shape)
    if how is not None and drafter.sibling_sampling is None:
        drafter = dataclasses.replace(drafter, sibling_sampling=how)
    return drafter
