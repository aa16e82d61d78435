"""Walks down a draft, shared by the rules.

Nodes are listed from the root down and siblings in draw order. So the next child of a node is the
first node after the last visited child that has this node as its parent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import trees
from ..types import ROOT, Draft, Verdict


def eligible(draft: Draft) -> jax.Array:
    """Returns bool ``[B, N]``: the nodes that may be accepted.

    The root, passengers, nodes that are not scored, and nodes with the token -1 (nothing could be
    drawn) may not be accepted.
    """
    able = (jnp.arange(draft.num_nodes) > ROOT) & (draft.tokens >= 0)
    for mask in (draft.candidate, draft.scored):
        able = able if mask is None else able & mask
    return able


def passengers(draft: Draft) -> jax.Array | None:
    """bool ``[B, N]``: nodes that are scored and may not be accepted; None: there are none."""
    if draft.candidate is None:
        return None
    riding = ~draft.candidate & (jnp.arange(draft.num_nodes) > ROOT)
    return riding if draft.scored is None else riding & draft.scored


def next_child(draft: Draft, at: jax.Array, after: jax.Array, able: jax.Array):
    """Returns the first child of a node, among those that may be accepted.

    Args:
      draft: the draft.
      at: int32 ``[B]``, the node.
      after: int32 ``[B]``, a node; only children with a greater index are considered.
      able: bool ``[B, N]``, the nodes that may be accepted, see ``eligible``.

    Returns:
      the child int32 ``[B]``, and bool ``[B]``, whether there is such a child.
    """
    index = jnp.arange(draft.num_nodes)
    child = able & (trees.parents(draft) == at[:, None]) & (index > after[:, None])
    first = jnp.min(jnp.where(child, index, draft.num_nodes), axis=1).astype(jnp.int32)
    return jnp.minimum(first, draft.num_nodes - 1), first < draft.num_nodes


def has_children(draft: Draft, able: jax.Array) -> jax.Array:
    """Returns bool ``[B, N]``: the nodes with a child in ``able`` bool ``[B, N]``."""
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), ROOT), able.shape)
    rows = jnp.arange(able.shape[0])[:, None]
    return jnp.zeros(able.shape, bool).at[rows, parent].max(able)


def descend(draft: Draft, visit) -> tuple[jax.Array, jax.Array]:
    """Walks from the root down, with one visit for each node, until a visit accepts no child.

    Args:
      draft: the draft.
      visit: ``node int32 [B] -> (child int32 [B], found bool [B], rest float32 [B, V])``: the
        accepted child, whether there is one, and the weights of the next token if there is none.

    Returns:
      the last node int32 ``[B]``, and its weights float32 ``[B, V]``.
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
    """Walks from the root down, as long as a child has the token that the target selects.

    Args:
      draft: the draft.
      say: ``node int32 [B] -> token int32 [B]``, the token that the target selects after the node.

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
    """Returns int32 ``[B]``, the depth of ``node`` int32 ``[B]``; the root has depth 0."""
    depth = trees.depths(draft)
    return at_node(jnp.broadcast_to(depth, (len(node), depth.shape[1])), node)


def at_node(x: jax.Array, node: jax.Array) -> jax.Array:
    """Returns ``x[b, node[b]]``, ``[B, ...]``, for ``x`` ``[B, N, ...]`` and ``node`` int32
    ``[B]``."""
    shape = (-1,) + (1,) * (x.ndim - 1)
    return jnp.take_along_axis(x, node.reshape(shape), axis=1, mode="clip")[:, 0]


def verdict(draft: Draft, node: jax.Array, token: jax.Array) -> Verdict:
    """Returns the verdict that accepts the path to ``node`` and emits ``token`` after it.

    Args:
      draft: the draft.
      node: int32 ``[B]``, the last accepted node; the root if no draft is accepted.
      token: int32 ``[B]``, the correction or bonus token; -1 for none.

    Raises:
      ValueError: while tracing: ``token`` is not of an integer dtype.
    """
    if not jnp.issubdtype(token.dtype, jnp.integer):
        raise ValueError(
            f"walk.verdict: token is {token.dtype.name}: expected int32, as drawing.draw returns it"
        )
    path, depth = trees.path_to(draft, node)
    return Verdict(path=path, count=depth, token=token.astype(jnp.int32))


def longest(draft: Draft, passes: jax.Array, score: jax.Array | None = None) -> jax.Array:
    """Returns int32 ``[B]``, the last node of the longest path from the root whose nodes all pass.

    Args:
      draft: the draft.
      passes: bool ``[B, N]``; the entry of the root is ignored.
      score: float32 ``[B, N]``: among equally long paths, the path with the greatest sum of scores
        is taken. With equal sums, or with None, the first path is taken.
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
    """Returns the verdict that descends while a child has the token chosen at its parent.

    If equal siblings match, the longest path below any of them is taken.

    Args:
      draft: the draft.
      choice: int32 ``[B, N]``, the token that the target selects after each node.
    """
    batch, nodes = draft.tokens.shape
    parent = jnp.broadcast_to(jnp.maximum(trees.parents(draft), 0), (batch, nodes))
    said = jnp.take_along_axis(choice, parent, axis=1)
    agrees = (said == draft.tokens) & eligible(draft)
    node = longest(draft, agrees)
    return verdict(draft, node, at_node(choice, node))
