"""Says what a text was made with, so that one output never holds texts of two laws.

``made_with`` hashes everything that decides a text or its law. The hashes are the same in another
process with the same settings, and others with other settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .. import acceptance
from ..checkpoints import HeadLM
from ..models.lm import LM
from ..models.seq2seq.encoder_inputs import Features
from ..models.tokenizer import Tokenizer
from ..text.drafter_names import named
from ..text.options import Options
from ..text.retrieval import Retrieval
from ..text.session import Session
from ..trees.topology import as_topology
from .jsonl_input import NEUTRAL, Prompt

SETTINGS = "settings"  # of a line: what its hashes were made of, in words, for errors
LONGEST = 60  # characters of a setting in an error


def made_with(lm: LM, prompts: list[Prompt], options: Options) -> dict[int, dict[str, Any]]:
    """Returns, for each index, hashes of the model, of the drafter with its rule, and of the prompt
    with its options; and ``SETTINGS``, which name what differs where two hashes differ."""
    drafting, sampling = options.drafting, options.sampling
    own = options.drafter
    drafter = [
        named(lm, own) if isinstance(own, str | os.PathLike) else own,
        options.drafter_params,
        drafting.num,
        None if drafting.tree is None else as_topology(drafting.tree),
        acceptance.named(drafting.rule),
        drafting.sibling_sampling,
    ]
    same = {"model": _hash(lm.fingerprint, str(lm.dtype)), "drafter": _hash(described(drafter))}
    law = _hash(described([sampling.logits_processor, sampling.process_drafts]))
    common = _common_settings(lm, options)
    return {
        p.index: same
        | {
            "prompt_and_options": _hash(
                {**_plain(p), "seed": [options.seed, p.seed], "id": None, "law": law}
            ),
            SETTINGS: common | _own_settings(p),
        }
        for p in prompts
    }


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns ``(name=old value, name=new value)`` for each setting that differs.

    Args:
      old, new: two ``SETTINGS``, from which settings with their default are left out.
    """
    defaults = NEUTRAL | {"seed": 0, "process_drafts": True, "rule": "auto"}
    pairs = [
        (name, *(side.get(name, defaults.get(name)) for side in (old, new)))
        for name in dict.fromkeys((*old, *new))
    ]
    return [(f"{name}={a!r}", f"{name}={b!r}") for name, a, b in pairs if a != b]


def _common_settings(lm: LM, options: Options) -> dict[str, Any]:
    """Returns the settings of a run that are not their default, by the names of the arguments."""
    drafting, sampling = options.drafting, options.sampling
    rule = acceptance.named(drafting.rule)
    values = {
        "model": f"{_shown(lm)}, {lm.dtype.name}",
        "drafter": options.drafter,
        "num": drafting.num,
        "tree": None if drafting.tree is None else str(as_topology(drafting.tree)),
        "rule": rule if rule is None or rule != acceptance.RULES.get(rule.name) else rule.name,
        "sibling_sampling": drafting.sibling_sampling,
        "logits_processor": sampling.logits_processor,
        "process_drafts": None if sampling.process_drafts else False,
        "seed": options.seed or None,
    }
    return {name: _shown(value) for name, value in values.items() if value is not None}


def _own_settings(prompt: Prompt) -> dict[str, Any]:
    """Returns the settings of a prompt that are not their default."""
    content = _hash(prompt.tokens, _plain(prompt).get("source"))
    tokens = f"{len(prompt.tokens)} tokens, {content}"
    values = {"prompt": tokens, "max_new_tokens": prompt.max_new_tokens, "seed": prompt.seed}
    values |= {name: value for name, value in prompt.settings.items() if value != NEUTRAL[name]}
    values |= {"stop": prompt.stop or None, "stop_strings": prompt.stop_strings or None}
    return {name: _shown(value) for name, value in values.items() if value is not None}


def _shown(value: Any) -> Any:
    """Returns ``value`` as an error shows it, and as JSON holds it."""
    if isinstance(value, LM | HeadLM):
        return f"{value.name} ({value.fingerprint[:8]})"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list) and len(value) <= 8:
        return [_shown(one) for one in value]
    text = re.sub(r" at 0x\w+", "", repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... {_hash(described(value))}"


def described(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Returns ``value`` as data that JSON can hold; other values give other data.

    Models, heads and tokenizers are described by their fingerprints, arrays by a hash, functions by
    their code and the variables that they enclose (not by globals that they read), and all other
    objects by their class and fields.

    Args:
      around: ``id`` of the objects that hold ``value``, which may hold themselves.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in around:
        return "the object around"
    inner = functools.partial(described, around=(*around, id(value)))
    if isinstance(value, list | tuple):
        return [inner(part) for part in value]
    if isinstance(value, Mapping):
        return sorted(([str(name), inner(part)] for name, part in value.items()), key=_hash)
    if isinstance(value, set | frozenset):
        return sorted(map(inner, value), key=_hash)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return [str(array.dtype), list(array.shape), content]
    if isinstance(value, type | types.ModuleType):
        return [getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)]
    return [*inner(type(value)), *map(inner, _parts(value))]


def _parts(value: Any) -> list:
    """Returns what an object consists of, beside its class."""
    if isinstance(value, LM):
        return [value.fingerprint, str(value.dtype)]
    if isinstance(value, HeadLM):
        return [value.fingerprint, value.drafter]
    if isinstance(value, Tokenizer):
        return [value.fingerprint]
    if isinstance(value, Retrieval):
        return [value.drafter, value.store.path, value.session is not None]
    if isinstance(value, Session):  # its answers depend on what was served before
        return [value.drafter]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, jax.stages.Wrapped):
        return [getattr(value, "__wrapped__", None)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), value.co_names, value.co_consts]
    if dataclasses.is_dataclass(value):
        return [{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}]
    if hasattr(value, "__dict__"):
        cached = [n for n, x in _members(value).items() if isinstance(x, functools.cached_property)]
        return [{name: part for name, part in vars(value).items() if name not in cached}]
    shown = repr(value)
    return [] if " at 0x" in shown else [shown]


def _members(value: Any) -> dict[str, Any]:
    """Returns what the class of ``value`` and the classes that it extends define, by name."""
    return {name: x for kind in reversed(type(value).__mro__) for name, x in vars(kind).items()}


def _plain(prompt: Prompt) -> dict:
    """Returns the fields of a prompt, with features replaced by their digest, and without
    ``source`` if there is none."""
    fields = dict(vars(prompt))
    del fields["asked_tokens"]  # which decides the name of the reason, and no token
    none = {
        name: own if prompt.settings[name] is None else prompt.settings[name]
        for name, own in NEUTRAL.items()
    }
    fields["settings"] = {name: type(NEUTRAL[name])(value) for name, value in none.items()}
    source = fields.pop("source")
    if isinstance(source, Features):
        source = source.digest
    return fields if source is None else fields | {"source": source}


def _hash(*parts: Any) -> str:
    # NumPy's numbers are hashed as Python's numbers
    written = json.dumps(parts, default=lambda value: value.item())
    return hashlib.sha256(written.encode()).hexdigest()[:12]
