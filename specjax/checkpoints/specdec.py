"""SpecDec drafters. The authors' files are fairseq's, of another architecture; this layout is
specific to this project::

    embedding, encoder.blocks.{i}.attention.{q,k,v,o}.weight, ..., norm.weight

The names are those of the module's parameters. The config has ``specdec_config``, with
``num_heads``, ``mask_token``, ``source``, and the fields of ``EncoderDecoderConfig`` in
``network``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..drafters.specdec import SpecDec, SpecDecConfig
from ..models.seq2seq.config import EncoderDecoderConfig
from .weights import check_integers, params_of, tensors_of

DESCRIPTION = "SpecDec's of this project (specdec_config; embedding, encoder.blocks...)"
DRAFTER, WEIGHTS_FILE = SpecDec, "model"
KEY = "specdec_config"
_SIZES = ("num_heads", "mask_token", "source")


def matches(config: Mapping, names: set[str]) -> bool:
    return KEY in config


def load(config: Mapping, tensors: Mapping, target):
    said = config[KEY]
    if not isinstance(said, Mapping):
        raise ValueError(f"{KEY}={said!r}: it must be an object")
    sizes: dict[str, Any] = {name: said.get(name) for name in _SIZES}
    check_integers(**sizes)
    network = _network_of(said.get("network"))
    if network.vocab_size != target.target.vocab_size:
        raise ValueError(
            f"made for another target than {target.name}: vocab_size={network.vocab_size} (the "
            f"target: {target.target.vocab_size}); load the target that it belongs to"
        )
    drafter = SpecDec(config=SpecDecConfig(network=network, **sizes), target=target.target)
    return drafter, params_of(tensors, _names(drafter), drafter.shapes, target.dtype)


def save(drafter: SpecDec, params, target=None) -> tuple[dict, dict]:
    said = {name: getattr(drafter.config, name) for name in _SIZES}
    network = dataclasses.asdict(drafter.config.network)
    said["network"] = {k: list(x) if isinstance(x, tuple) else x for k, x in network.items()}
    return {"model_type": "specdec", KEY: said}, tensors_of(params, _names(drafter))


def _names(drafter: SpecDec) -> dict[str, tuple]:
    """Names of tensors to paths of parameters."""
    return {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(drafter.shapes)}


def _network_of(said: object) -> EncoderDecoderConfig:
    """The shape of the network. Raises ValueError for what is none."""
    if not isinstance(said, Mapping):
        raise ValueError(f"network={said!r:.60}: it must be an object with the sizes of the layers")
    fields = {field.name: field for field in dataclasses.fields(EncoderDecoderConfig)}
    unknown = [key for key in said if key not in fields]
    lacking = [
        name
        for name, field in fields.items()
        if name not in said and field.default is dataclasses.MISSING
    ]
    if unknown or lacking:
        raise ValueError(
            f"network: it has {', '.join(unknown) or 'nothing'} that is not known, and lacks "
            f"{', '.join(lacking) or 'nothing'}"
        )
    lists: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in said.items()}
    check_integers(
        **{key: lists[key] for key in fields if fields[key].type == "int" and key in lists}
    )
    return EncoderDecoderConfig(**lists)
