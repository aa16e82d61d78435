"""Turns the value of ``drafter=`` into a drafter object with its tree and its weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from .. import drafters, trees
from .._internal.keywords import counted, did_you_mean
from ..checkpoints import HeadLM, holds_heads, load_drafter
from ..drafters import registry
from ..drafters.drawn_or_top import LEARNED
from ..drafters.heads import HeadDrafter
from ..drafters.hybrid import drafts_chains
from ..drafters.registry import DRAFT
from ..drafters.self_draft import SelfDraft
from ..models.families import FAMILIES
from ..models.files import read_json
from ..models.lm import LM, as_drafter
from ..models.model_folder import EMBEDDED, config_folder
from ..models.seq2seq import families
from ..types import Drafter, PyTree
from . import cascades, other_vocabulary, own_layers, sibling_sampling, small_caches, tables
from .auto_number import (
    AUTO_DRAFTS,
    MOST_DRAFTS,
    auto_policy,
    check_one_shape,
    is_auto,
    number_of,
)
from .options import NUM_DRAFT
from .own_drafters import (
    auto_drafter,
    folder_stamp,
    load_draft,
    once_in_a_row,
    own_draft,
    own_heads,
)
from .own_layers import SELF
from .session import Session

AUTO = "auto"  # the drafter that a model has itself, see ``own_drafters.auto_drafter``
NO_DRAFTS = ("none", "plain")  # names of plain decoding
# before a drafter's name: tokens are copied if possible (drafters/hybrid.py, fallback.py)
LOOKUPS = ("ngram+", "suffix+", "sam+")
COPYING = "copy+"  # a bonus for what stood in the text before (drafters/copying.py)


@dataclasses.dataclass(frozen=True, repr=False)
class WithLookup:
    """The drafter of a name such as ``"ngram+draft"``.

    Attributes:
      inner: the drafter that drafts where nothing can be copied, or that has the bonus.
      lookup: one of ``LOOKUPS``, or ``COPYING``.
    """

    inner: LM | HeadLM | SelfDraft | WithLookup | str
    lookup: str = LOOKUPS[0]

    @property
    def name(self) -> str:
        return self.lookup + (self.inner if isinstance(self.inner, str) else self.inner.name)

    def __repr__(self) -> str:
        return self.name


# values of ``drafter=`` after ``named``
DrafterGiven = str | LM | HeadLM | WithLookup | Session | Drafter | None


def resolve_drafter(
    lm: LM, drafter, num_draft: int | str | None = None, params: PyTree = None, tree=None, how=None
):
    """Returns the drafter object for the options of ``generate``, and its weights.

    With ``num_draft="auto"`` or ``"auto:POLICY"`` the drafter is an ``Adaptive`` one, whose costs
    are not measured yet.

    Args:
      lm: the target.
      drafter: the value of ``drafter=``.
      num_draft: the value of ``Drafting.num``.
      params: the weights of a drafter object.
      tree: a topology, or a value that ``trees.as_topology`` takes, in place of a number.
      how: see ``sibling_sampling.wanted``. Drafter objects always use their own setting.

    Returns:
      the drafter, and its parameters or None.

    Raises:
      ValueError, TypeError: the drafter, the number or the tree is not accepted.
    """
    if isinstance(drafter, str | os.PathLike):
        drafter = named(lm, drafter)
    if is_auto(num_draft):
        policy = auto_policy(num_draft)
        most = None if tree is not None else _most_drafts(drafter)
        inner, params = resolve_drafter(lm, drafter, most, params, tree, how)
        if not inner.num_draft:  # plain decoding
            return inner, params
        if isinstance(inner, drafters.Adaptive):
            raise ValueError("num='auto': the drafter is adaptive already; leave num out")
        adaptive = drafters.Adaptive(inner, policy)
        return adaptive, {"inner": params, "costs": np.ones(len(adaptive.widths), np.float32)}
    if how == LEARNED:
        drawn = sibling_sampling.DRAWN
        inner, params = resolve_drafter(lm, drafter, num_draft, params, tree, drawn)
        return sibling_sampling.learning(inner), params
    shape = None if tree is None else _checked(tree, num_draft)

    def drafts():
        return NUM_DRAFT if num_draft is None else number_of(num_draft)

    if drafter is None or isinstance(drafter, str):  # NO_DRAFTS or a table
        return tables.named_table(lm, drafter, None if num_draft is None else drafts(), shape), None
    if isinstance(drafter, WithLookup):
        return _with_lookup(lm, drafter, None if num_draft is None else drafts(), shape, how)
    if isinstance(drafter, Session):
        table = drafter.drafter_for(lm)
        if shape is not None:
            return table.with_topology(shape), drafter.params
        if num_draft is not None:
            chain: dict[str, Any] = {"topology": None} if table.takes_topology else {}
            table = _replaced(table, num_draft=drafts(), **chain)
        return table, drafter.params
    if isinstance(drafter, HeadLM):
        if shape is None and num_draft is not None:
            shape = trees.chain(drafts())
        heads = _with_tree(drafter, shape, lm)
        how = sibling_sampling.of_heads(how, heads)
        if how is not None and heads.takes_sibling_sampling:
            heads = _replaced(heads, sibling_sampling=how)
        return heads, drafter.params
    how = sibling_sampling.of_model(how)
    if isinstance(drafter, SelfDraft):
        number = None if num_draft is None else drafts()
        return own_layers.shaped(lm, drafter, shape, number, how), params
    if isinstance(drafter, LM):
        model = as_drafter(lm, drafter)
        shape = shape or trees.chain(drafts())
        made = drafters.DraftModel(topology=shape, model=model, sibling_sampling=how)
        return made, drafter.params
    if isinstance(drafter, HeadDrafter) and params is None:
        raise ValueError(
            f"drafter: {drafter.name} needs its weights; give them as drafter_params, or give the "
            "heads from specjax.load_drafter, which hold both"
        )
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"drafter={drafter!r:.60}: accepted are a name such as 'auto', 'ngram' or 'none', an "
            "LM from specjax.load, heads from specjax.load_drafter, the folder or hub name of "
            "either, or a specjax.Drafter"
        )
    return drafter if shape is None else drafter.with_topology(shape), params


def _with_lookup(lm: LM, drafter: WithLookup, most: int | None, shape, how):
    """Returns the drafter of what stands before a name and of the name, and its weights.

    Args:
      most: the most tokens that are drafted a round, or None.
      shape: the tree of the inner drafter, or None.
      how: see ``resolve_drafter``.
    """
    if drafter.lookup == COPYING:
        inner, params = resolve_drafter(lm, drafter.inner, most, None, shape, how)
        return drafters.Copying(inner), params
    own: int | None = NUM_DRAFT if most is None else min(most, NUM_DRAFT)
    held = without_copying(drafter.inner)
    if isinstance(held, HeadLM):
        heads = held.drafter
        own = min(own, heads.max_depth or own, getattr(heads, "trained_depth", None) or own)
    if isinstance(held, str | WithLookup):  # a table has its own usual number
        own = most if _takes_number(held) else None
    inner, params = resolve_drafter(
        lm, drafter.inner, None if shape is not None else own, None, shape, how
    )
    if drafter.lookup == LOOKUPS[0]:
        if drafts_chains(inner):
            least = max(NUM_DRAFT, inner.depth)
            return drafters.Hybrid(num_draft=least if most is None else most, inner=inner), params
        table = drafters.NGram(tables.USUAL["ngram"] if most is None else most)
    else:
        table = registry.drafter_class(drafter.lookup.removesuffix("+"))
        table = table() if most is None else table(num_draft=most)
    return drafters.Fallback(first=table, inner=inner), params


def _most_drafts(drafter: DrafterGiven) -> int | None:
    """Returns the greatest number of drafts of ``num="auto"``; None: what the drafter has itself,
    as heads that cannot draft deeper, or that have a tree of their own."""
    if not _takes_number(drafter):
        return None
    drafter = without_copying(drafter)
    if not isinstance(drafter, HeadLM) or other_vocabulary.is_draft_model(drafter):
        return AUTO_DRAFTS
    heads = drafter.drafter
    return heads.greatest_number(AUTO_DRAFTS) if isinstance(heads, HeadDrafter) else None


def _takes_number(drafter: DrafterGiven) -> bool:
    """Returns whether a drafter takes a number of drafts; False only of some tables."""
    while isinstance(drafter, WithLookup):
        drafter = drafter.inner
    return not isinstance(drafter, str) or tables.takes_number(drafter)


def without_copying(drafter):
    """Returns a drafter as ``named`` does, without ``COPYING`` before its name."""
    while isinstance(drafter, WithLookup) and drafter.lookup == COPYING:
        drafter = drafter.inner
    return drafter


def simple_names() -> tuple[str, ...]:
    """Returns the names that are neither those of draft models nor those of heads."""
    return (*NO_DRAFTS, *registry.table_names(), AUTO)


def typed_names() -> tuple[str, ...]:
    """Returns all names of drafters that users may type, without what may stand around a name."""
    return (*simple_names(), DRAFT, SELF, *other_vocabulary.METHODS, *_heads())


def is_simple(name: str) -> bool:
    """Returns whether a name is one of ``simple_names``, a table's name with settings, or that of a
    drafter of one's own, ``module:Class``."""
    return name in simple_names() or tables.is_table(name)


