"""Operations on drafts as trees: construction, depths, ancestor masks, paths.

A chain is the tree with ``parent[n] = n - 1``; the draft of plain decoding is the tree with one
node, the root.
"""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.optional import required
from ..types import DRAWS, POINT_MASS, ROOT, Context, Draft


def whole(number, what: str) -> int:
    """Returns an integer of any type as an ``int``.

    Raises:
      ValueError: it is another number, or a truth value.
    """
    try:
        if isinstance(number, bool | np.bool_):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{what}: {number!r} is no whole number") from None


def check_parents(parents) -> tuple[int, ...]:
    """Validates static parents and returns them as a tuple of ints.

    Args:
      parents: the parent of each node, N integers; ``parents[0] = -1`` is the root's.

    Raises:
      ValueError: an entry is no whole number, the first one is not -1, or a parent does not come
        before its child.
    """
    parents = tuple(whole(p, "topology") for p in parents)
    if not parents or parents[0] != -1:
        raise ValueError(f"topology={parents}: it must begin with the root, whose parent is -1")
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"topology: node {node} has parent {parent}; a parent must be in [0, {node - 1}], "
                "since nodes are listed from the root down"
            )
    return parents


def chain_parents(num_draft: int) -> tuple[int, ...]:
    """Returns the parents of a chain with ``num_draft`` tokens after the root."""
    return tuple(range(-1, num_draft))


def is_chain(draft: Draft) -> bool:
    """Returns whether a draft is a chain in every row, as its static ``topology`` states."""
    return draft.topology == chain_parents(draft.num_nodes - 1)


def chain_draft(
    context: Context,
    tokens: jax.Array,
    laws: jax.Array | None = None,
    candidate=None,
    scored=None,
    vocab=None,
) -> Draft:
    """Builds a chain of drafted tokens below the root.

    Args:
      context: what the drafter was given; its root becomes node 0.
      tokens: int32 ``[B, N - 1]``, the drafted tokens in order.
      laws: probabilities float32 ``[B, N - 1, Vq]``, the law from which each token was drawn; None:
        the tokens are a function of the context (point masses).
      candidate: bool ``[B, N - 1]``, whether a node may be accepted; None: all may.
      scored: bool ``[B, N - 1]``, whether a node goes through the target's pass; None: all do.
      vocab: int32 ``[Vq]`` or ``[B, Vq]``, see ``tree_draft``.

    Raises:
      ValueError: ``tokens`` are of another shape or dtype.

    Example::

        trees.chain_draft(context, jnp.stack([first, second], axis=1))  # each int32 [B]
    """
    _check_tokens("chain_draft", context, tokens)
    count = tokens.shape[1]
    law = None if laws is None else jnp.arange(count)[None].repeat(tokens.shape[0], axis=0)
    return tree_draft(
        context,
        tokens,
        chain_parents(count),
        law=law,
        laws=laws,
        candidate=candidate,
        scored=scored,
        vocab=vocab,
    )


