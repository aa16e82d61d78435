"""What a drafter learns of a round in which others proposed too.

Its own nodes stand somewhere among the nodes of the round. It is shown a verdict that reaches as
far as its own nodes are what was committed; and one that reads all nodes (``reads_nodes``) is shown
the scores at its own ones, which are those of a round of its own: a node sees its ancestors alone.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..types import ROOT, Draft, Drafter, Scores, Segment, Verdict


def scores_of(scores: Scores, nodes: np.ndarray, features: slice | None = None) -> Scores:
    """The scores at some nodes of a round, for ``readout``.

    Args:
      scores: of all N nodes.
      nodes: int ``[M]``, the nodes in question, the root first. Of a round without a draft, which
        is the root alone, the root is taken.
      features: which of the hidden states belong to the drafter; None: all.

    Returns:
      the scores of M nodes, without the entries of the target's cache.
    """

    def pick(x):
        if x is None:
            return None
        here = nodes[nodes < x.shape[1]]
        return x if len(here) == x.shape[1] else x[:, here]

    own = pick(scores.features)
    if own is not None and features is not None:
        own = own[:, :, features]
    return Scores(logits=pick(scores.logits), features=own, entries=None)


def round_of(
    inner: Drafter,
    segment: Segment,
    draft: Draft | None,
    scores: Scores | None,
    nodes: np.ndarray,
) -> Segment:
    """The segment for a drafter whose draft was a part of what a round proposed.

    Args:
      inner: the drafter.
      segment: of the whole round.
      draft: what ``inner`` proposed, with token -1 and not scored where that is not in the round;
        None: a round without a draft.
      scores: at the nodes of ``draft``, of a drafter that reads all nodes; else None.
      nodes: int ``[M]``, where the M nodes of ``draft`` stand in the whole round, the root first.
    """
    whole, verdict, _ = required(segment.round, "segment.round")
    if draft is None:
        said = None if scores is None else inner.readout(whole, scores)
        return dataclasses.replace(segment, round=(whole, verdict, said))
    own, said = _reached(segment, verdict, draft), None
    if scores is not None:
        if whole.scored is not None:  # a wrapper may have cut what was put together
            scored = whole.scored[:, nodes]
            scored = scored if draft.scored is None else scored & draft.scored
            draft = dataclasses.replace(draft, scored=scored)
        said = inner.readout(draft, scores)
    return dataclasses.replace(segment, round=(draft, own, said))


def _reached(segment: Segment, verdict: Verdict, draft: Draft) -> Verdict:
    """The verdict as far as the nodes of ``draft`` are what was committed."""
    deepest = trees.max_depth(draft)
    above = jnp.broadcast_to(trees.parents(draft), draft.tokens.shape)
    index = jnp.arange(draft.num_nodes)
    node = jnp.zeros_like(verdict.count)
    going = verdict.count > 0
    path, count = [node], jnp.minimum(verdict.count, 0)
    for depth in range(1, deepest + 1):
        said = segment.tokens[:, min(depth, segment.tokens.shape[1] - 1)]
        mine = (above == node[:, None]) & (draft.tokens == said[:, None]) & (index > ROOT)
        going &= jnp.any(mine, axis=1) & (depth <= verdict.count)
        node = jnp.where(going, jnp.argmax(mine, axis=1).astype(jnp.int32), node)
        count = count + going
        path.append(node)
    return Verdict(path=jnp.stack(path, axis=1), count=count, token=verdict.token)
