"""Merging the drafts of several drafters into one tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.optional import required
from ..types import POINT_MASS, ROOT, Draft
from .ops import check_alone, max_depth, parents


def merge_drafts(*drafts: Draft, one_law: bool = False) -> Draft:
    """Returns the union of drafts with the same root; equal prefixes share their descendants.

    A token that was drawn twice stays two siblings (*twins*): dropping the second draw would bias
    recursive rejection, whose residual must shrink once for every draw. Only the first twin gets
    children, those of both twins, because after one twin was rejected the other is never accepted.
    (``kseq`` may accept it, and continues with the children of all twins.)

    Siblings drawn ``iid`` become ``mixed``, because they may have several laws.

    Args:
      drafts: at least one draft; all have the same root in each row.
      one_law: whether all drafts are independent draws of one drafter, so that siblings have the
        same law; they then stay ``iid``.

    Raises:
      ValueError: the drafts were drawn in ways that cannot be merged, or several of them have laws
        over vocabularies that may differ.
    """
    first = drafts[0]
    lawful = [d for d in drafts if d.laws is not None]
    draws = {d.draws for d in lawful}
    if draws <= {"iid", "mixed"}:
        together = "iid" if draws <= {"iid"} and (one_law or len(drafts) == 1) else "mixed"
    elif draws == {"distinct"} or len(drafts) == 1:
        (together,) = draws
    else:
        raise ValueError(
            f"merge: the drafts are drawn {', '.join(repr(d.draws) for d in lawful)}; drafts drawn "
            "'iid' or 'mixed' can be merged, and so can drafts that are all drawn 'distinct'"
        )
    if one_law and (together != "iid" or 0 < len(lawful) < len(drafts)):
        raise ValueError(
            "merge: one_law=True is about independent draws of one drafter ('iid'); they are "
            f"drawn {', '.join('from no law' if d.laws is None else repr(d.draws) for d in drafts)}"
        )
    if len(lawful) > 1 and any(d.vocab is not None for d in lawful):
        raise ValueError(
            "merge: several drafts have laws, some over a vocabulary of their own; scatter those "
            "laws to the target's vocabulary first"
        )
    for draft in drafts:
        check_alone("merge", draft)
    batch = first.tokens.shape[0]
    tokens, laws, offset, num_laws = [first.tokens[:, :1]], [], 0, 0
    # the round is empty only if every draft asks for an empty round
    ones = jnp.ones((batch, 1), bool)
    speaks = [ones if d.candidate is None else d.candidate[:, :1] for d in drafts]
    scored, candidate = [ones], [jnp.any(jnp.stack(speaks), axis=0)]
    parent, law = [jnp.full((batch, 1), -1, jnp.int32)], [jnp.full((batch, 1), POINT_MASS)]
    for draft in drafts:
        count = draft.num_nodes - 1
        above = jnp.broadcast_to(parents(draft), draft.tokens.shape)[:, 1:]
        tokens.append(draft.tokens[:, 1:])
        parent.append(jnp.where(above == ROOT, ROOT, above + offset))
        full = jnp.ones((batch, count), bool)
        scored.append(full if draft.scored is None else draft.scored[:, 1:])
        candidate.append(full if draft.candidate is None else draft.candidate[:, 1:])
        if draft.laws is None:
            law.append(jnp.full((batch, count), POINT_MASS))
        else:
            own = required(draft.law, "draft.law")[:, 1:]
            law.append(jnp.where(own == POINT_MASS, POINT_MASS, own + num_laws))
            laws.append(draft.laws)
            num_laws += draft.laws.shape[1]
        offset += count
    tokens, parent = jnp.concatenate(tokens, axis=1), jnp.concatenate(parent, axis=1)
    nodes = tokens.shape[1]
    index, able = jnp.arange(nodes), jnp.concatenate(candidate, axis=1)
    scored = jnp.concatenate(scored, axis=1)

    def settle(node, carry):
        """Makes the parent's first twin the parent of ``node``; finds the node's first twin."""
        parent, rep = carry
        above = jnp.take_along_axis(rep, jnp.maximum(parent[:, node], 0)[:, None], axis=1)[:, 0]
        parent = parent.at[:, node].set(above)
        twin = (parent == above[:, None]) & (tokens == tokens[:, node][:, None])
        twin &= (index <= node) & (index > ROOT) & (able == able[:, node][:, None])
        twin &= scored == scored[:, node][:, None]  # a node that is not scored gets no children
        return parent, rep.at[:, node].set(jnp.argmax(twin, axis=1).astype(jnp.int32))

    rep = jnp.zeros_like(parent)
    parent, _ = jax.lax.fori_loop(1, nodes, settle, (parent, rep))
    return dataclasses.replace(
        first,
        tokens=tokens,
        parent=parent,
        scored=scored,
        candidate=able,
        law=jnp.concatenate(law, axis=1).astype(jnp.int32) if laws else None,
        laws=jnp.concatenate(laws, axis=1) if laws else None,
        vocab=lawful[0].vocab if lawful else None,
        topology=None,
        draws=together,
        deepest=max(max_depth(d) for d in drafts),
        guess=None,
        hidden=None,  # whether one of several could be hidden, says nothing of the others
        partial=None,  # a partial pass is over the nodes of one draft
    )
