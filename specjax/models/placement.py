"""The part of each weight that a device holds: tensor parallelism as a table of names.

Products come in pairs: the first of a pair is split over its outputs (heads, or features of the
feed-forward layer), the second over its inputs. Devices then communicate by one all-reduce after
each pair, which is two for each layer (1909.08053). Embedding and LM head are split over the
vocabulary. If the vocabulary does not divide, both are held whole, as are norms and other vectors.
"""

from __future__ import annotations

import math
import re

import jax
from flax import nnx
from jax.sharding import Mesh

from .. import sharding
from ..types import PyTree
from .config import DecoderConfig
from .quantize import is_quantized
from .seq2seq.config import EncoderDecoderConfig

OUTPUTS, INPUTS = 0, 1  # the dimensions of a weight [out, in]
TABLE = (  # pattern of the parameter's name -> the dimension that is split; others are held whole
    (r"(.*\.)?(embedding|lm_head\.(weight|bias))", OUTPUTS),
    (r".*\.(q|k|v|gate|up|q_b|kv_b)\.(weight|bias)", OUTPUTS),
    (r".*\.(o|down)\.weight", INPUTS),
    (r"(.*\.)?relative_bias", 1),  # [buckets, heads]
    (r".*\.experts\.(gate|up)", 1),  # stacks [experts, out, in]: every device has a part of each
    (r".*\.experts\.down", 2),
)


def spec_of(name: str, shape: tuple[int, ...], parts: int, axis: str | None) -> tuple:
    """Returns for each dimension the mesh axis over which it is split, or None.

    Args:
      name: the name of the parameter.
      shape: its shape.
      parts: the number of devices along ``axis``.
      axis: the axis of the mesh over which weights are split; None: they are not split.
    """
    spec = [None] * len(shape)
    for pattern, dimension in TABLE:
        if axis and re.fullmatch(pattern, name) and shape[dimension] % parts == 0:
            spec[dimension] = axis
            break
    return tuple(spec)


def check_divides(config: DecoderConfig | EncoderDecoderConfig, parts: int) -> None:
    """Raises ``ValueError`` for a model that ``parts`` devices cannot share in equal parts.

    Key/value heads are never held twice: a model with fewer of them than devices is refused.
    """
    names = ["num_heads", "intermediate_size"]
    if isinstance(config, DecoderConfig):
        names += ["num_kv_heads"] if not config.kv_rank else []  # a latent one is everywhere
        names += ["expert_size"] if config.num_experts else []
    sizes = {name: getattr(config, name) for name in names}
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % parts]
    if wrong:
        common = math.gcd(*sizes.values())
        able = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"mesh: model={parts} devices cannot share {', '.join(wrong)} of this "
            f"{config.model_type} model; accepted for model: {', '.join(map(str, able))} (put the "
            "others on the axis data). A drafter may also be held whole by every device: load it "
            "without mesh= (on the command line: --replicate-drafter)"
        )


def place_weights(params: PyTree, config, mesh: Mesh, axis: str | None) -> PyTree:
    """Places the parameters of a model, on each device its part.

    Raises:
      ValueError: the model does not divide (see ``check_divides``).
    """
    parts = mesh.shape.get(axis, 1)
    check_divides(config, parts)

    def place(path, param):
        name = ".".join(map(str, path))
        value = param.get_value()
        if is_quantized(value):
            spec = spec_of(name, value.qvalue.shape, parts, axis)
            return param.replace(place_quantized(value, mesh, spec))
        return param.replace(sharding.put(value, mesh, *spec_of(name, value.shape, parts, axis)))

    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, place(path, param)) for path, param in flat])


def place_quantized(weight, mesh: Mesh, spec: tuple):
    """A quantized weight on a mesh: values, and scales ``[..., out, G]``, as ``spec`` says, but
    along a dimension that the devices cannot share."""

    def put(x):
        split = zip(spec, x.shape, strict=True)
        axes = (a if a is None or n % mesh.shape[a] == 0 else None for a, n in split)
        return sharding.put(x, mesh, *axes)

    return jax.tree.map(put, weight)
