"""The tables that describe a family of models: keys of config files and names of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .tensors import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """The layers of a family that attend to a sliding window (the key ``sliding_window``).

    Attributes:
      default: the window where the key is missing; where it is null there is none.
      every: each ``every``-th layer is global, the others are local; None: all are local.
      switch: a key that must be true, or there is no window; with such a key the window begins at
        the layer ``max_window_layers``.
      typed: whether the key ``layer_types``, if it is there, says which layers have the window.
    """

    default: int | None = None
    every: int | None = None
    switch: str | None = None
    typed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The config keys and tensor names of one ``model_type``.

    Attributes:
      architecture: the class in transformers.
      keys: field of ``DecoderConfig`` -> key of ``config.json``.
      defaults: key -> what transformers assumes where a file leaves it out.
      fixed: fields that are the same in the whole family.
      mlp_ratio: the intermediate size over the hidden size, where a file leaves the former out.
      only: key -> the values that are implemented; others are refused.
      aliases: key -> the key that it stands for, where that key is missing.
      writes: further keys that files need: key -> its value, or a function of the config.
      equal: key -> another key that must have the same value; else the file is refused.
      rope_keys: field -> key of the rotary embedding's numbers, as transformers 4 writes them.
      rope_types: the RoPE scalings of the family.
      windows: the sliding windows of its layers; None: no layer has one.
      tensors: every tensor that a member of the family may have.
      packed: other tensors of the same parameters, which are read where a file has them (experts
        as ``save_pretrained`` of transformers 5 writes them with ``save_original_format=False``).
      prefix: of the tensor names; checkpoints of the bare trunk leave it out.
      inside: the prefix of the names in the checkpoint of a larger model that contains this one
        as its text model.
      harmless: the pattern of buffers that some files hold and that are not needed.
    """

    architecture: str
    keys: Mapping[str, str]
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    mlp_ratio: int | None = None
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rope_keys: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"rope_theta": "rope_theta"}
    )
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    windows: Windows | None = None
    inside: str = ""
    tensors: tuple[Tensor, ...]
    packed: tuple[Tensor, ...] = ()
    prefix: str
    harmless: str
