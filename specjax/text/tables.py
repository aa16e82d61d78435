"""Drafters without weights (*tables*), by name and settings: ``lookahead:window=7,ngram=4``.

A drafter of one's own has the name ``module:Class`` (or ``module:object``), with or without
settings, and is made in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from .._internal.hashable import check_hashable
from .._internal.named_settings import ACCEPTED, parse_settings
from .._internal.own_objects import find_own, is_own, lacking_defaults
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
      ValueError: the drafter has no such setting, or takes no number or no tree; the module of a
        drafter of one's own cannot be imported, or has no such drafter.
    """
    kind, settings = _table(name or Plain.name)
    if shape is not None:
        if not kind.takes_topology:
            raise ValueError(
                f"tree={shape}: drafter={name!r} drafts no trees; give a draft model or heads"
            )
        return _made(name, kind, lm, settings | {"topology": shape})
    if kind is Plain:  # drafts nothing, however many tokens are asked for
        return kind()
    if most is not None and not _takes_number(kind):
        known = ",".join(f"{n}={getattr(kind, n)}" for n, of in settings_of(kind) if of is int)
        stem = kind.name if registry.find(kind.name) else ":".join(str(name).split(":")[:2])
        way_out = f", and give the settings after the name, as in '{stem}:{known}'" if known else ""
        raise ValueError(
            f"num={most}: how much drafter={name!r} drafts follows from its settings; leave num "
            f"out{way_out}"
        )
    most = USUAL.get(kind.name) if most is None else most
    return _made(name, kind, lm, settings | ({} if most is None else {"num_draft": most}))


def is_table(name: str) -> bool:
    """Returns whether a name is that of a table, or of a drafter of one's own, with or without
    settings; a folder of this name comes before a drafter of one's own."""
    first = name.partition(":")[0]
    if registry.find(first) is not None:
        return first in registry.table_names()
    return is_own(name) and not os.path.exists(name)


def _table(name: str) -> tuple[Any, dict]:
    """Returns the class of a table by its name, and the settings after the name. A drafter of one's
    own may be an object instead of a class."""
    own, _, text = name.partition(":")
    if registry.find(own) is None and is_own(name):
        known = tuple(entry.name for entry in registry.entries())
        kind, text = find_own(f"drafter={name!r}", name, Drafter, known)
        own = name.removesuffix(f":{text}") if text else name
    else:
        kind = registry.drafter_class(own)
    kinds = dict(settings_of(kind)) if text else {}
    return kind, parse_settings(f"drafter={name!r}", text, own, kinds) if text else {}


def _made(name: str | None, kind, lm: LM, fields: dict) -> Drafter:
    """Returns the drafter of a class for a target, or an object with other values of ``fields``."""
    if not isinstance(kind, type):
        return dataclasses.replace(kind, **fields) if fields else kind
    usual = Drafter.for_target.__func__ is kind.for_target.__func__
    lacking = lacking_defaults(kind, tuple(fields)) if usual else []
    if lacking:
        raise ValueError(
            f"drafter={name!r}: the field {lacking[0]!r} of {kind.__name__} has no default; a "
            "drafter that is made by its name needs a default for each field, or a method "
            "for_target that sets the field"
        )
    check_hashable("target", lm.target)
    return _of_class(kind, lm.target, tuple(sorted(fields.items())))


@functools.lru_cache(maxsize=64)
def _of_class(kind, target, fields: tuple) -> Drafter:
    """The same object for the same arguments: a class of one's own may compare by identity, and a
    drafter that differs is compiled again."""
    return kind.for_target(target, **dict(fields))


def settings_of(kind) -> list[tuple[str, type]]:
    """Returns the settings of a table that can follow its name, with their types.

    The number of drafts and the tree are arguments of their own, and the vocabulary is the
    target's, so these are not among the settings.

    Args:
      kind: the class of the drafter, or an object.
    """
    if not dataclasses.is_dataclass(kind):
        return []
    fields = [field for field in dataclasses.fields(kind) if field.name != "num_draft"]
    return [(f.name, type(f.default)) for f in fields if type(f.default) in ACCEPTED]


def takes_number(name: str) -> bool:
    """Returns whether the table of a name takes a number of drafts."""
    return _takes_number(_table(name)[0])


def _takes_number(kind: Any) -> bool:
    """Returns whether a class or an object takes a number of drafts. One that has the default
    ``for_target`` needs a field for it."""
    if not kind.takes_number or Drafter.for_target.__func__ is not kind.for_target.__func__:
        return kind.takes_number
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return any(field.name == "num_draft" for field in fields)
