"""The small cache of a draft model, as ``:window=512,sinks=4`` after its name asks for it, chosen
entries besides (``:window=64,budget=512``), and a cache in eight bits: ``:cache=int8`` or
``:window=512,cache=fp8``.

``draft:window=512`` is the target's own draft model, ``FOLDER:window=512`` any other; ``self:...``
(``own_layers.py``) is the target itself, which reads its own cache so. The words of windows and
choices are the same for all of them.
"""

from __future__ import annotations

from typing import Any

from .._internal.named_settings import parse_settings
from ..checkpoints import HeadLM
from ..drafters.sparse_draft import SparseDraftModel
from ..models.config import SINKS
from ..models.lm import LM, as_drafter
from ..models.small_cache import low_bit_cache, windowed
from ..models.snap_kv import SnapKV
from ..models.top_chunks import TopChunks
from ..models.vocabularies import OtherTokenizer

WINDOW = {"window": int, "sinks": int}
CHUNKS = {"chunk": int, "every": int}
PROMPT = {"observe": int, "pool": int}
CHOICE = {"budget": int} | CHUNKS | PROMPT
OWN_SETTINGS = WINDOW | CHOICE
SETTINGS = OWN_SETTINGS | {"cache": str}


def model_of(name: str) -> str | None:
    """Returns the name of the draft model in ``MODEL:window=512``; None: it has no such settings.

    Raises:
      ValueError: as ``parse`` does.
    """
    model, colon, text = name.rpartition(":")
    setting, equals, _ = text.partition("=")
    if not colon or not equals or setting not in SETTINGS:
        return None
    parse(name, text, model)
    return model


def parse(name: str, text: str, model: str, known=SETTINGS) -> dict[str, Any]:
    """Returns the settings of a text: ``window`` and ``sinks`` of ``window=512,sinks=4``,
    ``cache``, and ``chunks`` where it has a budget: ``window=64,budget=512,chunk=8,every=8`` or,
    with a setting of ``SnapKV``, ``window=64,budget=512,observe=32,pool=5``.

    Args:
      name: the value of ``drafter=``, for errors.
      text: the settings.
      model: what stands before them, for errors.
      known: the settings that there are, and their types.

    Raises:
      ValueError: a setting is unknown or no number, there is neither a window nor ``cache``, or
        there are settings of a choice without a budget, those of both ways to choose, or some that
        cannot be.
    """
    if model.rpartition(":")[2].partition("=")[0] in known:
        raise ValueError(
            f"drafter={name!r}: settings of one cache stand beside each other, with commas; write "
            f"'{model},{text}'"
        )
    found = parse_settings(f"drafter={name!r}", text, model, known)
    if {*found} == {"cache"}:
        return found
    if "window" not in found:
        seen = "chosen tokens" if {*found} & {*CHOICE} else "sinks"
        raise ValueError(
            f"drafter={name!r}: {seen} are seen beside a window; write '{model}:window=512,{text}'"
        )
    choice = {setting: found.pop(setting) for setting in CHOICE if setting in found}
    found = {"sinks": SINKS} | found
    if not choice:
        return found
    if "budget" not in choice:
        raise ValueError(
            f"drafter={name!r}: tokens are chosen for a budget; write '{model}:{text},budget=512'"
        )
    prompt, chunks = ({*choice} & {*settings} for settings in (PROMPT, CHUNKS))
    if prompt and chunks:
        raise ValueError(
            f"drafter={name!r}: {', '.join(sorted(prompt))} choose tokens once, by the prompt, and "
            f"{', '.join(sorted(chunks))} chunks every few rounds; leave one of the two out"
        )
    try:
        return found | {"chunks": (SnapKV if prompt else TopChunks)(**choice)}
    except ValueError as error:
        raise ValueError(f"drafter={name!r}: {error}") from None


def with_small_cache(lm: LM, name: str, found: object, num_draft: int) -> LM | HeadLM:
    """Returns the draft model ``found`` with the small cache that ``name`` asks for.

    Args:
      lm: the target.
      name: the value of ``drafter=``.
      found: what stands before the settings.
      num_draft: the usual number of tokens of a draft over chosen entries.

    Raises:
      ValueError: it is no decoder-only draft model, or the cache does not fit it.
    """
    model, _, text = name.rpartition(":")
    if not isinstance(found, LM):
        raise ValueError(
            f"drafter={name!r}: this cache is for draft models, and {model!r} names none; give "
            "'draft:window=512', 'FOLDER:window=512', or 'self:window=512' for the target itself"
        )
    settings = parse(name, text, model)
    kind = settings.pop("cache", None)
    try:
        if "chunks" not in settings and settings:
            found = windowed(found, **settings)
        if kind is not None:
            found = low_bit_cache(found, kind)
        if "chunks" not in settings:
            return found
        drafter = SparseDraftModel(num_draft, model=as_drafter(lm, found), **settings)
    except OtherTokenizer as error:
        raise OtherTokenizer(f"drafter={name!r}: {error}", error.across) from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"drafter={name!r}: {error}") from None
    told = f"{found.fingerprint}:{text}"
    return HeadLM(drafter, found.params, name=name, fingerprint=told, target=lm.checkpoint)
