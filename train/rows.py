"""Rows of text with the features of a frozen target, and the heads that a recipe brings to them.

A head ``k`` (from 0) at position ``t`` reads the target's last hidden state there, and as many of
the tokens behind it as its kind allows, and is about token ``t + 2 + k``: token ``t + 1``, which
that state itself says, is the root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax._internal.pytree import pytree_dataclass
from specjax.drafters.prefix import read_rows
from specjax.models.causal_lm import graph_definition
from specjax.types import Drafter, PyTree

from . import data, features


@pytree_dataclass
class Rows:
    """A batch of text with its features.

    Attributes:
      tokens: int32 ``[B, L + 1]``.
      weight: float32 ``[B, L]``, how much the prediction of token t + 1 counts.
      segments: int32 ``[B, L + 1]``, which document a token belongs to.
      hidden: ``[B, L, F]`` of ``tokens[:, :-1]``, the target's last hidden state, normed.
      layers: the same of other layers, by their number, as far as they are asked for.
    """

    tokens: jax.Array
    weight: jax.Array
    segments: jax.Array
    hidden: jax.Array
    layers: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def behind(self, offset: int, steps: int) -> jax.Array:
        """int32 ``[B * steps]``: the token ``offset`` places behind each of the first steps."""
        return self.tokens[:, offset : offset + steps].reshape(-1)

    def states(self, offset: int, steps: int, layer: int | None = None) -> jax.Array:
        """``[F, B * steps]``, feature-major: the features at these places, the last ones or those
        of a layer."""
        found = self.hidden if layer is None else self.layers[layer]
        found = found[:, offset : offset + steps]
        return found.transpose(2, 0, 1).reshape(found.shape[2], -1)

    def seen_by(self, heads, steps: int) -> jax.Array:
        """``[W, B * steps]``: what ``heads`` read at the first steps, the states or what their
        prefix layer makes of these."""
        if heads.prefix is None:
            return self.states(0, steps)
        batch, length, _ = self.hidden.shape
        x = read_rows(heads, self.states(0, length), self.tokens, self.segments[:, :-1])
        return x.reshape(-1, batch, length)[:, :, :steps].reshape(len(x), -1)

    def embedded(self, head, target, params, steps: int) -> list[jax.Array]:
        """``[E, B * T]`` for each step ``s`` of an unroll: what a ``FeatureModule`` reads of the
        tokens ``1 + s`` places behind the first ``T = self.steps(steps)``."""
        end = self.steps(steps)
        tokens = [self.tokens[:, 1 + s : 1 + s + end] for s in range(steps)]
        return [head.embed(own, target, params) for own in tokens]

    def steps(self, num_heads: int) -> int:
        """At how many positions of a row, the first ones, all heads have something to say."""
        return self.hidden.shape[1] - num_heads


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a recipe brings.

    Attributes:
      drafter: what decodes with them, for held-out tau.
      params: where they begin, ``params["drafter"]`` of the drafter.
      outputs: ``outputs(params, target params, rows) -> [(table [V, F], bias [V] or None, state
        [F, B * T])]``, one a head; ``table @ state + bias`` are its logits at the first
        ``T = rows.steps(K)`` positions. Not yet multiplied, so that one head's logits are in memory
        at a time.
      layers: of the target, besides its last, whose hidden states ``outputs`` reads.
      vocab: int32 ``[Vd]``, the tokens that rows of the tables are about;
        None: all.
      publish, unpublish: between parameters as they are trained and as the drafter takes them, one
        undoing the other.
    """

    drafter: Drafter
    params: PyTree
    outputs: Callable
    layers: tuple[int, ...] = ()
    vocab: np.ndarray | None = None
    publish: Callable[[PyTree], PyTree] = lambda params: params
    unpublish: Callable[[PyTree], PyTree] = lambda params: params


def fresh(drafter, seed: int, **options) -> PyTree:
    """``params["drafter"]`` as the drafter's module begins, which takes ``options``; in float32."""
    module = drafter.module(drafter.config, rngs=nnx.Rngs(seed), **options)
    return nnx.to_pure_dict(nnx.state(module))


def in_float32(params: PyTree) -> PyTree:
    """Floats in float32, in which alone the small steps of training add up."""

    def cast(x):
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, params)


def make_reader(config, end_of_text: int, layers=(), gradient: bool = False):
    """``read(target params, batch) -> Rows``; a batch of bare tokens runs the target.

    ``config``: the target's. ``layers``: see ``Heads``. ``gradient``: whether one flows into the
    features.
    """
    graphdef, last = graph_definition(config), config.num_layers
    layers = tuple(dict.fromkeys((*layers, last)))

    def read(params, batch) -> Rows:
        tokens, weight = data.unpacked(batch)
        segments = data.segments_of(tokens, end_of_text)
        stored = batch.get("hidden") if isinstance(batch, dict) else None
        if stored:
            dtype = params["norm"]["weight"].dtype  # of what it computes itself
            found = {i: x.astype(dtype) for i, x in stored.items()}
        else:
            inputs = tokens[:, :-1], segments[:, :-1]
            found = features.hidden_states(graphdef, params, *inputs, layers)
            found = dict(zip(layers, found, strict=True))
        found = found if gradient else jax.lax.stop_gradient(found)
        return Rows(
            tokens=tokens,
            weight=jnp.asarray(weight),
            segments=segments,
            hidden=found[last],
            layers=found,
        )

    return read
