"""What the targets of decoder-only and encoder-decoder models share."""

from __future__ import annotations

import dataclasses

import numpy as np

from .. import sharding
from ..sharding import MODEL
from ..types import PyTree, Target
from .config import DecoderConfig
from .placement import check_divides, place_weights
from .seq2seq.config import EncoderDecoderConfig


@dataclasses.dataclass(frozen=True)
class CheckpointTarget(Target):
    """A ``Target`` whose weights are a checkpoint's; ``params`` is an NNX state.

    Attributes:
      config: the shape of the model.
      rows: V, the width of the logits, if it should differ from the checkpoint's. Models with one
        tokenizer pad their vocabularies differently, and the logits of a draft model must be as
        wide as the target's. Ids that the model lacks get no probability; ids that the target
        lacks are cut.
      quantized: the scheme of ``params`` (see ``quantize.py``), or None.
      published: whether the checkpoint itself holds the quantized weights, which are then its law:
        nothing is approximate.
      axis: the axis of the mesh in use, if any, over which heads, features and vocabulary are
        spread; None: every device holds all of them, as it does of a small draft model.
    """

    config: DecoderConfig | EncoderDecoderConfig
    rows: int | None = None
    quantized: str | None = None
    published: bool = False
    axis: str | None = MODEL

    @property
    def approximate(self) -> str:
        """The reason why the law is not that of the checkpoint; empty if it is."""
        if self.published or not self.quantized:
            return ""
        return f"target quantized to {self.quantized}"

    @property
    def vocab_size(self) -> int:
        return self.rows or self.config.vocab_size

    def activation_dtype(self, params) -> np.dtype:
        return params["norm"]["weight"].dtype  # other weights may be quantized

    def shard(self, params, mesh) -> PyTree:
        """``params`` on the devices of a mesh, each holding its part; see ``sharding.place``."""
        return place_weights(params, self.config, mesh, self.axis)

    def _check_mesh(self) -> None:
        """Raises ValueError if the mesh in use cannot share the model."""
        if self.axis:
            check_divides(self.config, sharding.size(self.axis))
