"""Weights in eight or four bits; activations, norms and biases keep their type.

========  =====================================================================================
``int8``  integers of -127 to 127 and a float32 scale for each output channel, or for each group
          of ``group_size`` inputs
``int4``  integers of 0 to 15 that stand for -8 to 7, two a byte, and a float32 scale for each
          group of ``group_size`` inputs (32 by default); the LM head in ``int8`` by default
``fp8``   float8 (e4m3) and a scale for each output channel, made by qwix
========  =====================================================================================

Products, the embedding and the LM head are quantized: a tied head is as large as many layers, and
is read in every pass. CPU kernels (``kernels/cpu/quantized.cc``) and XLA's fusions read the small
integers and compute with the floats for which they stand. Activations stay floats; where a CPU has
AVX-512 VNNI, they are rounded to 16 bits before weights of ``int8`` with a scale for each output,
and before weights of ``int4``; where it has AMX too, the attention of prompts rounds its numbers to
16 bits, and prompts meet weights of ``int4`` that are rounded to 16 bits.

Quantized weights are other weights. A *target* that has them is its own law: results are lossless
with respect to it and approximate to the float model, and are named so. A *drafter* may have any
weights and stays lossless. ``specjax.quantization_error`` measures the approximation.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from .. import kernels
from ..kernels import quantized
from ..kernels.quantized import Quantized, is_quantized, sliceable

SCHEMES = {"int8": jnp.int8, "int4": jnp.uint8, "fp8": jnp.float8_e4m3fn}
FLOAT = "float"  # of an LM head that is not quantized, and of a model whose weights are widened
GROUP_SIZE = 32  # of int4, by default
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the widest scale of a group of four bits: what is tried
# small tables that are looked up, not multiplied; routers, whose few rows decide much; small
# weights that are used in parts; vectors, which are in no product
KEPT = (
    r"(.*\.)?(position_embedding|relative_bias)|.*\.(router|kv_b)\.weight|encoder\.conv\d\.weight"
)
HEAD = r"embedding|lm_head\.weight"


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the weights of a model are to be held.

    Attributes:
      scheme: ``"int8"``, ``"int4"`` or ``"fp8"``.
      group_size: number of inputs that share a scale, a multiple of 32. None: all inputs of an
        output channel with int8, 32 with int4.
      lm_head: the scheme of the LM head and of the embedding: ``"int8"`` (a scale for each output
        channel, unless ``scheme`` is int8 too), ``"float"`` (not quantized), or ``scheme`` itself.
        None: ``"int8"`` with int4, otherwise ``scheme``.

    Example::

        lm = specjax.load("embedded", quantize=specjax.Quantization("int4", group_size=64))

    Raises:
      ValueError: an unknown scheme, a group size that is no multiple of 32, or a field that the
        scheme does not have.
    """

    scheme: str = "int8"
    group_size: int | None = None
    lm_head: str | None = None

    def __post_init__(self):
        if self.scheme not in SCHEMES:
            raise ValueError(
                f"quantize={self.scheme!r} is unknown; accepted: {', '.join(SCHEMES)}, {FLOAT} "
                "(stored weights of few bits become floats), None (as stored)"
            )
        size = self.group_size
        if size is not None and self.scheme == "fp8":
            raise ValueError(
                f"group_size={size}: fp8 has a scale for each output channel; leave group_size "
                "out, or take quantize='int8' or 'int4'"
            )
        if size is not None and (not isinstance(size, int) or size < 1 or size % quantized.TILE):
            raise ValueError(f"group_size={size!r}: it must be a multiple of {quantized.TILE}")
        heads = dict.fromkeys([self.scheme, *(["int8"] if self.scheme == "int4" else []), FLOAT])
        if self.lm_head is not None and self.lm_head not in heads:
            raise ValueError(
                f"lm_head={self.lm_head!r}: with quantize={self.scheme!r} accepted are "
                f"{', '.join(heads)}, None"
            )

    def __str__(self) -> str:
        fields = {"group_size": self.group_size, "lm_head": self.lm_head}
        shown = ", ".join(f"{k}={v}" for k, v in fields.items() if v is not None)
        return f"{self.scheme} ({shown})" if shown else self.scheme

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[str, int] | None:
        """The scheme of the parameter ``name`` (a dotted path), and the number of groups of its
        inputs; None for what stays as it is.

        Raises:
          ValueError: the group size does not divide the number of inputs.
        """
        if not is_multiplied(name, shape):
            return None
        scheme, size = self.scheme, self.group_size
        if re.fullmatch(HEAD, name):
            head = self.lm_head or ("int8" if scheme == "int4" else scheme)
            if head == FLOAT:
                return None
            scheme, size = head, size if head == scheme else None
        size = GROUP_SIZE if scheme == "int4" and size is None else size
        if size is None:
            return scheme, 1
        if shape[-1] % size:
            able = [str(n) for n in (32, 64, 96, 128, 256) if shape[-1] % n == 0]
            other = f"group_size={' or '.join(able)}, or " if able else ""
            raise ValueError(
                f"group_size={size} does not divide the {shape[-1]} inputs of {name}; take "
                f"{other}quantize='int8' without group_size"
            )
        return scheme, shape[-1] // size


