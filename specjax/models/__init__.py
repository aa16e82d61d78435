"""Target models: one configurable decoder, and the Hugging Face layout in and out."""

from .causal_lm import CausalLM
from .config import DecoderConfig
from .decoder import Decoder
from .hf import load_config, load_weights, save_pretrained
from .lm import LM, as_drafter, check_same_tokenizer, load
from .tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "LM",
    "CausalLM",
    "Decoder",
    "DecoderConfig",
    "StreamDecoder",
    "Tokenizer",
    "as_drafter",
    "check_same_tokenizer",
    "load",
    "load_config",
    "load_weights",
    "save_pretrained",
]
