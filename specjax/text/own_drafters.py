"""A model's own drafters: heads and a draft model in the model's folder.

``<folder>/<name>`` holds the heads of that name, such as ``eagle3``, and ``<folder>/draft`` holds a
draft model. Modules for multi-token prediction may lie in the model's checkpoint instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..checkpoints import HeadLM, load_drafter
from ..checkpoints.mtp import holds_modules
from ..checkpoints.sub_network import default_path, load_layers
from ..drafters import registry
from ..drafters.registry import DRAFT
from ..drafters.self_draft import SelfDraft
from ..models.files import read_json
from ..models.lm import LM, as_drafter, load
from ..models.model_folder import EMBEDDED, name_of
from ..models.tokenizer import holds_tokenizer

log = logging.getLogger("specjax")
P = ParamSpec("P")
T = TypeVar("T")
DEFAULT_DRAFTS = {"embedded": "embedded-draft"}  # target -> its draft model, for drafter="draft"
# the drafter that drafter="auto" selects for a model that was measured, and the reason
MEASURED = {
    "embedded": ("eagle3", "in whole runs it is the fastest, see the benchmarks"),
    "embedded-draft": ("ngram", "it has no drafter of its own"),
}
# ``auto`` takes a draft model if its weights are at least so many times smaller than the target's.
# The passes for three drafts then read less than half as many bytes as a pass of the target, and
# give 1.2 to 1.6 tokens in the benchmarks
TIMES_SMALLER = 8

# The results for each living model: a cache that held the model itself would keep its weights in
# memory after the last reference to the model is gone.
_FOUND: weakref.WeakKeyDictionary[LM, dict] = weakref.WeakKeyDictionary()


def _once_a_model(find: Callable[Concatenate[LM, P], T]) -> Callable[Concatenate[LM, P], T]:
    """Returns ``find``, which then runs once for each living model and further arguments."""

    @functools.wraps(find)
    def remembered(lm: LM, *names: P.args, **options: P.kwargs) -> T:
        found = _FOUND.setdefault(lm, {})
        key = find, *names, *options.items()
        if key not in found:
            found[key] = find(lm, *names, **options)
        return found[key]

    return remembered


def once_in_a_row(find: Callable[Concatenate[LM, P], T]) -> Callable[Concatenate[LM, P], T]:
    """Returns ``find``, which then gives its last result for a living model again where the further
    arguments are equal: of drafters that users name, one is kept in memory."""

    @functools.wraps(find)
    def remembered(lm: LM, *names: P.args, **options: P.kwargs) -> T:
        found = _FOUND.setdefault(lm, {})
        key = names, options
        if find not in found or found[find][0] != key:
            found.pop(find, None)  # its memory, before there is another
            found[find] = key, find(lm, *names, **options)
        return found[find][1]

    return remembered


def folder_stamp(name: str) -> tuple:
    """What changes where a file of the folder ``name`` does; of a hub name, nothing."""
    folder = Path(name_of("name", name))
    if not folder.is_dir():
        return ()
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


@_once_a_model
def auto_drafter(lm: LM) -> str | LM | HeadLM | SelfDraft:
    """Returns the drafter that ``drafter="auto"`` selects for a model.

    It is the first of ``own_names`` that can be loaded, else the layers that ``specjax layers``
    saved in the model's folder, else ``"ngram"``, which needs no weights and costs almost nothing
    where nothing can be copied. For the embedded models, a table names the
    fastest drafter in the benchmarks. For other models nothing is measured: ``specjax.compare`` and
    ``specjax.plan`` measure whether the drafter is faster than plain decoding. A model of ``LM.of``
    has no folder: its drafter is ``"ngram"``, and no file and no network is asked.

    Args:
      lm: the target.
    """
    if not lm.loaded:
        return "ngram"
    measured, reason = MEASURED.get(lm.name, ("", ""))
    if measured == "ngram":
        log.debug("drafter='auto' is 'ngram' for %s: %s", lm.name, reason)
        return measured
    try:
        names = own_names(lm)
    except (ValueError, OSError) as error:
        log.warning("the own drafters of %s cannot be read: %s", lm.name, error)
        names = ()
    names = sorted(names, key=lambda name: name != measured)  # the fastest, then as they were
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
    return saved_layers(lm) or "ngram"


def saved_layers(lm: LM) -> SelfDraft | None:
    """Returns the layers that ``specjax layers`` saved in the folder of a model; None if there are
    none, or if they cannot be used, of which a warning tells.

    Args:
      lm: the target.
    """
    path = default_path(lm) if lm.loaded else None
    if path is None or not path.is_file():
        return None
    try:
        return load_layers(path, lm)
    except (ValueError, OSError) as error:
        log.warning("the layers that were saved for %s cannot be used: %s", lm.name, error)
        return None


def own_names(lm: LM) -> tuple[str, ...]:
    """Returns the names of a model's own drafters that ``auto`` may take.

    Drafters with a higher priority come first (``registry.Entry.priority_of`` their config). A
    draft model must be ``TIMES_SMALLER`` than the target.

    Args:
      lm: the target.
    """

    def held(entry: registry.Entry) -> bool:
        folder = _folder_within(lm, entry.name)
        if entry.name == DRAFT:
            return folder is not None and _is_small(folder, Path(lm.name))
        return folder is not None or (entry.name == "mtp" and _holds_modules(lm))

    def rank(entry: registry.Entry) -> int:
        config, folder = {}, _folder_within(lm, entry.name)
        if folder is not None:
            with contextlib.suppress(ValueError, OSError):  # loading says what is wrong with it
                config = read_json(folder, "config.json")
        return -(entry.priority_of(config) or 0)

    return tuple(entry.name for entry in sorted(filter(held, registry.in_folders()), key=rank))


@_once_a_model
def own_heads(lm: LM, name: str) -> HeadLM:
    """Returns a model's own heads of a name, which is their ``HeadLM.name``.

    Args:
      lm: the target.
      name: the name of the heads, such as ``eagle3``.

    Raises:
      ValueError: the model has no heads of this name, or they cannot be loaded.
    """
    if name == "mtp" and _holds_modules(lm):
        return dataclasses.replace(load_drafter(lm.name, lm, revision=lm.revision), name=name)
    if folder := _folder_within(lm, name):
        return dataclasses.replace(load_drafter(folder, lm), name=name)
    if lm.loaded and lm.name in EMBEDDED:
        raise ValueError(
            f"drafter={name!r}: no {name} heads for {lm.name} are part of this installation; train "
            "some (specjax train --help), and give their folder"
        )
    raise ValueError(
        f"drafter={name!r}: {lm.name} has no {name} heads of its own; pass "
        "drafter=specjax.load_drafter(<a folder or hub name>, lm), or drafter='ngram'"
    )


def own_draft_name(lm: LM) -> str | None:
    """Returns the name or folder of a target's own draft model, or None."""
    if lm.loaded and lm.name in EMBEDDED:
        return DEFAULT_DRAFTS.get(lm.name)
    folder = _folder_within(lm, DRAFT)
    return None if folder is None else str(folder)


