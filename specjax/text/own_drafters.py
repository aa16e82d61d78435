"""The drafters that a model has of its own: heads and a draft model in the model's folder.

``<folder>/<name>`` holds the heads of that name, such as ``eagle3``, and ``<folder>/draft`` a draft
model. Modules for multi-token prediction may lie in the model's own checkpoint instead.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..checkpoints import HeadLM, load_drafter
from ..checkpoints.mtp import holds_modules
from ..drafters import registry
from ..drafters.registry import DRAFT
from ..models.files import read_json
from ..models.lm import LM, as_drafter, load
from ..models.model_folder import EMBEDDED
from ..models.tokenizer import holds_tokenizer

log = logging.getLogger("specjax")
P = ParamSpec("P")
T = TypeVar("T")
DEFAULT_DRAFTS = {"embedded": "embedded-draft"}  # target -> its draft model, for drafter="draft"
# what drafter="auto" is for a model that was measured, and why
MEASURED = {
    "embedded": ("ngram", "in whole runs none of its own drafters is faster, see the benchmarks"),
    "embedded-draft": ("ngram", "it has no drafter of its own"),
}
# ``auto`` takes a draft model whose weights are at least so many times smaller than the target's:
# the passes of three drafts then read less than half of what a pass of the target reads, and bring
# 1.2 to 1.6 tokens in the benchmarks
TIMES_SMALLER = 8

# What was found for a model, as long as the model lives: a cache that held the model itself would
# keep its weights in memory after the last reference to it is gone.
_FOUND: weakref.WeakKeyDictionary[LM, dict] = weakref.WeakKeyDictionary()


def _once_a_model(find: Callable[Concatenate[LM, P], T]) -> Callable[Concatenate[LM, P], T]:
    """``find(lm, *names)``, called once for each living model and names."""

    @functools.wraps(find)
    def remembered(lm: LM, *names: P.args, **options: P.kwargs) -> T:
        found = _FOUND.setdefault(lm, {})
        key = find, *names, *options.items()
        if key not in found:
            found[key] = find(lm, *names, **options)
        return found[key]

    return remembered


@_once_a_model
def auto_drafter(lm: LM) -> str | LM | HeadLM:
    """What ``drafter="auto"`` is for a model: the first of ``own_names`` that can be loaded, else
    ``"ngram"``, which needs no weights and costs almost nothing where there is nothing to copy.

    Nothing is measured: ``specjax.compare`` and ``specjax.plan`` tell whether it pays. For the
    embedded models a table names what pays by the figures of the documentation.
    """
    if lm.name in MEASURED:
        name, reason = MEASURED[lm.name]
        log.debug("drafter='auto' is %r for %s: %s", name, lm.name, reason)
        return name
    try:
        names = own_names(lm)
    except (ValueError, OSError) as error:
        log.warning("what %s has of its own cannot be read: %s", lm.name, error)
        names = ()
    for name in names:
        try:
            found = own_draft(lm) if name == DRAFT else own_heads(lm, name)
            if isinstance(found, LM):
                as_drafter(lm, found)  # refuses other tokens and other meshes
        except (ValueError, OSError) as error:
            log.warning("the drafter %r of %s cannot be used: %s", name, lm.name, error)
            continue
        log.debug("drafter='auto' is %r for %s, whose folder holds it", name, lm.name)
        return found
    return "ngram"


def own_names(lm: LM) -> tuple[str, ...]:
    """Names of the drafters that a model has of its own and that ``auto`` may take, those of the
    highest ``priority`` in the registry first. A draft model must be ``TIMES_SMALLER``."""

    def held(entry: registry.Entry) -> bool:
        folder = _folder_within(lm, entry.name)
        if entry.name == DRAFT:
            return folder is not None and _is_small(folder, Path(lm.name))
        return folder is not None or (entry.name == "mtp" and _holds_modules(lm))

    return tuple(entry.name for entry in registry.in_folders() if held(entry))


@_once_a_model
def own_heads(lm: LM, name: str) -> HeadLM:
    """The heads of a name that a model has of its own.

    Raises:
      ValueError: it has none, or they are broken.
    """
    if name == "mtp" and _holds_modules(lm):
        return load_drafter(lm.name, lm, revision=lm.revision)
    if folder := _folder_within(lm, name):
        return load_drafter(folder, lm)
    if lm.name in EMBEDDED:
        raise ValueError(
            f"drafter={name!r}: no {name} heads for {lm.name} are part of this installation; train "
            "some (specjax train --help), and give their folder"
        )
    raise ValueError(
        f"drafter={name!r}: {lm.name} has no {name} heads of its own; pass "
        "drafter=specjax.load_drafter(<a folder or hub name>, lm), or drafter='ngram'"
    )


def own_draft_name(lm: LM) -> str | None:
    """The name or folder of the draft model that belongs to a target; None: there is none."""
    if lm.name in EMBEDDED:
        return DEFAULT_DRAFTS.get(lm.name)
    folder = _folder_within(lm, DRAFT)
    return None if folder is None else str(folder)


@_once_a_model
def own_draft(lm: LM) -> LM:
    """The draft model that belongs to a target.

    Raises:
      ValueError: there is none, or it is broken.
    """
    name = own_draft_name(lm)
    if name is None:
        raise ValueError(
            f"drafter='draft': {lm.name} has no draft model of its own; pass "
            "drafter=specjax.load(<a small model with the same tokenizer>), or drafter='ngram'"
        )
    if name in EMBEDDED:
        return _load_once(name, lm.dtype.name)
    return load_draft(lm, name, read_json(Path(name), "config.json"), {})


def load_draft(lm: LM, name: str, config: dict, settings: dict[str, Any]) -> LM:
    """The draft model in a folder, or of a name on the hub, with its config. One without a
    tokenizer, as training exports it, has its target's. ``settings``: what ``load`` takes."""
    own: dict[str, Any] = {"dtype": lm.dtype.name}
    fits = config.get("vocab_size") == lm.target.vocab_size
    if fits and Path(name).is_dir() and not holds_tokenizer(name):
        own["tokenizer"] = lm.tokenizer or False
    return load(name, **own | settings)


@functools.cache
def _load_once(name: str, dtype: str) -> LM:
    return load(name, dtype=dtype)


def _folder_within(lm: LM, name: str) -> Path | None:
    """The folder of a drafter within that of a model, by its name or an alias."""
    entry = registry.find(name)
    names = (name,) if entry is None else (entry.name, *entry.aliases)
    beside = EMBEDDED[lm.name].parent if lm.name in EMBEDDED else Path(lm.name)
    folders = (beside / one for one in names)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _holds_modules(lm: LM) -> bool:
    """Whether the checkpoint of a model has modules for multi-token prediction. A model without a
    checkpoint was made of arrays, and its name is no folder."""
    own = lm.checkpoint and lm.name not in EMBEDDED
    return bool(own) and holds_modules(lm.name, lm.revision)


def _is_small(draft: Path, target: Path) -> bool:
    """Whether a draft model's weights are ``TIMES_SMALLER`` than the target's, by their files."""
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (draft, target)
    ]
    return TIMES_SMALLER * sizes[0] <= sizes[1]
