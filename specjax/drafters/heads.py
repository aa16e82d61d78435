"""What drafters share that read the target's last hidden state."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import topology as topologies
from ..pytree import pytree_dataclass
from . import growth
from .base import ChainDrafter


@pytree_dataclass
class HeadState:
    """``feature`` ``[B, F]``: of the token before the root, the hidden state from which the root
    was said; zeros while there is none (a prompt of one token)."""

    feature: jax.Array


@dataclasses.dataclass(frozen=True)
class HeadDrafter(ChainDrafter):
    """Drafts a tree from the target's hidden state; a subclass says ``level``, see ``growth.py``.

    Attributes:
      topology: the tree, see ``topology.py``; no deeper than ``max_depth``.
      layer: which hidden state of the target is read, counted as ``hidden_states[layer]`` of
        Hugging Face; the number of the target's layers is the last one, normed.
      size: F, the target's hidden size.
      vocab_size: V, the target's.
      how: ``top``, ``iid``, ``distinct`` or ``hub``, see ``growth.grow``.

    ``num_draft`` follows from the topology.
    """

    num_draft: int = 0
    topology: topologies.Topology = topologies.chain(3)
    layer: int = 0
    size: int = 0
    vocab_size: int = 0
    how: str = "top"

    def __post_init__(self):
        growth.check_how(self.how, self.topology)
        if self.max_depth is not None and self.topology.depth > self.max_depth:
            raise ValueError(
                f"{self.name}: the tree is {self.topology.depth} deep, and the drafter has "
                f"{self.max_depth} heads: take a tree no deeper than that"
            )
        object.__setattr__(self, "num_draft", self.topology.num_nodes - 1)

    @property
    def max_depth(self) -> int | None:
        """The deepest tree that it can draft; None: any."""
        return None

    @property
    def features(self) -> tuple[int, ...]:
        return (self.layer,)

    @property
    def depth(self) -> int:
        return self.topology.depth

    def init(self, params, batch, capacity, inputs=None):
        dtype = jnp.result_type(*jax.tree.leaves(params["drafter"]))
        return HeadState(feature=jnp.zeros((batch, self.size), dtype))

    def draft_step(self, params, state, context):
        level, carry = self.begin(params, state, context)
        draft, _, _ = growth.grow(self.topology, context, level, carry, how=self.how)
        return draft, state

    def begin(self, params, state, context) -> tuple:
        """``(level, carry)`` of ``growth.grow`` at the root of a round."""
        raise NotImplementedError

    def observe(self, params, state, segment):
        return dataclasses.replace(state, feature=last_feature(state.feature, segment))


def last_feature(before: jax.Array, segment) -> jax.Array:
    """``[B, F]``: of the last valid token of a segment, ``before`` where it has none."""
    last = jnp.maximum(segment.num - 1, 0)[:, None, None]
    found = jnp.take_along_axis(segment.features, last, axis=1)[:, 0]
    return jnp.where((segment.num > 0)[:, None], found.astype(before.dtype), before)


def with_topology(drafter, topology):
    """The same drafter with another tree."""
    return dataclasses.replace(drafter, topology=topologies.as_topology(topology))
