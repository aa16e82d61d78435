"""What drafters share that read the target's last hidden state."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..trees import expand
from ..types import HeadTarget, PyTree
from .base import ChainDrafter


@pytree_dataclass
class HeadState:
    """``feature`` ``[B, F]``: of the token before the root, the hidden state from which the root
    was said; zeros while there is none (a prompt of one token)."""

    feature: jax.Array


@functools.cache
def _abstract(module, config) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))


@dataclasses.dataclass(frozen=True)
class HeadDrafter(ChainDrafter, abc.ABC):
    """Drafts a tree from the target's hidden state; a subclass says ``level``, see ``growth.py``,
    and names its ``module``, an ``nnx.Module`` made of ``config``.

    Attributes:
      config: the shape of the heads, with ``hidden_size``, ``vocab_size`` and ``num_heads``.
      target: whose hidden state is read, and of whose weights the heads may share some.
      topology: the tree, see ``topology.py``, no deeper than ``max_depth``; None: the usual one.
      layer: which hidden state of the target is read, counted as ``hidden_states[layer]`` of
        Hugging Face; None: the last one, normed.
      sibling_sampling: ``top``, ``iid``, ``distinct`` or ``hub``, see ``growth.grow``.

    ``num_draft`` follows from the topology.
    """

    num_draft: int = 0
    config: Any = None
    target: HeadTarget = dataclasses.field(default=None, repr=False)
    topology: trees.Topology | None = None
    layer: int | None = None
    sibling_sampling: str = "top"
    module = None
    can_rest = True

    def __post_init__(self):
        if self.topology is None:
            object.__setattr__(self, "topology", self.usual_topology)
        if self.layer is None:
            object.__setattr__(self, "layer", self.target.num_layers)
        expand.check_sibling_sampling(self.sibling_sampling, self.topology)
        if self.max_depth is not None and self.topology.depth > self.max_depth:
            raise ValueError(
                f"{self.name}: the tree is {self.topology.depth} deep, and the drafter has "
                f"{self.max_depth} heads: take a tree no deeper than that"
            )
        object.__setattr__(self, "num_draft", self.topology.num_nodes - 1)

    @property
    def max_depth(self) -> int | None:
        """The deepest tree that it can draft; None: any."""
        return self.config.num_heads

    @property
    def usual_topology(self) -> trees.Topology:
        """What is drafted unless something else is asked for: all heads, in a chain."""
        return trees.chain(self.config.num_heads)

    @property
    def shapes(self) -> nnx.State:
        """The shapes of its weights; nothing is allocated."""
        return _abstract(self.module, self.config)[1]

    def heads(self, weights: PyTree) -> nnx.Module:
        """The module with its ``weights``, which are ``params["drafter"]``."""
        return nnx.merge(_abstract(self.module, self.config)[0], weights)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def features(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def reads_last(self) -> bool:
        return type(self).observe is HeadDrafter.observe

    @property
    def depth(self) -> int:
        return self.topology.depth

    def init(self, params, target_params, batch, capacity, inputs=None):
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return HeadState(feature=jnp.zeros((batch, self.config.hidden_size), dtype))

    def draft_step(self, params, target_params, state, context):
        level, carry = self.begin(params, target_params, state, context)
        draft, _, _ = expand.expand(
            self.topology, context, level, carry, sibling_sampling=self.sibling_sampling
        )
        return draft, state

    @abc.abstractmethod
    def begin(self, params, target_params, state, context) -> tuple:
        """``(level, carry)`` of ``growth.grow`` at the root of a round."""

    def observe(self, params, target_params, state, segment):
        feature = last_feature(state.feature, segment.features, segment.num)
        return dataclasses.replace(state, feature=feature)


def last_feature(before: jax.Array, features: jax.Array, num: jax.Array) -> jax.Array:
    """``[B, F]``: of the last of the first ``num`` int32 ``[B]`` tokens with ``features`` ``[B, T,
    F]``, ``before`` where there are none."""
    last = jnp.maximum(num - 1, 0)[:, None, None]
    found = jnp.take_along_axis(features, last, axis=1)[:, 0]
    return jnp.where((num > 0)[:, None], found.astype(before.dtype), before)


def all_at_once(say) -> tuple:
    """``(level, carry)`` of ``growth.grow`` for heads that read nothing of the draft: ``say()``
    gives the logits ``[B, K, V]`` of all of them behind the root, which are the ``carry``."""

    def level(carry, grown, since):
        if since == 0:
            carry = say()
        depth = expand.depth_of(grown, since)
        return carry[:, depth : depth + 1], carry

    return level, ()


def with_topology(drafter, topology):
    """The same drafter with another tree."""
    return dataclasses.replace(drafter, topology=trees.as_topology(topology))
