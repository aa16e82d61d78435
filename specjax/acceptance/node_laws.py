"""The laws p and q at the nodes of a draft, computed only at nodes that a rule asks for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from ..sampling.distribution import Sampling
from ..sampling.drawing import argmax
from ..types import POINT_MASS, Context, Draft
from .walk import at_node


@dataclasses.dataclass(frozen=True)
class TargetLaw:
    """The target's law p after a node: ``law(node int32 [B]) -> p float32 [B, V]``.

    Attributes:
      draft: the draft.
      logits: float32 ``[B, N, V]``, the target's logits after each node, before all settings.
      context: the round's context, with the sampling settings and the committed tokens.
    """

    draft: Draft
    logits: jax.Array
    context: Context

    def __call__(self, node: jax.Array) -> jax.Array:
        return self.sampling.probabilities(self.raw(node), self._prefix(node))

    def raw(self, node: jax.Array) -> jax.Array:
        """Returns the logits float32 ``[B, V]`` at one node of each row, before all settings."""
        return at_node(self.logits, node)

    @property
    def sampling(self) -> Sampling:
        return self.context.sampling

    def adjusted(self) -> jax.Array:
        """Returns logits float32 ``[B, N, V]`` after bias, penalties and logits processor. Greedy
        decoding takes their argmax."""
        if not self.sampling.adjusts:
            return self.logits
        batch, nodes = self.draft.tokens.shape

        def at(node):
            return self.adjusted_at(jnp.full((batch,), node, jnp.int32))

        return jax.vmap(at, out_axes=1)(jnp.arange(nodes))

    def adjusted_at(self, node: jax.Array) -> jax.Array:
        """Returns the adjusted logits at one node of each row: float32 ``[B, V]``.

        Args:
          node: int32 ``[B]``.
        """
        return self.sampling.adjust(self.raw(node), self._prefix(node))

    def _prefix(self, node):
        if not self.sampling.needs_prefix:
            return None
        return self.context.prefix(trees.prefix_tokens(self.draft, node))


@dataclasses.dataclass(frozen=True)
class DraftLaw:
    """The law q from which a node was drawn: ``law(node int32 [B]) -> q float32 [B, V]``.

    The law of a node that was not drawn is a point mass. With ``draws="distinct"`` or ``"hub"``
    the law is the one after the draws of the node's earlier siblings.

    Attributes:
      draft: the draft, with its laws.
      vocab_size: V, the size of the target's vocabulary.
    """

    draft: Draft
    vocab_size: int

    def __call__(self, node: jax.Array) -> jax.Array:
        draft, vocab = self.draft, self.vocab_size
        point = jnp.arange(vocab) == at_node(draft.tokens, node)[:, None]
        point = point.astype(jnp.float32)
        if draft.laws is None:
            return point
        law = required(draft.law, "draft.law")
        index = at_node(law, node)
        q = self._row(node)
        if draft.vocab is not None:
            rows = jnp.arange(q.shape[0])[:, None]
            q = jnp.zeros((q.shape[0], vocab)).at[rows, draft.vocab].add(q, mode="drop")
        if draft.draws in ("distinct", "hub"):
            parent = trees.parents(draft)
            earlier = parent == at_node(jnp.broadcast_to(parent, law.shape), node)[:, None]
            earlier &= (law == index[:, None]) & (jnp.arange(draft.num_nodes) < node[:, None])
            q = self._given(q, jnp.where(earlier, draft.tokens, vocab), node)
        return jnp.where((index == POINT_MASS)[:, None], point, q)

    def hub(self, node: jax.Array) -> jax.Array:
        """Returns int32 ``[B]``, the most probable token of the node's law before any draw.

        Args:
          node: int32 ``[B]``.
        """
        first = argmax(self._row(node))  # in the law's own order of tokens, as when it was drawn
        return first if self.draft.vocab is None else at_node(self.draft.vocab, first)

    def _row(self, node):
        """Returns float32 ``[B, Vq]``, the node's row of ``laws``."""
        laws, law = self.draft.laws, self.draft.law
        row = at_node(required(law, "draft.law"), node)
        return at_node(required(laws, "draft.laws"), jnp.maximum(row, 0))

    def _given(self, q, earlier, node):
        """Returns the law float32 ``[B, V]`` after the draws ``earlier``: int32 ``[B, N]``, tokens
        that earlier siblings drew from ``q``, V where there is none."""
        rows = jnp.arange(q.shape[0])[:, None]
        rest = q.at[rows, earlier].set(0.0, mode="drop")
        mass = jnp.sum(rest, axis=-1, keepdims=True)
        rest = rest / jnp.maximum(mass, jnp.finfo(jnp.float32).tiny)
        if self.draft.draws == "distinct":
            return rest
        # in a hub's pair any other token comes after the hub, and the hub after any other token
        hub = self.hub(node)[:, None]
        only = (jnp.arange(q.shape[1]) == hub).astype(q.dtype)
        second = jnp.where(jnp.any(earlier == hub, axis=1, keepdims=True), rest, only)
        return jnp.where(jnp.any(earlier < q.shape[1], axis=1, keepdims=True), second, q)
