"""Target models: one configurable decoder, one encoder–decoder, and the Hugging Face layout."""

from .causal_lm import CausalLM
from .config import DecoderConfig
from .decoder import Decoder
from .encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from .hf import load_config, load_weights, save_pretrained
from .lm import LM, as_drafter, check_same_tokenizer, load
from .seq2seq import Seq2SeqLM
from .tokenizer import StreamDecoder, Tokenizer
from .whisper import start_ids

__all__ = [
    "LM",
    "CausalLM",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Seq2SeqLM",
    "StreamDecoder",
    "Tokenizer",
    "as_drafter",
    "check_same_tokenizer",
    "load",
    "load_config",
    "load_weights",
    "save_pretrained",
    "start_ids",
]
