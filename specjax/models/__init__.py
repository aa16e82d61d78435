"""Target models: one configurable decoder, and the Hugging Face layout in and out."""

from .config import DecoderConfig
from .decoder import Decoder
from .hf import load_config, load_weights, save_pretrained

__all__ = ["Decoder", "DecoderConfig", "load_config", "load_weights", "save_pretrained"]