def tree_draft(
    context: Context,
    tokens: jax.Array,
    parent,
    *,
    law=None,
    laws=None,
    candidate=None,
    scored=None,
    vocab=None,
    draws="iid",
    deepest=None,
) -> Draft:
    """Builds a tree of drafted tokens below the root.

    Nodes deeper than ``context.width``, where it is not None, are left out by ``limit_depth``.

    Args:
      context: what the drafter was given; its root becomes node 0.
      tokens: int32 ``[B, N - 1]``, the tokens of nodes 1 to N - 1, as ids of the target.
      parent: the parent of each node: a tuple of N ints (a static topology) or int32 ``[B, N]``;
        the root's is -1.
      law: int32 ``[B, N - 1]``, the row of ``laws`` from which each token was drawn; -1 for a point
        mass.
      laws: probabilities float32 ``[B, Q, Vq]``; None: all tokens are point masses.
      candidate: bool ``[B, N - 1]``, whether a node may be accepted; None: all may.
      scored: bool ``[B, N - 1]``, whether a node goes through the target's pass; None: all do.
      vocab: int32 ``[Vq]`` or ``[B, Vq]``, the target's id of each entry of a law; None: laws are
        over the target's vocabulary.
      draws: how siblings with laws were drawn: ``iid``, ``mixed``, ``distinct`` or ``hub``; see
        ``Draft``.
      deepest: a bound of the depths of all candidates; None: see ``Draft``.

    Raises:
      ValueError: ``tokens`` are of another shape or dtype, only one of ``law`` and ``laws`` is
        given, ``draws`` is unknown, or a candidate of a static tree is deeper than ``deepest``.
    """
    _check_tokens("tree_draft", context, tokens)
    if draws not in DRAWS:
        raise ValueError(f"tree: draws={draws!r} is unknown; known: {', '.join(DRAWS)}")
    if (law is None) != (laws is None):
        raise ValueError(
            "tree: law and laws belong together; a token that was not drawn from a law has law=-1"
        )
    static_parent = not isinstance(parent, jax.Array | np.ndarray)
    if vocab is not None:
        vocab = jnp.broadcast_to(vocab, (tokens.shape[0], vocab.shape[-1])).astype(jnp.int32)

    def below(x, root):
        if x is None:
            return None
        first = jnp.full((x.shape[0], 1), root, x.dtype)
        return jnp.concatenate([first, x], axis=1)

    draft = Draft(
        start=context.length - 1,
        tokens=jnp.concatenate([context.root[:, None], tokens.astype(jnp.int32)], axis=1),
        parent=None if static_parent else jnp.asarray(parent),
        scored=below(scored, True),
        candidate=below(candidate, True),
        law=below(law, POINT_MASS),
        laws=laws,
        vocab=vocab,
        topology=check_parents(parent) if static_parent else None,
        draws=draws,
        deepest=deepest,
    )
    if static_parent and candidate is None and deepest is not None:
        most = max_depth(dataclasses.replace(draft, deepest=None))
        if deepest < most:
            raise ValueError(f"tree: deepest={deepest}, but a candidate has the depth {most}")
    return draft if context.width is None else limit_depth(draft, context.width)


def limit_depth(draft: Draft, most: jax.Array) -> Draft:
    """Returns a draft without what is deeper than ``most``, int32 scalar or int32 ``[B]``.

    Deeper nodes are no candidates, and unless they are passengers they are not scored.
    """
    wanted = depths(draft) <= jnp.reshape(most, (-1, 1))
    wanted = jnp.broadcast_to(wanted, draft.tokens.shape)
    stays = wanted if draft.candidate is None else wanted | ~draft.candidate
    return dataclasses.replace(
        draft,
        scored=stays if draft.scored is None else draft.scored & stays,
        candidate=wanted if draft.candidate is None else draft.candidate & wanted,
    )


def parents(draft: Draft) -> jax.Array:
    """Returns int32 ``[1 or B, N]``, the parent of each node; the root's is -1."""
    if draft.topology is not None:
        return jnp.asarray([draft.topology], jnp.int32)
    return required(draft.parent, "draft.parent")


def max_depth(draft: Draft) -> int:
    """Returns a bound of the depth of the draft's candidates, a Python int."""
    most = draft.num_nodes - 1
    if draft.topology is not None:
        most = int(_static(draft.topology)[1].max())
    return most if draft.deepest is None else min(most, draft.deepest)


def ancestors(draft: Draft) -> jax.Array:
    """Returns bool ``[1 or B, N, N]``: entry ``[b, m, n]`` tells whether node ``m`` is ``n`` or an
    ancestor of ``n``. A node whose parent is -1 has none; the passes of drafters may have several.
    """
    if draft.topology is not None:
        return jnp.asarray(_static(draft.topology)[0])[None]
    above = parents(draft)  # each node's ancestor, 1, 2, 4 ... levels up; above a root itself
    above = jnp.where(above < 0, jnp.arange(draft.num_nodes), above)
    reach = jnp.broadcast_to(jnp.eye(draft.num_nodes, dtype=bool), (*above.shape, draft.num_nodes))
    for _ in range((draft.num_nodes - 1).bit_length()):  # paths double in length
        reach |= jnp.take_along_axis(reach, above[:, None, :], axis=2)
        above = jnp.take_along_axis(above, above, axis=1)
    return reach


def depths(draft: Draft) -> jax.Array:
    """Returns int32 ``[1 or B, N]``, the depth of each node; the root has depth 0."""
    if draft.topology is not None:
        return jnp.asarray(_static(draft.topology)[1])[None]
    return jnp.sum(ancestors(draft), axis=1).astype(jnp.int32) - 1


