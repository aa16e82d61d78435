"""Target models: one configurable decoder, one encoder–decoder, and the Hugging Face layout."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from . import kv_cache
    from .causal_lm import CausalLM
    from .config import DecoderConfig
    from .decoder import Decoder
    from .hf import load_config, load_weights, save_pretrained
    from .lm import LM, as_drafter, check_same_tokenizer, load
    from .pipeline import PipelinedLM
    from .seq2seq.config import EncoderDecoderConfig
    from .seq2seq.encoder_decoder import EncoderDecoder
    from .seq2seq.target import Seq2SeqLM
    from .seq2seq.whisper import start_ids
    from .small_cache import low_bit_cache, windowed
    from .snap_kv import SnapKV
    from .stream_decoder import StreamDecoder
    from .tokenizer import Tokenizer, TokenizerLike
    from .top_chunks import TopChunks

# The models need Flax and the loop does not, so each module is imported when it is first asked for.
_LAZY = {
    "LM": "lm",
    "CausalLM": "causal_lm",
    "Decoder": "decoder",
    "DecoderConfig": "config",
    "EncoderDecoder": "seq2seq.encoder_decoder",
    "EncoderDecoderConfig": "seq2seq.config",
    "PipelinedLM": "pipeline",
    "Seq2SeqLM": "seq2seq.target",
    "SnapKV": "snap_kv",
    "StreamDecoder": "stream_decoder",
    "Tokenizer": "tokenizer",
    "TokenizerLike": "tokenizer",
    "TopChunks": "top_chunks",
    "as_drafter": "lm",
    "check_same_tokenizer": "lm",
    "kv_cache": "kv_cache",
    "load": "lm",
    "load_config": "hf",
    "load_weights": "hf",
    "low_bit_cache": "small_cache",
    "save_pretrained": "hf",
    "start_ids": "seq2seq.whisper",
    "windowed": "small_cache",
}

__all__ = [
    "LM",
    "CausalLM",
    "Decoder",
    "DecoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "PipelinedLM",
    "Seq2SeqLM",
    "SnapKV",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerLike",
    "TopChunks",
    "as_drafter",
    "check_same_tokenizer",
    "kv_cache",
    "load",
    "load_config",
    "load_weights",
    "low_bit_cache",
    "save_pretrained",
    "start_ids",
    "windowed",
]

__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
