"""Walks down a draft, shared by the rules.

Nodes are listed from the root down and siblings in draw order, so the next node to look at is
always the first one, after the last looked at, whose parent is where the row stands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import trees
from ..types import ROOT, Draft, Verdict


def eligible(draft: Draft) -> jax.Array:
    """bool ``[B, N]``: nodes that may be accepted (no root, no passenger, nothing unscored, and
    no token -1 of a drafter whose law had none)."""
    able = (jnp.arange(draft.num_nodes) > ROOT) & (draft.tokens >= 0)
    for mask in (draft.candidate, draft.scored):
        able = able if mask is None else able & mask
    return able


def next_child(draft: Draft, at: jax.Array, after: jax.Array, able: jax.Array):
    """The first child of a node that may be accepted.

    Args:
      at: int32 ``[B]``, the node.
      after: int32 ``[B]``, the node after which the child is to stand.
      able: bool ``[B, N]``, see ``eligible``.

    Returns:
      the child int32 ``[B]``, and bool ``[B]``, whether there is one.
    """
    index = jnp.arange(draft.num_nodes)
    child = able & (trees.parents(draft) == at[:, None]) & (index > after[:, None])
    first = jnp.min(jnp.where(child, index, draft.num_nodes), axis=1).astype(jnp.int32)
    return jnp.minimum(first, draft.num_nodes - 1), first < draft.num_nodes


def has_children(draft: Draft, able: jax.Array) -> jax.Array:
    """bool ``[B, N]``: nodes with a child in ``able`` bool ``[B, N]``."""
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), able.shape)
    rows = jnp.arange(able.shape[0])[:, None]
    return jnp.zeros(able.shape, bool).at[rows, parent].max(able)


def descend(draft: Draft, visit) -> tuple[jax.Array, jax.Array]:
    """Walks from the root down, one visit a node, until a visit accepts no child.

    Args:
      visit: ``node int32 [B] -> (child int32 [B], found bool [B], rest float32 [B, V])``: where to
        go on, and the weights of the next token where there is nowhere.

    Returns:
      the last node ``[B]``, and its weights ``[B, V]``.
    """

    def step(state):
        node, rest, going = state
        child, found, left = visit(node)
        rest = jnp.where(going[:, None], left, rest)
        going &= found
        return jnp.where(going, child, node), rest, going

    batch = draft.tokens.shape[0]
    start = jnp.full((batch,), ROOT, jnp.int32)
    like = jax.eval_shape(visit, start)[2]
    state = (start, jnp.zeros(like.shape, like.dtype), jnp.ones((batch,), bool))
    node, rest, _ = jax.lax.while_loop(lambda s: jnp.any(s[2]), step, state)
    return node, rest


def follow(draft: Draft, say) -> tuple[jax.Array, jax.Array]:
    """Walks from the root down, as long as the token that the target says is a child's.

    Args:
      say: ``node int32 [B] -> token int32 [B]``, the target's token after the node.

    Returns:
      the last node, and the token after it: int32 ``[B]`` each.
    """
    able, batch = eligible(draft), draft.tokens.shape[0]

    def visit(state):
        node, token, going = state
        said = say(node)
        token = jnp.where(going, said, token)
        child, found = next_child(draft, node, node, able & (draft.tokens == said[:, None]))
        going &= found
        return jnp.where(going, child, node), token, going

    start = jnp.full((batch,), ROOT, jnp.int32)
    state = (start, jnp.zeros((batch,), jnp.int32), jnp.ones((batch,), bool))
    node, token, _ = jax.lax.while_loop(lambda s: jnp.any(s[2]), visit, state)
    return node, token


def depth_of(draft: Draft, node: jax.Array) -> jax.Array:
    """int32 ``[B]``, the depth of ``node`` int32 ``[B]``."""
    depth = trees.depths(draft)
    return at_node(jnp.broadcast_to(depth, (len(node), depth.shape[1])), node)


def at_node(x: jax.Array, node: jax.Array) -> jax.Array:
    """``x[b, node[b]]``, ``[B, ...]``, of ``x`` ``[B, N, ...]`` and ``node`` int32 ``[B]``."""
    shape = (-1,) + (1,) * (x.ndim - 1)
    return jnp.take_along_axis(x, node.reshape(shape), axis=1, mode="clip")[:, 0]


def verdict(draft: Draft, node: jax.Array, token: jax.Array) -> Verdict:
    """The path to ``node`` int32 ``[B]``, then ``token`` int32 ``[B]``."""
    path, depth = trees.path_to(draft, node)
    return Verdict(path=path, count=depth, token=token.astype(jnp.int32))


def longest(draft: Draft, passes: jax.Array, score: jax.Array | None = None) -> jax.Array:
    """The end of the longest path from the root on which all nodes pass, int32 ``[B]``.

    Args:
      passes: bool ``[B, N]``; that of the root does not matter.
      score: float32 ``[B, N]``; of equally long paths that with the greatest sum is taken, of equal
        ones (and where None) the first.
    """
    if draft.topology == trees.chain_parents(draft.num_nodes - 1):
        lasting = jnp.cumprod(passes[:, 1:].astype(jnp.int32), axis=1)
        return jnp.sum(lasting, axis=1).astype(jnp.int32)
    above = trees.ancestors(draft)
    lawful = jnp.all(passes.at[:, ROOT].set(True)[:, :, None] | ~above, axis=1)
    depth = jnp.where(lawful, trees.depths(draft), -1)
    if score is not None:
        deepest = depth == jnp.max(depth, axis=1, keepdims=True)
        passed = jnp.where(passes, score, 0.0).at[:, ROOT].set(0.0)
        total = jnp.sum(jnp.where(above, passed[:, :, None], 0.0), axis=1)
        return jnp.argmax(jnp.where(deepest, total, -jnp.inf), axis=1).astype(jnp.int32)
    return jnp.argmax(depth, axis=1).astype(jnp.int32)


def match(draft: Draft, choice: jax.Array) -> Verdict:
    """Descends while a child equals the token chosen at its parent.

    Args:
      choice: int32 ``[B, N]``, the token that the target says after each node.

    Equal siblings that both match are followed to the deepest end.
    """
    batch, nodes = draft.tokens.shape
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), 0), (batch, nodes))
    said = jnp.take_along_axis(choice, parent, axis=1)
    agrees = (said == draft.tokens) & eligible(draft)
    node = longest(draft, agrees)
    return verdict(draft, node, at_node(choice, node))
