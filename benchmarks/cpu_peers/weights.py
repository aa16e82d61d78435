"""The weights of a pair by the names of Hugging Face, in each precision, for the peers' formats."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.kernels.quantized import Quantized, unpack
from specjax.models import LM, DecoderConfig
from specjax.models.quantize import GROUP_SIZE, Quantization, encode, floats
from specjax.models.translate import config_to_hf, tensors_of

from .engine import UnsupportedError

_PLAIN = {  # the fields in which a Llama is the default
    "rope_scaling": None,
    "window": None,
    "qkv_bias": False,
    "o_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "num_experts": 0,
    "kv_rank": 0,
}


def check_llama(config: DecoderConfig) -> None:
    """Raises ``UnsupportedError`` for a model that is no plain Llama, for which files are made."""
    wrong = {k: getattr(config, k) for k, v in _PLAIN.items() if getattr(config, k) != v}
    if config.model_type != "llama" or wrong:
        raise UnsupportedError(
            f"files for peers are written for plain Llamas; this is a {config.model_type} {wrong}"
        )


def quantization(precision: str, config: DecoderConfig) -> Quantization | None:
    """How specjax holds a model in ``precision``; eight bits where groups of four do not fit."""
    if precision not in ("int8", "int4"):
        return None
    inputs = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads * config.head_dim,
    )
    if precision == "int4" and any(size % GROUP_SIZE for size in inputs):
        return Quantization("int8")
    return Quantization(precision)


def tensors(lm: LM, precision: str = "float32") -> dict[str, np.ndarray | Quantized]:
    """The tensors of a checkpoint by name, float32, or quantized as specjax quantizes them."""
    named = {
        ".".join(map(str, path)): param.get_value() for path, param in nnx.to_flat_state(lm.params)
    }
    wish, found = quantization(precision, lm.config), {}
    for name, tensor in tensors_of(lm.config, named).items():
        own = tensor.parts[0]
        value = floats(named[own], jnp.float32)
        if wish is not None:
            value = encode(own, value, wish, jnp.float32)
        found[name] = value if isinstance(value, Quantized) else np.asarray(value, np.float32)
    return found


def hf_config(lm: LM) -> dict:
    """The ``config.json`` of a model, without tokens that end a text."""
    return config_to_hf(lm.config) | {"eos_token_id": None, "bos_token_id": None}


def integers(weight: Quantized) -> tuple[np.ndarray, np.ndarray]:
    """Signed integers int8 ``[out, in]`` and their scales float32 ``[out, groups]``.

    Raises:
      ValueError: the weight has zero points, which no scheme of ``quantization`` has.
    """
    if weight.zero is not None:
        raise ValueError("integers: the weight has zero points")
    values = unpack(weight.qvalue) - 8 if weight.bits == 4 else weight.qvalue
    return np.asarray(values, np.int8), np.asarray(weight.scale, np.float32)
