"""The keys of a block drafter's ``config.json``: where they may stand, and which are refused.

A part of the config, ``dflash_config`` in most layouts, is about blocks. Programs do not agree on
which keys stand in it and which beside it, so those that may stand in either are read in both and
may not have two values, and what is read nowhere is refused if it may change what is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..models.config import DecoderConfig
from ..types import HeadTarget
from .flat_keys import TARGETS, check_flat, check_part
from .weights import flags_of

CAP = "final_logit_softcapping"
LABELS = {"shift_label": None, "sample_from_anchor": None}  # two names of ``from_root``
PROJECTORS = ("dflash",)  # ``projector_type`` of SpecForge's files
READ = (  # keys of ``dflash_config``
    "add_swa_attention_sink_bias",
    "attention_sink_bias",
    "block_size",
    "causal",
    "causal_head",
    CAP,
    "input_embedding_scale",
    "mask_token_id",
    "output_multiplier",
    "projector_type",
    "sample_from_anchor",
    "shift_label",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
)
ONLY = {  # further keys, of which other values are another architecture's
    "attention_mode": ("gqa", "mha"),
    "fc_layernorm": (False,),
    "pure_draft_prefix_len": (0,),
    "use_aux_hidden_state": (True,),
}
OUTSIDE = ONLY | {  # keys that have a meaning beside ``dflash_config`` in other programs
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "causal": (False,),
    "causal_head": (False,),
    CAP: (0,),
    "input_embedding_scale": (1,),
    "is_causal": (False,),
    "output_multiplier": (1,),
    "projector_type": PROJECTORS,
    "use_swa": (False,),
}
OUTSIDE_READ = (  # those that ``shape_of`` reads there
    "add_swa_attention_sink_bias",
    "attention_sink_bias",
    CAP,
    "input_embedding_scale",
    "is_causal",
    "output_multiplier",
    "projector_type",
)


def own_part(config: Mapping, key: str = "dflash_config") -> Mapping:
    """The part of a config about blocks; empty where it is absent.

    Raises:
      ValueError: it is no object.
    """
    own = config.get(key) or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"config.json: {key}={own!r}: it must be an object")
    return own


def in_either(config: Mapping, own: Mapping, key: str) -> Any:
    """The value of a key that may stand in ``own``, the part about blocks, or beside it; None: in
    neither.

    Raises:
      ValueError: it stands in both, with two values.
    """
    given = [part[key] for part in (own, config) if part.get(key) is not None]
    if any(value != given[0] for value in given[1:]):
        raise ValueError(
            f"config.json: {key} is {given[0]!r} in the part about blocks, and {given[1]!r} beside "
            "it: delete the value with which the drafter was not trained"
        )
    return given[0] if given else None


def drafts_from_root(config: Mapping, own: Mapping) -> bool | None:
    """Whether each place says the token after it, so that the root's drafts too; None: the config
    does not say. ``own`` is the part of ``config`` about blocks.

    Raises:
      ValueError: a key is neither true nor false, or two keys contradict each other.
    """
    return only_value(flags_of({key: in_either(config, own, key) for key in LABELS}, **LABELS))


def only_value(said: Mapping[str, Any]) -> Any:
    """The value on which all keys of a config agree that have one; None if none has.

    Raises:
      ValueError: they contradict each other.
    """
    given = {key: value for key, value in said.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        told = ", ".join(f"{key}={value}" for key, value in given.items())
        raise ValueError(
            f"config.json: {told} contradict each other: they are names of one setting; leave out "
            "those that are not true of the drafter"
        )
    return values[0] if values else None


def check_known(config: Mapping, own: Mapping, known: set[str], projectors, part: str) -> None:
    """Raises ValueError for keys that are not known, and for values that mean another architecture.

    Args:
      config: the file's.
      own: the part of it that is about blocks.
      known: keys that the layout reads itself.
      projectors: what ``projector_type`` may be.
      part: the key of ``own`` in ``config``.
    """
    kind = in_either(config, own, "projector_type")
    if kind is not None and kind not in projectors:
        raise ValueError(
            f"projector_type={kind!r}: the tensors are those of a drafter whose projector_type is "
            f"{' or '.join(map(repr, projectors))}"
        )
    check_part(part, own, {*READ, *known}, ONLY)
    check_outside(config, known={*known, *OUTSIDE_READ})
    check_flat(config, {part, "draft_vocab_size", *READ, *ONLY, *OUTSIDE, *known, *TARGETS})


def check_outside(
    config: Mapping, known: Iterable[str] = (), where: str = "write it in dflash_config"
) -> None:
    """Raises ValueError for keys beside ``dflash_config`` that mean another architecture to a
    program that reads them there, and are not in ``known``: those that the layout reads there.
    ``where``: the way out that the error names."""
    for key, accepted in OUTSIDE.items():
        value = config.get(key)
        if key not in known and value is not None and value not in accepted:
            raise ValueError(
                f"config.json: {key}={value!r} is not read there in this layout; accepted: "
                f"{', '.join(map(repr, accepted))}; {where}"
            )


def check_whole_vocab(config: Mapping, vocab_size: int) -> None:
    """Raises ValueError for a ``draft_vocab_size`` in a layout that has no map of a part of the
    vocabulary; SpecForge's export writes the whole size into every config."""
    few = config.get("draft_vocab_size")
    if few not in (None, vocab_size):
        raise ValueError(
            f"draft_vocab_size={few!r}: in this layout drafters are over the target's whole "
            f"vocabulary, {vocab_size} tokens; over a part of it they are read in speculators' "
            "layout, with d2t"
        )


def check_scales(config: Mapping, own: Mapping, target) -> None:
    """Raises ValueError for embeddings or logits that are not those of the target's own tables.

    The authors' code multiplies both by numbers of the file, and caps logits by another.
    """
    for key in ("input_embedding_scale", "output_multiplier"):
        value = in_either(config, own, key)
        if value not in (None, 1):
            raise ValueError(f"{key}={value!r}: only 1 is supported, the target's own tables")
    cap, theirs = in_either(config, own, CAP) or None, cap_of(target.target)
    if cap is not None and cap != theirs:
        raise ValueError(f"{CAP}={cap!r}: logits are capped as the target's, whose cap is {theirs}")


def cap_of(target: HeadTarget) -> float | None:
    """The number by which a target caps its logits; None: it does not."""
    shape = getattr(target, "config", None)
    return shape.logit_softcap if isinstance(shape, DecoderConfig) else None