def _heads() -> tuple[str, ...]:
    """Returns all names of heads: those of the registry, and their aliases."""
    return tuple(name for e in registry.entries("head") for name in (e.name, *e.aliases))


def _check_name(name: str, whole: str = "") -> None:
    """Raises ``ValueError`` for a text that names no drafter; errors show ``whole``, if given."""
    drafter, before = whole or name, ""
    while lookup := lookup_of(name):
        name, before = name.removeprefix(lookup), lookup
        if before == COPYING and name.startswith((*LOOKUPS, COPYING, "cascade:", "slem:")):
            raise ValueError(
                f"drafter={drafter!r}: {name!r} does not draft by logits of its own; after "
                f"{COPYING!r} stand heads, draft models and layers of the target, and lookups "
                f"stand before it: 'ngram+{COPYING}NAME'"
            )
    if before and not name or drafter == COPYING.rstrip("+"):
        raise ValueError(
            f"drafter={drafter!r} does not say which drafter: write a name after it, such as "
            f"'{before or COPYING}{DRAFT}'; accepted are names that `specjax drafters` lists"
        )
    if before and name == AUTO:
        raise ValueError(
            f"drafter={drafter!r}: after {before!r} give the name of the drafter that {AUTO!r} "
            "takes, such as 'eagle3'"
        )
    plain = name in (*NO_DRAFTS, AUTO)  # nothing can be copied before these
    if before == COPYING and is_simple(name):
        raise ValueError(
            f"drafter={drafter!r}: {name!r} has no logits that a bonus could be added to; accepted "
            f"after {COPYING!r} are heads, draft models, and layers of the target"
        )
    if name in ("draft", *_heads()) or is_simple(name) and not (before and plain):
        return
    if name.partition(":")[0] == SELF or other_vocabulary.method_of(name):
        return
    if cascades.is_cascade(name):
        return cascades.check_levels(name)
    if model := small_caches.model_of(name):
        return _check_name(model, drafter)
    if name in other_vocabulary.METHODS:
        raise ValueError(
            f"drafter={drafter!r} does not say which draft model: write '{name}:NAME', where NAME "
            "is the folder or hub name (owner/name) of a draft model with another tokenizer"
        )
    entry = registry.find(name)
    if entry is not None and entry.kind == "wrapper":
        raise ValueError(
            f"drafter={drafter!r} is made of other drafters, and has no name that says which: give "
            f"an object, specjax.drafters.{entry.class_name}(...), num='auto' for an adaptive one, "
            f"'cascade:OUTER:INNER', or {', '.join(map(repr, (*LOOKUPS, COPYING)))} before a name"
        )
    if entry is not None and entry.kind == "object":
        raise ValueError(
            f"drafter={drafter!r} has weights that no name gives: give an object, "
            f"specjax.drafters.{entry.class_name}(...), with its weights as drafter_params"
        )
    if "/" not in name and name not in EMBEDDED and not os.path.isdir(name):
        wrappers = [entry.name for entry in registry.entries("wrapper")]
        meant = did_you_mean(name.partition(":")[0], [*typed_names(), *wrappers], repr)
        part = f" ({name!r} in it)" if before else ""
        raise ValueError(
            f"drafter={drafter!r} is unknown{part}: {meant}Accepted are the names that `specjax "
            "drafters` lists, the folder or hub name (owner/name) of a draft model or of heads, "
            "and in Python what specjax.load and specjax.load_drafter return"
        )