@_once_a_model
def own_draft(lm: LM) -> LM:
    """Returns a target's own draft model.

    Raises:
      ValueError: the target has no draft model, or it cannot be loaded.
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
    """Returns the draft model in a folder, or of a name on the hub.

    If a folder has no tokenizer, as after training, the target's tokenizer is used.

    Args:
      lm: the target.
      name: a folder or a hub name.
      config: the draft model's ``config.json``.
      settings: further arguments of ``load``.
    """
    own: dict[str, Any] = {"dtype": lm.dtype.name}
    name = name_of("name", name)
    fits = config.get("vocab_size") == lm.target.vocab_size
    if fits and Path(name).is_dir() and not holds_tokenizer(name):
        own["tokenizer"] = lm.tokenizer or False
    return load(name, **own | settings)


@functools.cache
def _load_once(name: str, dtype: str) -> LM:
    return load(name, dtype=dtype)


def _folder_within(lm: LM, name: str) -> Path | None:
    """Returns the folder of a drafter within a model's folder, by the drafter's name or an alias;
    None if there is none, or if the model was not loaded, since its name is no folder then."""
    if not lm.loaded:
        return None
    entry = registry.find(name)
    names = (name,) if entry is None else (entry.name, *entry.aliases)
    beside = EMBEDDED[lm.name].parent if lm.name in EMBEDDED else Path(lm.name)
    folders = (beside / one for one in names)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _holds_modules(lm: LM) -> bool:
    """Returns whether a model's checkpoint has modules for multi-token prediction.

    A model without a checkpoint was made from arrays, and its name is not a folder.
    """
    return lm.loaded and lm.name not in EMBEDDED and holds_modules(lm.name, lm.revision)


def _is_small(draft: Path, target: Path) -> bool:
    """Returns whether a draft model's files of weights are ``TIMES_SMALLER`` than the target's."""
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (draft, target)
    ]
    return TIMES_SMALLER * sizes[0] <= sizes[1]
