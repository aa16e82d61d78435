"""Small checkpoints and tokenizers for the tests of loading."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from shapes import TINY
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specjax.models import Decoder, DecoderConfig, load_config, load_weights, quantize
from specjax.models.causal_lm import graph_definition
from specjax.models.decoder import abstract

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))

SMALL = dataclasses.replace(TINY, vocab_size=320, eos_ids=(0,))


def random_params(config: DecoderConfig, seed: int = 0) -> nnx.State:
    """Draws weights with NumPy, since initializing a ``Decoder`` op by op takes long."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.2), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, abstract(config)[1])


def random_model(config: DecoderConfig, seed: int = 0) -> Decoder:
    return nnx.merge(graph_definition(config), random_params(config, seed))


def golden_maker():
    """``tests/golden/make.py`` as a module; importing it needs no torch."""
    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _forward(config: DecoderConfig):
    graph = graph_definition(config)
    return jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))


def logits_of(folder, tokens):
    """Returns float32 logits of the checkpoint in ``folder``; compiles once for each config."""
    config = load_config(folder)
    return _forward(config)(load_weights(folder, config, "float32"), jnp.asarray(tokens))


def byte_tokenizer(*words: str, size: int = 257, end: str = "<|endoftext|>") -> Tokenizer:
    """Byte-level BPE: an end-of-text token, ``size - 1`` bytes, and ``words`` as added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    vocabulary = {end: 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end, *words])
    return tokenizer


def encoded(params, scheme):
    """The whole state of a decoder, quantized in memory."""
    held = []
    for path, p in nnx.to_flat_state(params):
        name = ".".join(map(str, path))
        held.append((path, p.replace(quantize.encode(name, p.get_value(), scheme, "float32"))))
    return nnx.from_flat_state(held)
