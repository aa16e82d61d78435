"""Drafters without weights (*tables*), by name and settings: ``lookahead:window=7,ngram=4``."""

from __future__ import annotations

import dataclasses

from .._internal.named_settings import parse_settings
from ..drafters import Plain, registry
from ..models.lm import LM
from ..types import Drafter

USUAL = {"ngram": 3}  # the default number of drafts; other tables have defaults of their own


def named_table(lm: LM, name: str | None, most: int | None, shape) -> Drafter:
    """Returns the drafter of a name that is neither a draft model's nor that of heads.

    Args:
      lm: the target.
      name: the name of a table, with or without settings, or of plain decoding; None: plain
        decoding.
      most: the number of tokens drafted a round; None: the drafter's default.
      shape: a topology in place of a number, or None.

    Raises:
      ValueError: the drafter has no such setting, or takes no number or no tree.
    """
    kind, settings = _table(name or Plain.name)
    if shape is not None:
        if not kind.takes_topology:
            raise ValueError(
                f"tree={shape}: drafter={name!r} drafts no trees; give a draft model or heads"
            )
        return kind.for_target(lm.target, topology=shape, **settings)
    if kind is Plain:  # drafts nothing, however many tokens are asked for
        return kind()
    if most is not None and not kind.takes_number:
        known = ",".join(f"{n}={getattr(kind, n)}" for n, of in settings_of(kind) if of is int)
        raise ValueError(
            f"num={most}: how much drafter={name!r} drafts follows from its settings; leave num "
            f"out, and give the settings after the name, as in '{kind.name}:{known}'"
        )
    most = USUAL.get(kind.name) if most is None else most
    return kind.for_target(lm.target, **settings | ({} if most is None else {"num_draft": most}))


def _table(name: str) -> tuple[type, dict]:
    """Returns the class of a table by its name, and the settings after the name."""
    own, _, text = name.partition(":")
    kind = registry.drafter_class(own)
    kinds = dict(settings_of(kind)) if text else {}
    return kind, parse_settings(f"drafter={name!r}", text, own, kinds) if text else {}


def settings_of(kind: type) -> list[tuple[str, type]]:
    """Returns the settings of a table that can follow its name, with their types.

    The number of drafts and the tree are arguments of their own, and the vocabulary is the
    target's, so these are not among the settings.

    Args:
      kind: the class of the drafter.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name != "num_draft"]
    return [(f.name, type(f.default)) for f in fields if type(f.default) in (int, float, str, bool)]


def takes_number(name: str) -> bool:
    """Returns whether the table of a name takes a number of drafts."""
    return _table(name)[0].takes_number
