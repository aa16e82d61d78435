"""Drafting a tree, for any method that can say logits below a node.

A method brings one function::

    level(carry, grown, since) -> (logits float32 [B, W, V] or [B, 1, V], carry)

called once a depth, the root first. ``grown`` is a ``Draft`` of the nodes that have children, as
far as they are known: M of them, node 0 the root; ``since:`` are those of this depth, W = M -
since. Row ``w`` of the logits is about the token below node ``since + w``; one row stands for all
nodes of the depth. ``carry`` holds whatever the method keeps of the nodes, M of them: a recurrent
state is gathered by ``trees.parents(grown)``, a model passes ``grown`` to its own ``verify``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..sampling import drawing
from ..sampling.distribution import COLDEST
from ..sampling.noise import least
from ..types import ROOT, Context, Draft
from .confidence import is_sure, thresholds
from .copies import with_copies
from .grown import Beams, Expand, Follow
from .levels import Words, adjusted_logits, if_wanted, probabilities, scores
from .topology import Tree

HOW = ("top", "iid", "distinct", "hub")


def check_sibling_sampling(sibling_sampling: str, topology: trees.Topology) -> None:
    """Raises ValueError for an unknown way to pick children, or one that a topology forbids."""
    if sibling_sampling not in HOW:
        raise ValueError(
            f"sibling_sampling={sibling_sampling!r} is unknown; accepted: {', '.join(HOW)}"
        )
    if sibling_sampling != "top" and not isinstance(topology, Tree):
        raise ValueError(
            f"sibling_sampling={sibling_sampling!r} with {topology}: a tree that "
            "follows what was drawn would bias the rules that trust q; draw in a "
            "static tree, or take sibling_sampling='top'"
        )
    if sibling_sampling == "hub" and isinstance(topology, Tree) and max(topology.ranks) > 1:
        raise ValueError(
            f"sibling_sampling='hub' draws pairs of siblings; a node of {topology} has more than "
            "two children: give another tree, or sibling_sampling='distinct'"
        )


def expand(
    topology,
    context: Context,
    level,
    carry,
    *,
    sibling_sampling: str = "top",
    words: Words | None = None,
    least: jax.Array | None = None,
):
    """Drafts a tree below each row's root.

    Args:
      topology: see ``topology.py``.
      level: the method, see above.
      carry: its state before the root was looked at.
      words: of the drafter, whose logits are ``[.., Vd]`` then, and so are the laws of the draft;
        None: the target's vocabulary.
      sibling_sampling: ``top``: the r-th child of a node is the r-th best token below it, a
        function of the context. ``iid``, ``distinct``: children are drawn, with or without
        replacement, from the law of the request's settings, and the draft states these laws.
        ``hub``: they are drawn in pairs, see ``drawing.draw_hub``. At temperature 0 ``top``.
      least: float32 ``[B]`` or None; a threshold by row for cumulative confidence: in a static tree
        as a ``Confidence`` along the path, which keeps the last children; a tree that the drafter
        grows stops in rows whose most probable path of the last depth has a lower value.

    Where a rule shares its noise (``context.noise``), the r-th child is the token with the r-th
    least ``E / q``, whatever ``sibling_sampling`` says (where each path has noise of its own: the
    token with the least of the child's own paths), and the draft states no laws.

    Where ``context.copy_bonus`` is given, logits are those of ``level`` with that bonus on what
    stood in the text before (``copies.py``).

    Where ``context.width`` is given, depths beyond it are not looked at; nor, in a static chain,
    those for which ``context.stop_drafting`` holds. Where ``context.confidence`` is given, nothing
    is drafted below unsure nodes of a static tree; a tree that follows what is probable grows on in
    rows in which any node of the last depth is sure.

    Returns:
      ``(draft, carry, place)``; ``carry`` has all M nodes that were gone on with, and ``place``
      int32 ``[1 or B, N]`` says where a node of the draft is among them, -1 if it is not.
    """
    check_sibling_sampling(sibling_sampling, topology)
    if context.copy_bonus is not None:
        level = with_copies(level, context, words)
    own = context.noise is not None and context.noise.by_path
    if own and not isinstance(topology, Tree):
        raise ValueError(
            f"rule='gls' with {topology}: each path of a static tree has noise of its own, so give "
            "a static tree, or rule='coupled'"
        )
    if isinstance(topology, Follow):
        return _follow(topology, context, level, carry, words)
    if not isinstance(topology, Tree):
        return _expand(topology, context, level, carry, words, least)
    if context.sampling.greedy or context.noise is not None:
        sibling_sampling = "top"
    return _static(topology, context, level, carry, words, sibling_sampling, own, least)


# ------------------------------------------------------------------------------- static trees


def _static(topology: Tree, context, level, carry, words, sibling_sampling, by_path, least_sure):
    parents, depths = np.asarray(topology.parents), np.asarray(topology.depths)
    inner = np.unique(parents[1:])  # nodes with children, level by level
    below = np.searchsorted(inner, parents)  # of a node: its parent, counted among those
    batch = context.tokens.shape[0]
    tokens = context.root[:, None]
    drawn = sibling_sampling != "top"
    uniform = drawing.uniforms(context.key, topology.num_nodes) if drawn else None
    laws, ends = [], thresholds(context, least_sure)
    going = context.asked_rows[:, None]  # of the nodes of a depth: whether anything is below them
    path, kept = jnp.ones(going.shape), []
    for depth in range(topology.depth):
        here = inner[depths[inner] == depth]
        known = inner[depths[inner] <= depth]
        since = len(known) - len(here)
        above = (-1, *(int(n) for n in below[known[1:]]))
        grown = Draft(start=context.length - 1, tokens=tokens[:, known], topology=above)
        step = functools.partial(level, since=since)
        wanted: jax.Array | bool = True
        if context.stop_drafting is not None and depth:
            wanted = jnp.any(~context.stop_drafting(tokens[:, 1:]) & context.asked_rows)
        if ends and depth:
            wanted = wanted & jnp.any(going)
        logits, carry = if_wanted(step, depth, context.width, carry, grown, wanted)
        children = np.flatnonzero(depths == depth + 1)
        parent = below[children] - since  # column of this level
        rank = np.asarray(topology.ranks)[children]
        if ends:
            on, stays, path = is_sure(ends, logits, path)
            on &= going
            kept.append((going & stays)[:, parent])
            parents_below = below[inner[depths[inner] == depth + 1]] - since
            going, path = on[:, parents_below], path[:, parents_below]
        if by_path:
            q = probabilities(context, grown, since, logits, words)
            q = jnp.broadcast_to(q, (batch, len(here), q.shape[2]))[:, parent]
            paths = trees.paths_through(topology.parents)[children]
            chosen = _least_by_path(context, depth, q, paths, words)
        elif not drawn:
            logits = scores(context, grown, since, logits, words)
            best = drawing.best(logits, int(rank.max()) + 1)  # [B, W or 1, K]
            chosen = best[:, parent if best.shape[1] > 1 else np.zeros_like(parent), rank]
        else:
            q = probabilities(context, grown, since, logits, words)
            q = jnp.broadcast_to(q, (batch, len(here), q.shape[2]))
            laws.append(q)
            drawing_by = required(uniform, "uniform")[:, children]
            chosen = _draw(q, parent, rank, drawing_by, sibling_sampling)
        chosen = chosen if words is None else words.of(chosen)
        tokens = jnp.concatenate([tokens, chosen], axis=1)
    proposed = jnp.concatenate(kept, axis=1) if kept else None
    draft = trees.tree_draft(
        context,
        tokens[:, 1:],
        topology.parents,
        candidate=proposed,
        scored=proposed,
        law=jnp.broadcast_to(below[1:], (batch, len(below) - 1)) if drawn else None,
        laws=jnp.concatenate(laws, axis=1) if drawn else None,
        vocab=words.ids if drawn and words is not None else None,
        draws=sibling_sampling if drawn else "iid",
    )
    place = np.full(len(parents), -1)
    place[inner] = np.arange(len(inner))
    return draft, carry, jnp.asarray(place, jnp.int32)[None]


def _least_by_path(context, depth, q, paths, words):
    """The token of each child with the least ``E / q`` over its own paths, int32 ``[B, C]``.

    ``q``: float32 ``[B, C, V]``; ``paths``: bool ``[C, K]``, of each child.
    """
    noise, position = context.noise, context.length + depth
    chosen = []
    for child, own in enumerate(paths):
        own = jnp.broadcast_to(own, (len(q), len(own)))
        vocab = q.shape[2] if words is None else words.size
        there = noise.least_of(position, vocab, own)
        chosen.append(least(q[:, child], there if words is None else there[:, words.ids]))
    return jnp.stack(chosen, axis=1)


def _draw(q, parent, rank, uniform, sibling_sampling):
    """One token a child from the law of its parent, siblings in order, int32 ``[B, C]``.

    A law with fewer tokens than distinct siblings gives -1, which no rule looks at.
    """
    chosen: dict[int, jax.Array] = {}  # by the index of the child
    order = range(len(parent))
    if sibling_sampling == "hub":
        first = np.flatnonzero(rank == 0)
        last = np.searchsorted(parent, parent[first], side="right") - 1  # itself if it is alone
        both = jnp.stack([uniform[:, first], uniform[:, last]], axis=2)
        pairs = jax.vmap(drawing.draw_hub, in_axes=1, out_axes=1)(q[:, parent[first]], both)
        for i, child in enumerate(first):
            chosen[int(last[i])], chosen[int(child)] = pairs[:, i, 1], pairs[:, i, 0]
        return jnp.stack([chosen[child] for child in order], axis=1)
    draw = jax.vmap(drawing.draw, in_axes=1, out_axes=1)
    rows = jnp.arange(q.shape[0])[:, None]
    left = q
    for r in range(rank.max() + 1):
        which = np.flatnonzero(rank == r)
        said = draw(left[:, parent[which]], uniform[:, which])
        for i, child in enumerate(which):
            chosen[int(child)] = said[:, i]
        if sibling_sampling == "distinct":
            gone = jnp.where(said < 0, q.shape[2], said)
            left = left.at[rows, parent[which], gone].set(0.0, mode="drop")
    return jnp.stack([chosen[child] for child in order], axis=1)


# ------------------------------------------------------------------ trees grown by probability


def _expand(topology: Expand | Beams, context, level, carry, words, least_value):
    nodes, gain, branch, siblings, sharpness = 0, 0.0, 0.0, 0, 1.0
    batch, width = context.tokens.shape[0], topology.width
    children = topology.children
    if isinstance(topology, Expand):
        nodes, gain, branch = topology.nodes, topology.gain, topology.branch
        siblings, sharpness = topology.siblings, topology.sharpness
    # all paths looked at, node 0 is the root: the last token, its parent, the path's value (nats)
    tokens = context.root[:, None]
    parent = jnp.full((batch, 1), -1, jnp.int32)
    value = jnp.zeros((batch, 1))
    where = jnp.zeros((batch, 1), jnp.int32)  # of the nodes gone on with: in those three
    above = parent  # their parents, counted among themselves
    alive, ends = context.asked_rows, thresholds(context)
    # Whether a row is expected to lack nodes at times: then passes that no row wants are left out,
    # and the target's is as narrow as it can be. Otherwise the nodes that a row may still lack,
    # below fewer tokens than children, are scored as those of static trees are.
    may_lack = bool(gain or branch or ends) or context.sampling.adjusts
    may_lack |= any(x is not None for x in (least_value, context.width, context.noise))
    path = jnp.ones((batch, 1))  # of those of the last depth: see `is_sure`
    for depth in range(topology.depth):
        wide = 1 if depth == 0 else width
        since = where.shape[1] - wide
        grown = Draft(
            start=context.length - 1,
            tokens=jnp.take_along_axis(tokens, where, axis=1),
            parent=above,
        )
        wanted = jnp.any(alive) if may_lack else True
        step = functools.partial(level, since=since)
        logits, carry = if_wanted(step, depth, context.width, carry, grown, wanted)
        here = where[:, since:]
        going = alive
        if ends:
            real = jnp.take_along_axis(value, here, axis=1) > -jnp.inf
            on, stays, path = is_sure(ends, logits, path)
            alive &= jnp.any(on & real, axis=1)
            going &= jnp.any(stays & real, axis=1)
        logits = scores(context, grown, since, logits, words)
        best, worth = drawing.likeliest(_sharpened(logits, sharpness, context), children)
        if branch:
            opens = (jnp.arange(children) == 0) | (worth >= np.log(branch))
            worth = jnp.where(opens, worth, -jnp.inf)
        best = best if words is None else words.of(best)
        best, worth = (jnp.broadcast_to(x, (batch, wide, children)) for x in (best, worth))
        worth = worth + jnp.take_along_axis(value, here, axis=1)[:, :, None]
        worth = jnp.where(going[:, None, None], worth, -jnp.inf)
        if context.width is not None:
            worth = jnp.where(depth < context.width, worth, -jnp.inf)
        # The next depth extends `width` paths. Where fewer were found, impossible ones fill up.
        if wide * children < width:
            more = ((0, 0), (0, 0), (0, width - children))
            best, worth = jnp.pad(best, more), jnp.pad(worth, more, constant_values=-jnp.inf)
        columns = best.shape[2]
        first = tokens.shape[1]
        tokens = jnp.concatenate([tokens, best.reshape(batch, -1)], axis=1)
        known, value = value, jnp.concatenate([value, worth.reshape(batch, -1)], axis=1)
        parent = jnp.concatenate([parent, jnp.repeat(here, columns, axis=1)], axis=1)
        if least_value is not None:
            alive &= jnp.max(worth, axis=(1, 2)) >= jnp.log(least_value)
        if gain:
            alive &= _kept(value, nodes) - _kept(known, nodes) >= gain
        if depth + 1 < topology.depth or isinstance(topology, Beams):
            _, on = jax.lax.top_k(worth.reshape(batch, -1), width)
            on = jnp.sort(on, axis=1)  # children of one node stay side by side
            where = jnp.concatenate([where, on + first], axis=1)
            above = jnp.concatenate([above, since + on // columns], axis=1)
            path = jnp.take_along_axis(path, on // columns, axis=1)
    order = value
    if siblings:  # a node is kept for the value of the node above it
        above_it = jnp.take_along_axis(value, jnp.maximum(parent, 0), axis=1)
        order = jnp.where(value > -jnp.inf, above_it, -jnp.inf)
    kept = where if isinstance(topology, Beams) else _most_probable(order, nodes)
    rank = jnp.zeros(tokens.shape, jnp.int32)
    rows = jnp.arange(batch)[:, None]
    rank = rank.at[rows, kept].set(jnp.arange(topology.num_nodes, dtype=jnp.int32))
    parent = jnp.take_along_axis(rank, jnp.take_along_axis(parent, kept, axis=1), axis=1)
    real = jnp.take_along_axis(value, kept, axis=1)[:, 1:] > -jnp.inf
    chosen = jnp.where(real, jnp.take_along_axis(tokens, kept, axis=1)[:, 1:], -1)
    draft = trees.tree_draft(
        context,
        chosen,
        # what is no path hangs below the root, the others before it
        jnp.concatenate([jnp.full((batch, 1), -1), jnp.where(real, parent[:, 1:], ROOT)], axis=1),
        scored=real if may_lack else None,
        candidate=real if may_lack else None,
        deepest=topology.depth,
    )
    looked = jnp.full(tokens.shape, -1, jnp.int32)
    where = where[:, : 1 + width * (topology.depth - 1)]  # the last beams were not looked below
    looked = looked.at[rows, where].set(jnp.arange(where.shape[1], dtype=jnp.int32))
    return draft, carry, jnp.take_along_axis(looked, kept, axis=1)


def _sharpened(logits, sharpness: float, context):
    """``logits [B, W, V]`` as ``Expand.sharpness`` says, by which paths get their values."""
    if sharpness == 1 or context.noise is not None:  # shared noise decides at any temperature
        return logits
    if context.sampling.greedy:
        return logits * sharpness
    cold = context.sampling.temperature < COLDEST
    return logits * jnp.where(cold, sharpness, 1.0)[:, None, None]


def _most_probable(value, nodes):
    """int32 ``[B, nodes + 1]``: the root and the ``nodes`` most probable below it, in the order in
    which they were found: parents first, siblings by rank. Ties fall to the earlier, so a parent is
    kept wherever its child is."""
    _, kept = jax.lax.top_k(value[:, 1:], nodes)
    kept = jnp.sort(kept, axis=1) + 1
    return jnp.concatenate([jnp.zeros((len(kept), 1), kept.dtype), kept], axis=1)


def _kept(value, nodes):
    """``[B]``, the sum of the ``nodes`` greatest path probabilities below the root."""
    below = value[:, 1:]
    if not below.shape[1]:
        return jnp.zeros(len(value))
    best, _ = jax.lax.top_k(below, min(nodes, below.shape[1]))
    return jnp.sum(jnp.exp(best), axis=1)


# --------------------------------------------------------------------------------- measuring


def _follow(topology: Follow, context, level, carry, words):
    where = context.length[:, None] - 1 + jnp.arange(topology.depth)
    path = jnp.take_along_axis(context.tokens, where, axis=1, mode="clip")
    chosen = []
    for depth in range(topology.depth):
        chain = trees.chain_parents(depth)
        grown = Draft(start=context.length - 1, tokens=path[:, : depth + 1], topology=chain)
        logits, carry = level(carry, grown, depth)
        logits = adjusted_logits(context, grown, depth, logits, words)
        best = drawing.best(logits, topology.ranks)[:, 0]
        chosen.append(best if words is None else words.of(best))
    flat = (-1, *(ROOT,) * (topology.num_nodes - 1))
    draft = trees.tree_draft(context, jnp.concatenate(chosen, axis=1), flat)
    return draft, carry, jnp.full((1, topology.num_nodes), -1, jnp.int32)
