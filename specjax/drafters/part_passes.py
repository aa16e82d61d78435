"""Drafting by passes of a part of the target, which end where the part is unsure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from .._internal.pytree import filled, pytree_dataclass
from ..acceptance.walk import eligible
from ..trees import expand
from ..types import Context, Draft, PyTree, Scores
from .base import check_field
from .confidence_stop import ConfidenceStop


class DraftsByPart(Protocol):
    """The settings of a drafter that drafts by passes of a part of the target."""

    @property
    def topology(self) -> trees.Topology | None: ...

    @property
    def picks(self) -> str: ...

    @property
    def stop(self) -> ConfidenceStop | None: ...


def check_stop(drafter: DraftsByPart) -> None:
    """Raises ValueError where a tree is to be stopped, and TypeError for another ``stop``."""
    accepted = "confidence_stop.ConfidenceStop(threshold=...) of specjax.drafters, or None"
    check_field(drafter, "stop", ConfidenceStop | None, accepted)
    topology = required(drafter.topology, "topology")
    if drafter.stop is not None and topology != trees.chain(topology.depth):
        raise ValueError(
            f"{type(drafter).__name__}(stop=..., topology={topology}): confidence stops chains; "
            "leave one of the two out"
        )


def draft_by_part(
    run: Callable[..., Scores], drafter: DraftsByPart, state, context: Context
) -> tuple[Draft, PyTree, jax.Array | None, PyTree]:
    """Drafts a chain or a tree by passes of a part of the target.

    Args:
      run: ``SubNetwork.verify``, called as ``run(draft, since=, entries=)``.
      drafter: the topology, the way to pick children, and where a chain ends.
      state: of the drafter; with ``stop``, a ``StopState``.
      context: of the round.

    Returns:
      the draft; the part's entries of the nodes that it has read; the depth that was drafted, int32
      or int32 ``[B]``, or None for all of the topology; and the state.
    """

    def level(entries, grown, since):
        scores = run(grown, since=since, entries=entries)
        return scores.logits, scores.entries

    def grow(level):
        topology = required(drafter.topology, "topology")
        return expand.expand(topology, context, level, None, sibling_sampling=drafter.picks)

    if drafter.stop is None:
        draft, entries, _ = grow(level)
        return draft, entries, context.width, state
    draft, sure, _ = grow(_while_sure(level, state.threshold, context.asked_rows))
    state = dataclasses.replace(state, offered=sure.offered)
    return trees.limit_depth(draft, sure.offered), sure.entries, sure.offered, state


def observe_stop(drafter: DraftsByPart, state, segment, most: int):
    """Returns the state after a segment: the threshold of ``stop`` follows what was accepted.

    Args:
      drafter: see ``draft_by_part``.
      state: its state.
      segment: what was committed.
      most: the number of tokens that a round offers if it is not stopped.
    """
    if drafter.stop is None or segment.round is None:
        return state
    draft, verdict, _ = segment.round  # of its own nodes, where others proposed too
    deepest = jnp.max(jnp.where(eligible(draft), trees.depths(draft), 0), axis=1)
    whole, offered = state.offered >= most, jnp.minimum(state.offered, deepest)
    accepted = jnp.clip(jnp.minimum(segment.num - 1, verdict.count), 0, offered)
    state = dataclasses.replace(state, offered=offered)
    return drafter.stop.update(state, accepted, segment.num > 0, whole)


@pytree_dataclass
class Sure:
    """What is known of a chain that is drafted while the drafter is sure.

    Attributes:
      entries: of the sub-network.
      logits: float32 ``[B, V]`` below the last node that was looked at.
      on: bool ``[B]``, whether the row goes on.
      offered: int32 ``[B]``, the tokens that it proposes so far.
    """

    entries: PyTree
    logits: jax.Array
    on: jax.Array
    offered: jax.Array


def _while_sure(level, threshold, live):
    """``level`` for ``expand``, which leaves out passes that no row wants."""

    def step(carry, grown, since):
        if since == 0:
            logits, entries = level(None, grown, since)
            offered = live.astype(jnp.int32)
            return logits, Sure(entries=entries, logits=logits[:, 0], on=live, offered=offered)
        said = jax.nn.softmax(carry.logits, axis=-1)
        last = jnp.take_along_axis(said, grown.tokens[:, since:], axis=1, mode="clip")[:, 0]
        on = carry.on & (last >= threshold)
        after = jax.eval_shape(lambda: level(carry.entries, grown, since))

        def rest():
            logits, entries = after
            zeros = jnp.zeros(logits.shape, logits.dtype)
            return zeros, jax.tree.map(filled, carry.entries, entries)

        logits, entries = jax.lax.cond(
            jnp.any(on), lambda: level(carry.entries, grown, since), rest
        )
        offered = carry.offered + on
        return logits, Sure(entries=entries, logits=logits[:, 0], on=on, offered=offered)

    return step