def lookup_of(name: str) -> str:
    """Returns the one of ``LOOKUPS``, or ``COPYING``, with which a name begins, or ``""``."""
    return next((before for before in (*LOOKUPS, COPYING) if name.startswith(before)), "")


def _checked(tree, num_draft) -> trees.Topology:
    check_one_shape(num_draft, tree)
    shape = trees.as_topology(tree)
    if isinstance(shape, trees.Follow):
        raise ValueError(
            f"tree={tree!r:.60}: it follows a text that is known, and is for measuring only; give "
            "the tree that is to be drafted"
        )
    if shape.depth > MOST_DRAFTS:
        raise ValueError(
            f"tree={tree!r:.60} has depth {shape.depth}; at most {MOST_DRAFTS} is allowed"
        )
    if shape.depth < 1:
        raise ValueError(f"tree={tree!r:.60} has no node below the root; give drafter='none'")
    return shape


def _with_tree(heads: HeadLM, shape: trees.Topology | None, lm: LM):
    """Returns the drafter of ``heads`` with the given topology; None: with its own."""
    own = heads.drafter
    if heads.target != lm.checkpoint:
        raise ValueError(
            f"drafter={heads!r} was loaded for another target than {lm.name}: load it again with "
            "specjax.load_drafter(..., target)"
        )
    if shape is None:
        return own
    if own.max_depth is not None and shape.depth > own.max_depth:
        raise ValueError(
            f"drafter={heads.name!r} has {own.depth_limit}, and {shape} is "
            f"{counted(shape.depth, 'token')} deep: give "
            f"num={own.max_depth} or less, or a tree of at most this depth"
        )
    return own.with_topology(shape)