def is_multiplied(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the parameter ``name`` is a matrix, or a stack of them, that may be quantized."""
    return len(shape) > 1 and not re.fullmatch(KEPT, name)


def as_quantization(quantize: str | Quantization | None) -> Quantization | None:
    """What ``quantize=`` asks for.

    Raises:
      ValueError: an unknown scheme.
    """
    if quantize is None or isinstance(quantize, Quantization):
        return quantize
    if isinstance(quantize, str):
        return Quantization(quantize)
    raise ValueError(
        f"quantize={quantize!r}: expected {', '.join(SCHEMES)}, {FLOAT}, a "
        "specjax.Quantization, or None"
    )


def supported(quantize: str | Quantization | None) -> Quantization | None:
    """``as_quantization`` for the devices in use; raises before anything is read.

    Raises:
      ValueError: an unknown scheme, fp8 without qwix, or where the backend lacks the type.
    """
    found = as_quantization(quantize)
    if found is None or found.scheme != "fp8":
        return found
    try:
        import qwix  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "quantize='fp8' needs qwix, which is not installed: pip install 'specjax[quantize]'"
        ) from None
    if not computes(SCHEMES["fp8"]):
        raise ValueError(
            f"quantize='fp8': {kernels.platform()} devices cannot convert "
            f"{jnp.dtype(SCHEMES['fp8']).name}; use quantize='int8'"
        )
    return found


@functools.cache
def computes(dtype) -> bool:
    """Whether the devices in use can convert ``dtype`` to float32."""
    try:
        jax.jit(lambda x: x.astype(jnp.float32)).lower(jax.ShapeDtypeStruct((8,), dtype)).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def encode(name: str, weight: jax.Array, quantize: str | Quantization, dtype):
    """Quantizes the parameter ``name`` (a dotted path) if it is a matrix that is multiplied.

    Returns:
      A ``Quantized`` (with fp8 a ``qwix.QArray``) for such a matrix ``[..., out, in]``; else
      ``weight`` in ``dtype``.

    Raises:
      ValueError: ``weight`` is quantized already, or its inputs are no multiple of the group size.
    """
    wish = as_quantization(quantize)
    if is_quantized(weight):
        raise ValueError(
            f"quantize={str(wish)!r}: {name} is quantized already ({weight.qvalue.dtype}); "
            "quantize the original weights, once"
        )
    found = wish.of(name, weight.shape)
    if found is None:
        return weight.astype(dtype)
    scheme, groups = found
    if scheme == "fp8":
        return _in_fp8(weight)
    return (_in_eight if scheme == "int8" else _in_four)(weight, groups)


def stored_arrays(name: str, shape: tuple[int, ...], quantize: Quantization | None, itemsize: int):
    """Shape and bytes an entry of each array in which ``encode`` holds a parameter."""
    found = quantize and quantize.of(name, shape)
    if not found:
        return [(shape, itemsize)]
    scheme, groups = found
    values = (*shape[:-1], shape[-1] // 2) if scheme == "int4" else shape
    return [(values, 1), ((*shape[:-1], groups), 4)]


@jax.jit
def _in_fp8(weight):
    import qwix

    outputs = tuple(range(weight.ndim - 1))  # of each expert, in a stack
    kind = SCHEMES["fp8"]
    return qwix.quantize(weight, kind, channelwise_axes=outputs, scale_dtype=jnp.float32)


def _grouped(weight, groups: int):
    return weight.astype(jnp.float32).reshape(*weight.shape[:-1], groups, -1)


@functools.partial(jax.jit, static_argnames="groups")
def _in_eight(weight, groups):
    parts = _grouped(weight, groups)
    scale = jnp.max(jnp.abs(parts), axis=-1, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    values = jnp.round(parts / scale).astype(jnp.int8)
    return Quantized(values.reshape(weight.shape), scale[..., 0])


@functools.partial(jax.jit, static_argnames="groups")
def _in_four(weight, groups):
    """The number of a group that is furthest from zero becomes -8, or is cut where a smaller scale
    brings the others closer: the scale with the least squared error of a few."""
    parts = _grouped(weight, groups)
    largest = jnp.argmax(jnp.abs(parts), axis=-1, keepdims=True)
    widest = jnp.take_along_axis(parts, largest, axis=-1) / -8
    widest = jnp.where(widest != 0, widest, 1.0)

    def values(scale):
        return jnp.clip(jnp.round(parts / scale), -8, 7)

    def attempt(i, best):
        least, kept = best
        scale = widest * jnp.asarray(SHRUNK, jnp.float32)[i]
        error = jnp.sum((values(scale) * scale - parts) ** 2, axis=-1, keepdims=True)
        return jnp.minimum(least, error), jnp.where(error < least, scale, kept)

    start = jnp.full_like(widest, jnp.inf), widest
    _, scale = jax.lax.fori_loop(0, len(SHRUNK), attempt, start)
    packed = quantized.pack((values(scale) + 8).reshape(weight.shape))
    return Quantized(packed, scale[..., 0])


def shape(weight) -> tuple[int, ...]:
    """The shape of a weight, quantized or not."""
    return weight.shape


def floats(weight, dtype) -> jax.Array:
    """The weight in ``dtype``; a quantized one as the numbers for which it stands."""
    return quantized.widen(weight, dtype) if is_quantized(weight) else weight.astype(dtype)


def rows(weight, index: jax.Array):
    """Entries ``index`` of a weight's first dimension, quantized as it is."""
    return jax.tree.map(lambda x: x[index], weight)


def dot_rows(stack, index, row, size: int, x: jax.Array) -> jax.Array:
    """``stack[index, row : row + size] @ x`` of a stack ``[X, out, in]``, quantized or not."""

    def cut(array):
        bits, numbers = sliceable(array)
        part = jax.lax.dynamic_slice(bits, (index, row, 0), (1, size, array.shape[2]))
        return numbers(part)[0]

    if not is_quantized(stack):
        return jnp.dot(cut(stack), x)
    return quantized.product(jax.tree.map(cut, stack), x).astype(x.dtype)
