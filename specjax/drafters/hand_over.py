"""Handing what a sub-network computed of a draft to the target's pass (``Draft.partial``).

A drafter that runs the target's first layers has read all nodes that it drafted below. One more
pass of these layers reads the others; the target's pass then runs the other layers alone. In a
chain, and in a static tree that is drafted whole, no layer runs twice for one node. In other trees
it differs by row which nodes were read, so that the last pass reads all of them.

References: LayerSkip, arXiv 2404.16710, section 4.3; Kangaroo, arXiv 2404.18911.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..types import Context, Draft, PartialPass, PyTree, Scores


def wanted_depth(draft: Draft, context: Context, width: jax.Array | None) -> jax.Array | None:
    """The depth to which a draft is to be scored.

    Args:
      draft: as it was drafted.
      context: of the round.
      width: int32 or int32 ``[B]``, the depth that the drafter knows of; None: all of the draft.

    Returns:
      int32 ``[B]`` where rows end early by ``context.confidence``, else ``width``.
    """
    if context.confidence is None or draft.scored is None:
        return width
    ends = jnp.max(jnp.where(draft.scored, trees.depths(draft), 0), axis=1)
    return ends.astype(jnp.int32)


def hand_over(
    run: Callable[..., Scores],
    topology: trees.Topology,
    draft: Draft,
    entries: PyTree,
    width: jax.Array | None,
) -> Draft:
    """Runs the sub-network over the nodes that it has not read, for the target to go on from.

    Args:
      run: ``SubNetwork.verify``, called as ``run(draft, since=, entries=, logits=False)``.
      topology: that was drafted.
      draft: of N nodes.
      entries: of the passes in which it was drafted.
      width: see ``wanted_depth``.

    Returns:
      the draft, with ``partial``.
    """
    block, since, place = _lacking(topology, draft, width)
    before = entries if since else None
    made = run(block, since=since, entries=before, logits=False).entries
    return dataclasses.replace(draft, partial=PartialPass(entries=made, place=place))


def _lacking(topology, draft: Draft, width):
    """What the last pass reads: the nodes below which nothing was drafted.

    Args:
      topology: that was drafted.
      width: the depth of the draft, int32 or int32 ``[B]``; None: that of the topology.

    Returns:
      the nodes that were gone on with and then those that are lacking, a draft; the number of the
      former; and int32 ``[1 or B, N]``, where among them the nodes of ``draft`` are, or None.
    """
    count = draft.num_nodes
    if not isinstance(topology, trees.Tree) or (width is not None and topology.depth < count - 1):
        return dataclasses.replace(draft, law=None, laws=None), 0, None  # they differ by row
    if width is not None:  # the last wanted node of a chain
        index = jnp.arange(count, dtype=jnp.int32)[None]
        last = jnp.minimum(width, count - 1).astype(jnp.int32)
        last = jnp.broadcast_to(last, draft.start.shape)[:, None]
        own = jnp.take_along_axis(draft.tokens, last, axis=1)
        tokens = jnp.concatenate([draft.tokens[:, :-1], own], axis=1)
        parent = jnp.where(index < count - 1, index, last) - 1
        block = Draft(start=draft.start, tokens=tokens, parent=parent)
        return block, count - 1, jnp.where(index < last, index, count - 1)
    parents = np.asarray(topology.parents)
    inner = np.unique(parents[1:])
    order = np.concatenate([inner, np.setdiff1d(np.arange(count), inner)])
    place = np.argsort(order)
    above = (-1, *(int(n) for n in place[parents[order[1:]]]))
    block = Draft(start=draft.start, tokens=draft.tokens[:, order], topology=above)
    in_order = bool((place == np.arange(count)).all())
    return block, len(inner), None if in_order else jnp.asarray(place, jnp.int32)[None]
