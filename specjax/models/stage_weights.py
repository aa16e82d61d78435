"""The weights of a decoder whose layers are divided over the mesh axis ``stage``.

S devices share L layers: device ``s`` has the layers ``s * L / S`` to ``(s + 1) * L / S - 1``. The
weights of the ``j``-th layer of every device are one array with a leading axis of S, of which each
device holds its own entry. Embedding, last norm and LM head, the *ends*, are held by every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import sharding
from ..sharding import STAGE
from ..types import PyTree
from .causal_lm import CausalLM
from .config import DecoderConfig
from .decoder import abstract
from .seq2seq.config import EncoderDecoderConfig

ENDS, LAYERS = "ends", "layers"
BLOCKS = "blocks"  # the name of the layers in the state of a decoder


def check_stages(config: DecoderConfig | EncoderDecoderConfig, stages: int) -> None:
    """Raises ``ValueError`` for a model whose layers ``stages`` devices cannot share."""
    if stages == 1:
        return
    if isinstance(config, EncoderDecoderConfig):
        raise ValueError(
            f"mesh: stage={stages} divides the layers of decoder-only models alone, and this is "
            f"an encoder-decoder model ({config.model_type}): share it over the axes data and model"
        )
    layers = config.num_layers
    able = [n for n in range(1, layers + 1) if layers % n == 0 and _alike(config, n)]
    if stages not in able:
        reason = f"{layers} layers in equal parts"
        if layers % stages == 0:
            reason = f"{layers} layers, since those with experts stand at other places of each part"
        raise ValueError(
            f"mesh: stage={stages} devices cannot share the {reason} of this {config.model_type} "
            f"model; accepted for stage: {', '.join(map(str, able))}. A drafter may also be held "
            "whole by every device: load it without mesh= (on the command line: "
            "--replicate-drafter)"
        )


def _alike(config: DecoderConfig, stages: int) -> bool:
    """Whether the layers at one place of each part have weights of the same shapes."""
    each = config.num_layers // stages
    kinds = [config.has_experts(i) for i in range(config.num_layers)]
    return kinds == kinds[:each] * stages


def divided(params: nnx.State, config: DecoderConfig, stages: int) -> dict[str, PyTree]:
    """Returns the weights of a decoder in the form that ``PipelinedLM`` reads; the layers are
    copied.

    Args:
      params: the state of ``Decoder(config)``.
      config: the shape of the model.
      stages: S, the number of parts.

    Raises:
      ValueError: the layers cannot be divided, see ``check_stages``.
    """
    check_stages(config, stages)
    each = config.num_layers // stages
    blocks = params[BLOCKS]

    def stacked(*parts):
        return jnp.stack(parts) if isinstance(parts[0], jax.Array) else np.stack(parts)

    layers = tuple(
        jax.tree.map(stacked, *(blocks[part * each + j] for part in range(stages)))
        for j in range(each)
    )
    return {ENDS: ends(params), LAYERS: layers}


def ends(params: nnx.State) -> nnx.State:
    """Returns the weights of a decoder without those of its layers."""
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, param) for path, param in flat if path[0] != BLOCKS])


def placed(params: Mapping[str, PyTree], mesh: Mesh) -> dict[str, PyTree]:
    """Puts divided weights on the devices of a mesh, each device its own layers."""
    return {
        ENDS: jax.tree.map(lambda x: sharding.put(x, mesh), params[ENDS]),
        LAYERS: jax.tree.map(lambda x: sharding.put(x, mesh, STAGE), params[LAYERS]),
    }


def read(config: DecoderConfig, mesh: Mesh, part: Callable[[str], np.ndarray]) -> dict[str, PyTree]:
    """Reads divided weights onto the devices of a mesh; each process reads its own layers.

    Args:
      config: the shape of the model.
      mesh: has an axis ``stage`` that divides the layers.
      part: returns the value of a parameter of ``Decoder(config)`` by its name.
    """
    stages, state = mesh.shape[STAGE], abstract(config)[1]
    each = config.num_layers // stages

    def whole(path, param):
        return param.replace(sharding.put(part(_name(path)), mesh))

    def of_stages(path, param):
        seen: dict[int, np.ndarray] = {}  # devices that differ in their rows alone hold the same

        def own(index):
            stage = index[0].start or 0
            if stage not in seen:
                name = _name((BLOCKS, stage * each + path[0], *path[1:]))
                seen[stage] = part(name)[None]
            return seen[stage]

        shape = stages, *param.get_value().shape
        where = NamedSharding(mesh, PartitionSpec(STAGE))
        value = jax.make_array_from_callback(shape, where, own)
        return param.replace(jax.block_until_ready(value))  # or copies would pile up on the host

    def filled(tree, make, *before):
        flat = nnx.to_flat_state(tree)
        return nnx.from_flat_state([(path, make((*before, *path), param)) for path, param in flat])

    layers = tuple(filled(state[BLOCKS][j], of_stages, j) for j in range(each))
    return {ENDS: filled(ends(state), whole), LAYERS: layers}


def _name(path) -> str:
    return ".".join(map(str, path))


def check_plain(whole: CausalLM, stages: int) -> None:
    """Raises ``ValueError`` for what is not divided over ``stages`` devices."""
    if whole.quantized:
        raise ValueError(
            f"quantize={whole.quantized}: the weights are in few bits, which are not divided over "
            f"stage={stages} devices; load the model in floats, or on the axes data and model"
        )
    if whole.config.cache_bits is not None:
        raise ValueError(
            f"cache={whole.config.cache_bits}: a cache in eight bits is not divided over "
            f"stage={stages} devices; leave cache= out, or hold the model whole"
        )
    if whole.cache_window is not None:
        raise ValueError(
            f"window={whole.cache_window}: a small cache is not divided over stage={stages} "
            "devices; leave the window out, or hold the model whole"
        )
