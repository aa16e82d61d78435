"""From what a user names to a drafter, its tree and its weights."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from . import drafters, topology
from .models.lm import LM, as_drafter, load
from .types import PyTree

DEFAULT_DRAFTS = {"embedded": "embedded-draft"}  # target -> its draft model, for drafter="draft"
NUM_DRAFT = 3  # by default; on CPU a pass costs the same over 2 to 4 tokens
AUTO, AUTO_DRAFTS = "auto", 7  # num_draft that follows acceptance and cost, and its largest value
MOST_DRAFTS = 64  # levels of a draft; each is a part of the program, thousands compile for hours
MOST_NODES = 1024  # of a tree: each sees all others


def resolve_drafter(
    lm: LM, drafter, num_draft: int | str | None = None, params: PyTree = None, tree=None
):
    """The drafter object for what ``generate`` was given, and its weights.

    With ``num_draft="auto"`` an ``Adaptive`` one, whose costs are still to be measured. ``tree``:
    what ``topology.as_topology`` takes, in place of a number of drafts.

    Raises:
      ValueError, TypeError: the drafter, the number or the tree is none that is accepted.
    """
    if isinstance(num_draft, str) and num_draft == AUTO:
        inner, params = resolve_drafter(lm, drafter, None if tree else AUTO_DRAFTS, params, tree)
        if not inner.num_draft:  # plain decoding
            return inner, params
        if isinstance(inner, drafters.Adaptive):
            raise ValueError("num_draft='auto': the drafter is adaptive already; leave it out")
        adaptive = drafters.Adaptive(inner)
        return adaptive, {"inner": params, "costs": np.ones(len(adaptive.widths), np.float32)}
    shape = None if tree is None else _checked(tree, num_draft)

    def drafts():
        if num_draft is None:
            return NUM_DRAFT
        if not isinstance(num_draft, int | np.integer) or not 1 <= num_draft <= MOST_DRAFTS:
            raise ValueError(
                f"num_draft={num_draft}: it must be an integer from 1 to {MOST_DRAFTS}, or "
                "'auto'; for plain decoding give drafter='plain'"
            )
        return int(num_draft)

    if drafter is None or isinstance(drafter, str) and drafter in ("plain", "ngram"):
        if shape is not None:
            raise ValueError(
                f"tree={tree!r}: drafter={drafter!r} drafts no trees; take a draft model or heads"
            )
        if drafter == "ngram":
            return drafters.NGram(num_draft=drafts()), None
        return drafters.Plain(), None
    if isinstance(drafter, str):
        if drafter != "draft":
            raise ValueError(
                f"drafter={drafter!r} is unknown; accepted: 'draft', 'ngram', 'plain' (or None), "
                "a draft model (drafter=specjax.load(folder_or_hub_name)), a Drafter object"
            )
        drafter = default_draft(lm)
    if isinstance(drafter, LM):
        model = as_drafter(lm, drafter)
        shape = shape or topology.chain(drafts())
        return drafters.DraftModel(topology=shape, model=model), drafter.params
    if isinstance(drafter, type) or not hasattr(drafter, "draft_step"):
        raise TypeError(
            f"drafter={drafter!r}: accepted are 'draft', 'ngram', 'plain', None, an LM from "
            "specjax.load, or an object with init, draft_step, readout and observe"
        )
    if shape is not None:
        if not hasattr(drafter, "topology"):
            raise ValueError(
                f"tree={tree!r}: {getattr(drafter, 'name', drafter)!r} drafts no trees of one's "
                "choice; leave it out"
            )
        drafter = dataclasses.replace(drafter, topology=shape)
    return drafter, params


def _checked(tree, num_draft) -> topology.Topology:
    if num_draft is not None:
        raise ValueError(f"tree={tree!r} and num_draft={num_draft}: give one of the two, or 'auto'")
    shape = topology.as_topology(tree)
    if shape.depth > MOST_DRAFTS or shape.num_nodes > MOST_NODES:
        raise ValueError(
            f"tree={tree!r} has {shape.num_nodes} nodes, {shape.depth} deep; at most {MOST_NODES} "
            f"nodes and {MOST_DRAFTS} levels"
        )
    if shape.depth < 1:
        raise ValueError(f"tree={tree!r} has no node below the root; take drafter='plain'")
    return shape


def default_draft(lm: LM) -> LM:
    """The draft model that belongs to a target."""
    if lm.name not in DEFAULT_DRAFTS:
        raise ValueError(
            f"drafter='draft': {lm.name} has no draft model of its own; pass "
            "drafter=specjax.load(<a small model with the same tokenizer>), or drafter='ngram'"
        )
    return _load_once(DEFAULT_DRAFTS[lm.name], lm.dtype.name)


@functools.cache
def _load_once(name: str, dtype: str) -> LM:
    return load(name, dtype=dtype)
