"""The side branches of a ``Cascade``, which make its text a tree (StagedSpec).

    root ── x_1 ── x_2 ── x_3        the text of the outer model, its spine
       └ s_1   └ s_2   └ s_3         side branches of one token each

The outer model scores its whole text to write it, so its law below each token of the spine is
known, and side branches cost no further pass of it. The law of x_i is q(. | x_1 ... x_{i-1}); the
side branches beside x_i are drawn from the same law without replacement, after x_i was drawn::

    q(s | x_1 ... x_{i-1}, x_i) = q(s | x_1 ... x_{i-1}) / (1 - q(x_i | x_1 ... x_{i-1})),  s != x_i

with random numbers of their own. So the siblings are ``distinct`` draws (see ``Draft.draws``)
whose first is x_i, whatever drafted for the outer model.

At temperature 0 they are its next most probable tokens, unless other rows of the batch have a
temperature: then the law of a greedy row has no second token to draw. Where a rule shares its
noise, they are those with the next least ``E / q``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..acceptance.node_laws import TargetLaw
from ..sampling import drawing
from ..sampling.noise import Noise
from ..types import Context, Draft

SIDES = 2**32 - 2  # folded into a key of the round, where the outer text folds smaller numbers


def check_tree(tree, depth: int) -> None:
    """Raises ValueError for a tree that is no spine of ``depth`` tokens with side branches of one
    token."""
    what = f"Cascade(tree={tree})"
    if not isinstance(tree, trees.Tree):
        raise ValueError(
            f"{what}: the outer model generates a text, which is a chain, with branches beside "
            "it; give a static tree, such as trees.comb(3, 6)"
        )
    if tree.depth != depth:
        raise ValueError(
            f"{what}: it is {tree.depth} tokens deep, and the outer drafter drafts {depth}; give "
            f"both the same depth, or with_topology(tree)"
        )
    above = np.asarray(tree.parents)[1:]
    if not spine(tree)[above].all():
        raise ValueError(
            f"{what}: the outer model generates a text, which is a chain, and knows no law below "
            "a token beside it; let only the first child of a node have children, as in "
            f"trees.comb(3, {depth}) (as words: 'comb:3x{depth}'), or give the outer drafter alone"
        )


def check_noise(noise: Noise, tree: trees.Tree | None) -> None:
    """Raises ValueError for noise by path, as the outer text is one path."""
    if noise.by_path and tree is not None:
        raise ValueError(
            f"rule='gls' with Cascade(tree={tree}): each path of a tree has noise of its own, and "
            "the outer model's text is one path; give rule='coupled', or leave tree out"
        )


def spine(tree: trees.Tree) -> np.ndarray:
    """bool ``[N]``: the root, its first child, the first child of that, and so on."""
    found = np.zeros(tree.num_nodes, bool)
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        found[node] = parent < 0 or (rank == 0 and found[parent])
    return found


def most_siblings(tree: trees.Tree) -> int:
    """How many children a node has at most."""
    return 1 + max(tree.ranks)


def best_at(
    p: TargetLaw, node: jax.Array, context: Context, position: jax.Array, count: int
) -> jax.Array:
    """The tokens that come first below a node of the outer text where nothing is drawn.

    Args:
      p: the laws of the outer model.
      node: int32 ``[B]``.
      context: of the round.
      position: int32 ``[B]``, that of the token below the node.
      count: how many tokens.

    Returns:
      int32 ``[B, count]``, the first before the others, -1 where there are no more.
    """
    if context.noise is None:
        return drawing.best(p.adjusted_at(node), count)
    q = p(node)
    return drawing.best(jnp.log(q) - jnp.log(context.noise.at(position, q.shape[1])), count)


def tree_draft(
    context: Context,
    tree: trees.Tree,
    tokens: jax.Array,
    proposed: jax.Array,
    laws: jax.Array | None,
    best: jax.Array | None,
) -> Draft:
    """The text of the outer model with its side branches.

    Args:
      context: of the round.
      tree: one that ``check_tree`` admits, of depth K.
      tokens: int32 ``[B, K]``, the text.
      proposed: bool ``[B, K]``, which of its tokens, and of the branches beside them, may be
        accepted.
      laws: float32 ``[B, K, V]``, from which the text was drawn; None: it was not.
      best: int32 ``[B, K, C]`` from ``best_at``, where ``laws`` is None.
    """
    depth, rank = (np.asarray(x)[1:] for x in (tree.depths, tree.ranks))
    width = most_siblings(tree)
    sides = _drawn(context, tokens, laws, width) if best is None else _others(tokens, best)
    sides = jnp.concatenate([tokens[:, :, None], sides], axis=2)  # [B, K, width]
    kept = proposed[:, depth - 1]
    law = jnp.broadcast_to(jnp.asarray(depth - 1, jnp.int32), kept.shape)
    return trees.tree_draft(
        context,
        sides[:, depth - 1, rank],
        tree.parents,
        candidate=kept,
        scored=kept,
        law=None if laws is None else law,
        laws=laws,
        draws="iid" if laws is None else "distinct",
    )


def _drawn(context: Context, tokens, laws, width: int) -> jax.Array:
    """Further tokens from each law without replacement, int32 ``[B, K, width - 1]``; -1 where a law
    has no more."""
    batch, depth = tokens.shape
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.key, jnp.uint32(SIDES))
    uniform = drawing.uniforms(keys, depth * (width - 1)).reshape(batch, depth, width - 1)
    draw = jax.vmap(drawing.draw, in_axes=1, out_axes=1)
    rows, steps = jnp.arange(batch)[:, None], jnp.arange(depth)
    left, last, found = laws, tokens, []
    for r in range(width - 1):
        gone = jnp.where(last < 0, laws.shape[2], last)
        left = left.at[rows, steps, gone].set(0.0, mode="drop")
        last = draw(left, uniform[:, :, r])
        found.append(last)
    return jnp.stack(found, axis=2)


def _others(tokens, best) -> jax.Array:
    """``best`` int32 ``[B, K, C]`` without the token that was taken, int32 ``[B, K, C - 1]``."""
    taken = best == tokens[:, :, None]
    # where a rule that is not lossless took another token, the last one is left out
    place = jnp.where(jnp.any(taken, axis=2), jnp.argmax(taken, axis=2), best.shape[2] - 1)
    index = jnp.arange(best.shape[2] - 1)
    index = index + (index >= place[:, :, None])
    return jnp.take_along_axis(best, index, axis=2)


def accepted_spine(tree: trees.Tree, path: jax.Array, count: jax.Array) -> jax.Array:
    """How many accepted tokens are those of the outer text, int32 ``[B]``.

    Args:
      tree: the tree.
      path: int32 ``[B, D + 1]``, the accepted nodes from the root down.
      count: int32 ``[B]``, their number without the root; -1 where nothing happened.
    """
    on = jnp.asarray(spine(tree))[path[:, 1:]]
    on &= jnp.arange(on.shape[1]) < count[:, None]
    return jnp.minimum(jnp.sum(on, axis=1, dtype=jnp.int32), count)
