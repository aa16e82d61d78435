"""The few operations of a decoder, in the layout that makes small batches cheap.

Activations are *feature-major*: ``[features, tokens]`` with ``B * N`` tokens. Weights are
``[out, in]``, as in safetensors files. A product is then ``W @ x``, which the CPU backend computes
for 8 tokens in little more than the time of one token, because the weights are read once;
``x @ W.T`` costs almost twice as much at 8 tokens. GPUs and TPUs compute either order.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import kernels
from .config import DecoderConfig, RopeScaling

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def product(weight: jax.Array, x: jax.Array, transpose_out: bool = False) -> jax.Array:
    """Returns ``weight @ x``, ``[out, M]``, computed by the backend in use.

    Args:
      weight: ``[out, in]``, floats or quantized (see ``quantize.py``).
      x: ``[in, M]``.
      transpose_out: whether to return ``[M, out]``, the form in which logits are read.
    """
    return kernels.current().dot(weight, x, transpose_out)


def fused_linear(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """Returns ``layer(x)`` for each layer, in one call if that is faster on the backend in use."""
    made = kernels.current().dots(tuple(layer.weight[...] for layer in layers), x)
    return tuple(layer.add_bias(y) for layer, y in zip(layers, made, strict=True))


def swiglu_linear(x: jax.Array, gate: Linear, up: Linear) -> jax.Array:
    """Returns ``silu(gate(x)) * up(x)``, in one call if that is faster on the backend in use."""
    backend = kernels.current()
    if gate.bias is None and up.bias is None:
        return backend.swiglu_dots(gate.weight[...], up.weight[...], x)
    return backend.swiglu(*fused_linear(x, gate, up))


class Linear(nnx.Module):
    """``W x + b`` over feature-major activations."""

    def __init__(self, num_in, num_out, *, bias=False, rngs, param_dtype=jnp.float32, scale=1.0):
        init = jax.random.normal(rngs.params(), (num_out, num_in), jnp.float32)
        self.weight = nnx.Param((init * (scale / math.sqrt(num_in))).astype(param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), param_dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.add_bias(product(self.weight[...], x))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """``y`` plus the bias, if there is one."""
        return y if self.bias is None else y + self.bias[...][:, None]


class Norm(nnx.Module):
    """An RMS norm, or a layer norm with a bias, over axis 0, computed in float32."""

    def __init__(
        self, size, config: DecoderConfig, *, kind=None, eps=None, param_dtype=jnp.float32
    ):
        self.kind, self.eps = kind or config.norm, eps or config.norm_eps
        self.plus_one = config.norm_plus_one
        self.weight = nnx.Param(jnp.full((size,), 0.0 if self.plus_one else 1.0, param_dtype))
        self.bias = nnx.Param(jnp.zeros((size,), param_dtype)) if self.kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]
        kind = dict(eps=self.eps, centered=self.kind == "layer", plus_one=self.plus_one)
        return kernels.current().norm(x, weight, bias, **kind)


def columns(table, tokens: jax.Array, dtype=None) -> jax.Array:
    """Rows ``tokens`` int32 ``[...]`` of a table of embeddings ``[V, H]``, quantized or not, as
    columns: ``[H, n]`` in ``dtype``, by default that of the table."""
    dtype = table.dtype if dtype is None else dtype
    return kernels.current().columns(table, tokens.reshape(-1), dtype)


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None, max_positions: int):
    """Returns the frequencies of rotary embedding.

    The known scalings are ``default``, ``linear``, ``llama3`` (Llama 3.1: long wavelengths are
    stretched, short ones are kept, with a ramp between), ``yarn`` (2309.00071; the long-context
    option of Qwen2.5) and ``longrope`` (2402.13753; the short factors of Phi-3, which are valid up
    to the original context).

    Frequencies are computed on the host and rounded as in PyTorch's implementations, since the last
    bit of a frequency is 0.01 radians at position 100,000.

    Returns:
      Inverse frequencies ``[dim // 2]`` in radians per position, and the factor on cos and sin.

    Raises:
      ValueError: the scaling is unknown.
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    inverse = 1 / np.power(theta, exponent, dtype=np.float64).astype(np.float32)
    settings: dict[str, Any] = dict(scaling or ())
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return inverse, 1.0
    original = settings.get("original_max_position_embeddings") or max_positions
    if kind == "longrope":
        stretch = np.asarray(settings["short_factor"], np.float32)
        inverse = 1 / (stretch * np.power(theta, exponent, dtype=np.float64).astype(np.float32))
        attention = settings.get("attention_factor")
        if attention is None:
            longer = max(1.0, settings.get("factor") or max_positions / original)
            attention = math.sqrt(1 + math.log(longer) / math.log(original))
        return inverse, attention
    factor = float(settings["factor"])
    if kind == "linear":
        return inverse / factor, 1.0
    if kind == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        turns = original * inverse / (2 * math.pi)  # full turns within the original context
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * inverse / factor + smooth * inverse, 1.0
    if kind == "yarn":
        fast, slow = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1

        def dimension(turns):
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = dimension(fast), dimension(slow)
        if settings.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = (np.arange(dim // 2, dtype=np.float32) - first) / max(last - first, 1e-3)
        keep = 1 - np.clip(ramp, 0.0, 1.0)

        attention = settings.get("attention_factor")
        if attention is None:
            scales = settings.get("mscale"), settings.get("mscale_all_dim")
            scales = [_magnitude(factor, s) for s in (scales if all(scales) else (1.0, 0.0))]
            attention = scales[0] / scales[1]
        return inverse / factor * (1 - keep) + inverse * keep, attention
    known = "default, linear, llama3, longrope, yarn"
    raise ValueError(f"rope_type={kind!r} is unknown; known: {known}")


def turns(config: DecoderConfig, positions: jax.Array, full: bool, dtype) -> list[jax.Array]:
    """Returns the cosines and sines of rotary embedding, each ``[E / 2, B, N]``.

    Args:
      config: the shape of the decoder.
      positions: int32 ``[B, N]``.
      full: whether the layer is a global one; False: a local one, with a window.
      dtype: of the result.
    """
    c, theta, scaling = config, config.rope_theta, config.rope_scaling
    if not full and c.local_rope_theta is not None:
        theta, scaling = c.local_rope_theta, None
    inverse, factor = rope_frequencies(c.rotary_dim, theta, scaling, c.max_positions)
    angle = inverse[:, None, None] * positions.astype(jnp.float32)
    # along the nodes: rows may be spread over devices
    both = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=2) * factor
    return jnp.split(kernels.current().materialize(both).astype(dtype), 2, axis=2)


def score_factor(scaling: RopeScaling | None) -> float:
    """DeepSeek's additional factor on scores: the square of yarn's magnitude.

    ``mscale_all_dim`` removes that magnitude from cos and sin.
    """
    settings: dict[str, Any] = dict(scaling or ())
    return _magnitude(settings.get("factor", 1.0), settings.get("mscale_all_dim") or 0.0) ** 2


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, axis: int) -> jax.Array:
    """Applies rotary embedding along ``axis``, in the convention of halves.

    With ``n`` rows in ``cos`` and ``sin``, whose axes are those of ``x`` from ``axis`` on, feature
    ``i < n`` is rotated with feature ``n + i``. Features from ``2 n`` on stay as they are.
    """
    half = cos.shape[0]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=axis)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[axis] else turned, axis=axis)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``, which stays within ``±cap``; ``x`` where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
