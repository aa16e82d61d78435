"""The sizes of drafters whose layers have the target's width and vocabulary."""

from __future__ import annotations

from ..models.config import DecoderConfig


class SizesOfLayer:
    """The sizes that a config of heads has from its field ``layer``."""

    layer: DecoderConfig

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size


class SizesOfLayers(SizesOfLayer):
    """The same for a config whose field is ``layers``."""

    layers: DecoderConfig

    @property
    def layer(self) -> DecoderConfig:
        return self.layers