def path_to(draft: Draft, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the path from the root down to a node.

    Args:
      draft: the draft.
      node: int32 ``[B]``.

    Returns:
      the nodes of the path int32 ``[B, D + 1]`` and the depth of ``node`` int32 ``[B]``. After the
      last node of the path stand zeros, or in a chain the rest of the chain.
    """
    if is_chain(draft):
        # Constants: XLA removes the gathers along them. With ``where(steps <= node, steps, 0)``
        # LLVM miscompiled the gather of a chain of one draft for AVX-512 from 32 rows on: of two
        # packed 32-bit indices it did not mask the first, which then addressed 16 GiB too far
        # (jaxlib 0.10.2; tests/chain_of_one.py).
        steps = jnp.arange(max_depth(draft) + 1, dtype=jnp.int32)
        return jnp.broadcast_to(steps, (len(node), len(steps))), node
    above = _column(ancestors(draft), node)  # [B, N]
    depth = jnp.broadcast_to(depths(draft), above.shape)
    steps = jnp.arange(max_depth(draft) + 1)
    here = above[:, None, :] & (depth[:, None, :] == steps[:, None])  # [B, D + 1, N]
    path = jnp.sum(jnp.where(here, jnp.arange(draft.num_nodes), 0), axis=-1).astype(jnp.int32)
    return path, jnp.sum(above, axis=1).astype(jnp.int32) - 1


def paths_through(topology: tuple[int, ...]) -> np.ndarray:
    """Returns bool ``[N, K]``: whether the path to each of the K leaves of a static tree runs
    through each node."""
    leaves = [node for node in range(len(topology)) if node not in topology]
    return _static(topology)[0][:, leaves]


def prefix_tokens(draft: Draft, node: jax.Array) -> jax.Array:
    """Returns the tokens on the path from the root, which is excluded, to a node.

    Args:
      draft: the draft.
      node: int32 ``[B]``.

    Returns:
      int32 ``[B, N]``: the token of each node on the path, -1 at other nodes. The tokens stand in
      the order of the path, because parents come before their children.
    """
    above = _column(ancestors(draft), node)
    return jnp.where(above & (jnp.arange(draft.num_nodes) > ROOT), draft.tokens, -1)


def narrow(draft: Draft, nodes: int) -> Draft:
    """Returns the draft of the first ``nodes`` nodes.

    These nodes are a tree, because parents come before their children.
    """

    def cut(x):
        return None if x is None else x[:, :nodes]

    partial, vectors = draft.partial, draft.vectors
    if partial is not None:
        partial = dataclasses.replace(partial, place=cut(partial.place))
    if vectors is not None:
        vectors = dataclasses.replace(vectors, index=cut(vectors.index))
    return dataclasses.replace(
        draft,
        tokens=cut(draft.tokens),
        parent=cut(draft.parent),
        scored=cut(draft.scored),
        candidate=cut(draft.candidate),
        law=cut(draft.law),
        topology=None if draft.topology is None else draft.topology[:nodes],
        partial=partial,
        vectors=vectors,
    )


def check_alone(called: str, draft: Draft) -> None:
    """Raises ``ValueError`` for a draft with vectors, which is put together with no other one."""
    if draft.vectors is not None:
        raise ValueError(
            f"{called}: a draft with vectors of its own (as that of 'pass') stands alone; take "
            "this drafter by itself, or another one"
        )


def _check_tokens(hook: str, context: Context, tokens) -> None:
    """Raises ``ValueError`` unless drafted tokens are int32 (or int64) ``[B, N - 1]``."""
    shape, dtype = np.shape(tokens), getattr(tokens, "dtype", type(tokens).__name__)
    rows = context.length.shape[0]
    if len(shape) != 2 or shape[0] != rows or dtype not in (jnp.int32, jnp.int64):
        raise ValueError(
            f"{hook}: tokens is {dtype} of shape {[*shape]}: expected int32 of shape [{rows}, N - "
            "1], a column for each drafted token; jnp.stack(..., axis=1) makes it of columns [B]"
        )


def _column(mask: jax.Array, node: jax.Array) -> jax.Array:
    """Returns ``mask[b, :, node[b]]``, ``[B, N]``, for a mask ``[1 or B, N, N]``."""
    batch = node.shape[0]
    mask = jnp.broadcast_to(mask, (batch,) + mask.shape[1:])
    return jnp.take_along_axis(mask, node[:, None, None], axis=2)[:, :, 0]


def _static(topology: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ancestor matrix bool ``[N, N]`` and the depths int32 ``[N]`` of a static tree."""
    nodes = len(topology)
    above = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(topology):
        if parent >= 0:
            above[:, node] |= above[:, parent]
    return above, above.sum(axis=0).astype(np.int32) - 1