def _replaced(drafter: Drafter, **fields) -> Drafter:
    """Returns ``drafter`` with other values in some fields."""
    if not dataclasses.is_dataclass(drafter):
        raise TypeError(
            f"drafter={drafter!r:.60}: {', '.join(fields)} cannot be set on a drafter that is no "
            "dataclass; make its class a dataclass, or make the object with other values"
        )
    return dataclasses.replace(drafter, **fields)


def named(
    lm: LM, name: str | os.PathLike, **settings
) -> str | LM | HeadLM | WithLookup | SelfDraft:
    """Returns the drafter that a name stands for; names of plain decoding and of tables stay names.

    A folder or a hub name holds a draft model or heads, as its config tells. If the folder of a
    draft model has no tokenizer, as after training, the target's tokenizer is used.

    Args:
      lm: the target.
      name: a name, a folder or a hub name.
      settings: further arguments of ``load`` for a draft model.

    Raises:
      ValueError: the name is unknown, or ``load`` or ``load_drafter`` refuses the drafter.
      OSError: the folder or the hub name cannot be read (``FileNotFoundError`` if it is absent).
    """
    if not isinstance(name, str):
        return _from_folder(lm, os.fspath(name), settings)
    _check_name(name)
    if name == AUTO:
        return auto_drafter(lm)
    if is_simple(name):
        return name
    if lookup := lookup_of(name):
        return WithLookup(named(lm, name.removeprefix(lookup), **settings), lookup)
    return _with_weights(lm, name, settings)


def _with_weights(lm: LM, name: str, settings: dict) -> LM | HeadLM | SelfDraft:
    """Returns the draft model, the heads or the layers of a name."""
    if name == DRAFT:
        return own_draft(lm)
    if name.partition(":")[0] == SELF:
        return own_layers.named_layers(lm, name, NUM_DRAFT)
    if other_vocabulary.method_of(name):
        return other_vocabulary.named_translated(lm, name, settings)
    if cascades.is_cascade(name):
        folders = (_without_lookups(word) for word in name.split(":"))
        return _cascade(lm, name, tuple(map(folder_stamp, folders)), **settings)
    if model := small_caches.model_of(name):
        return small_caches.with_small_cache(lm, name, named(lm, model, **settings), NUM_DRAFT)
    entry = registry.find(name) if name in _heads() else None
    return _from_folder(lm, name, settings) if entry is None else own_heads(lm, entry.name)


def _without_lookups(name: str) -> str:
    """A name without what stands before it, such as ``ngram+``."""
    while before := lookup_of(name):
        name = name.removeprefix(before)
    return name


@once_in_a_row
def _cascade(lm: LM, name: str, stamps: object, **settings) -> HeadLM:
    """The cascade of a name whose folders are as ``stamps`` say."""
    find = lambda text: named(lm, text, **settings)  # noqa: E731
    return cascades.named_cascade(lm, name, find, resolve_drafter)


def _from_folder(lm: LM, text: str, settings: dict) -> LM | HeadLM:
    """Returns the draft model or the heads in a folder, or of a name on the hub."""
    try:
        folder = config_folder(text)
    except OSError as error:
        if "/" in text:
            raise
        meant = did_you_mean(text, typed_names(), repr)
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(
            f"{error}. If the name of a drafter was meant: {meant}`specjax drafters` lists all"
        ) from None
    return _loaded(lm, text, folder, folder_stamp(text), **settings)


@once_in_a_row
def _loaded(lm: LM, text: str, folder: Path, stamp: object, **settings) -> LM | HeadLM:
    """The draft model or the heads of a name, of which ``folder`` holds the config.

    Args:
      stamp: the state of the folder, so that a changed one is loaded anew.
    """
    config = read_json(folder, "config.json")
    model_type = config.get("model_type")
    known = model_type in FAMILIES or model_type in families.FAMILIES
    if known and not holds_heads(text, config):
        return load_draft(lm, text, config, settings)
    return load_drafter(text, lm)
