"""The small cache of a draft model, as ``:window=512,sinks=4`` after its name asks for it, and a
cache in eight bits: ``:cache=int8`` or ``:window=512,cache=fp8``.

``draft:window=512`` is the target's own draft model, ``FOLDER:window=512`` any other; ``self:...``
(``own_layers.py``) is the target itself, which reads its own cache so.
"""

from __future__ import annotations

from typing import Any

from .._internal.named_settings import parse_settings
from ..models.config import SINKS
from ..models.lm import LM
from ..models.small_cache import low_bit_cache, windowed
from ..models.snap_kv import SnapKV
from ..models.top_chunks import TopChunks

OWN_WINDOW = {"window": int, "sinks": int}
SETTINGS = OWN_WINDOW | {"cache": str}
CHUNKS = {"chunk": int, "every": int}  # of the target's own cache alone, as the others
PROMPT = {"observe": int, "pool": int}
CHOICE = {"budget": int} | CHUNKS | PROMPT
OWN_SETTINGS = OWN_WINDOW | CHOICE


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
    """Returns ``window`` and ``sinks`` of a text such as ``window=512,sinks=4``, and ``cache``.

    Args:
      name: the value of ``drafter=``, for errors.
      text: the settings.
      model: what stands before them, for errors.
      known: the settings that there are, and their types.

    Raises:
      ValueError: a setting is unknown or no number, or there is neither a window nor ``cache``.
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
    return {"sinks": SINKS} | found


def parse_own(name: str, text: str, model: str) -> dict[str, Any]:
    """Returns what ``parse`` does for the target's own cache, and ``chunks`` where a text has a
    budget: ``window=64,budget=512,chunk=8,every=8`` or, with a setting of ``SnapKV``,
    ``window=64,budget=512,observe=32,pool=5``.

    Raises:
      ValueError: as ``parse``; there are settings of a choice without a budget, those of both ways
        to choose, or some that cannot be.
    """
    found = parse(name, text, model, OWN_SETTINGS)
    choice = {setting: found.pop(setting) for setting in CHOICE if setting in found}
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


def with_small_cache(name: str, found: object) -> LM:
    """Returns the draft model ``found`` with the small cache that ``name`` asks for.

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
        found = windowed(found, **settings) if settings else found
        return found if kind is None else low_bit_cache(found, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"drafter={name!r}: {error}") from None
