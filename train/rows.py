"""Rows of text with the features of a frozen target, and the heads that a recipe trains on them.

Head ``k`` (from 0) at position ``t`` reads the target's last hidden state there and, depending on
its kind, some of the tokens after ``t``. It predicts token ``t + 2 + k``. Token ``t + 1``, which
the target predicts from that hidden state, is the root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax._internal.pytree import pytree_dataclass
from specjax.checkpoints.loading import HeadLM
from specjax.drafters.prefix import read_rows
from specjax.models.causal_lm import graph_definition
from specjax.types import Drafter, PyTree

from . import data, features


@pytree_dataclass
class Rows:
    """A batch of text with its features.

    Attributes:
      tokens: int32 ``[B, L + 1]``.
      weight: float32 ``[B, L]``, the weight of predicting token ``t + 1``.
      segments: int32 ``[B, L + 1]``, the number of each token's document.
      hidden: ``[B, L, F]``, the target's last hidden states of ``tokens[:, :-1]``, normed.
      layers: hidden states of further layers, by the number of the layer.
      entries: the target's keys and values of ``tokens[:, :-1]``, layer by layer; (): not read.
    """

    tokens: jax.Array
    weight: jax.Array
    segments: jax.Array
    hidden: jax.Array
    layers: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    entries: tuple = ()

    def following(self, offset: int, steps: int) -> jax.Array:
        """Returns int32 ``[B * steps]``: the token ``offset`` places after each position."""
        return self.tokens[:, offset : offset + steps].reshape(-1)

    def states(self, offset: int, steps: int, layer: int | None = None) -> jax.Array:
        """Returns hidden states ``[F, B * steps]``, feature-major.

        Args:
          offset: the first position.
          steps: the number of positions of each row.
          layer: the number of the layer; None: the last one.
        """
        found = self.hidden if layer is None else self.layers[layer]
        found = found[:, offset : offset + steps]
        return found.transpose(2, 0, 1).reshape(found.shape[2], -1)

    def seen_by(self, heads, steps: int) -> jax.Array:
        """Returns the input ``[W, B * steps]`` of ``heads`` at the first positions.

        It is the last hidden state, or the output of the heads' prefix layer for it.
        """
        if heads.prefix is None:
            return self.states(0, steps)
        batch, length, _ = self.hidden.shape
        x = read_rows(heads, self.states(0, length), self.tokens, self.segments[:, :-1])
        return x.reshape(-1, batch, length)[:, :, :steps].reshape(len(x), -1)

    def embedded(self, head, target, params, steps: int) -> list[jax.Array]:
        """Returns for each step ``s`` of an unroll the embeddings ``[E, B * T]``.

        They are those that a ``FeatureModule`` reads of the tokens ``1 + s`` places after the first
        ``T = self.steps(steps)`` positions.
        """
        end = self.steps(steps)
        tokens = [self.tokens[:, 1 + s : 1 + s + end] for s in range(steps)]
        return [head.embed(own, target, params) for own in tokens]

    def steps(self, num_heads: int) -> int:
        """The number of positions at the start of a row from which all heads predict a token."""
        return self.hidden.shape[1] - num_heads


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads that a recipe trains.

    Attributes:
      drafter: the drafter that decodes with them, to measure held-out τ.
      params: the initial parameters, ``params["drafter"]`` of the drafter.
      outputs: ``outputs(params, target params, rows) -> [(table [V, F], bias [V] or None, state
        [F, B * T])]`` with one entry for each head, whose logits at the first ``T = rows.steps(K)``
        positions are ``table @ state + bias``. The products are computed later, so that the logits
        of one head are in memory at a time.
      layers: the layers of the target, besides its last, whose hidden states ``outputs`` reads.
      vocab: int32 ``[Vd]``, the tokens of the rows of the tables; None: all tokens.
      capped: whether the drafter's logits are capped as the target's are, which they are where it
        reads the target's LM head; LM heads of the drafter's own are not.
      publish: converts trained parameters to those that the drafter takes.
      unpublish: undoes ``publish``.
      grown: ``grown(found)`` makes heads of this kind and size from loaded ones that are smaller or
        of a kind to which these add weights; others it returns as they are. None: there are none.
      lay: ``lay(params, target params, rows, anchors, keys [B]) -> (places, terms)`` replaces
        ``block.laid`` in the loss of blocks, and adds terms that are logged; such heads read
        ``rows.entries``. None: all blocks are the text's.
    """

    drafter: Drafter
    params: PyTree
    outputs: Callable
    layers: tuple[int, ...] = ()
    vocab: np.ndarray | None = None
    capped: bool = True
    publish: Callable[[PyTree], PyTree] = lambda params: params
    unpublish: Callable[[PyTree], PyTree] = lambda params: params
    grown: Callable[[HeadLM], HeadLM] | None = None
    lay: Callable | None = None


def fresh(drafter, seed: int, **options) -> PyTree:
    """Makes ``params["drafter"]`` with initial weights in float32.

    ``options`` are passed to the drafter's module.
    """
    module = drafter.module(drafter.config, rngs=nnx.Rngs(seed), **options)
    return nnx.to_pure_dict(nnx.state(module))


def in_float32(params: PyTree) -> PyTree:
    """Casts floats to float32; small steps of training would be rounded away in other dtypes."""

    def cast(x):
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, params)


def make_reader(config, end_of_text: int, layers=(), gradient: bool = False, entries: bool = False):
    """Returns ``read(target params, batch) -> Rows``.

    For a batch without stored hidden states, ``read`` runs the target.

    Args:
      config: the target's.
      end_of_text: the id of the token between documents.
      layers: see ``Heads``.
      gradient: whether a gradient flows into the hidden states.
      entries: whether ``Rows.entries`` are read, which needs a target that runs.
    """
    graphdef, last = graph_definition(config), config.num_layers
    layers = tuple(dict.fromkeys((*layers, last)))

    def read(params, batch) -> Rows:
        tokens, weight = data.unpacked(batch)
        segments = data.segments_of(tokens, end_of_text)
        stored, own = batch.get("hidden") if isinstance(batch, dict) else None, ()
        if stored:
            dtype = params["norm"]["weight"].dtype  # the dtype of the target's own hidden states
            found = {i: x.astype(dtype) for i, x in stored.items()}
        else:
            inputs = tokens[:, :-1], segments[:, :-1]
            found, own = features.states_and_entries(graphdef, params, *inputs, layers)
            found = dict(zip(layers, found, strict=True))
        found = found if gradient else jax.lax.stop_gradient(found)
        return Rows(
            tokens=tokens,
            weight=jnp.asarray(weight),
            segments=segments,
            hidden=found[last],
            layers=found,
            entries=jax.lax.stop_gradient(own) if entries else (),
        )

    return read
